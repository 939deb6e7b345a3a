"""What runs r3router on a cluster, without a cluster."""
