"""r3router."""
