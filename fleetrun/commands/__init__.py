"""What the command line does besides launching: one module for each command, read by click."""
