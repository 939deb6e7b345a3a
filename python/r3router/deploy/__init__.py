"""What runs r3router on a cluster, as far as it is made from the code: the chart's schema, the dashboard and the alerts."""
