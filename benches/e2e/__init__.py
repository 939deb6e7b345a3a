"""End-to-end benchmarks: r3router, its peers and a bare relay in turn, on one machine, in one run."""
