"""What static programs need on builds for CPUs, which Paddle itself does not let train together."""
