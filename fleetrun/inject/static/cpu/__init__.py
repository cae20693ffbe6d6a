"""Lets static programs train on several CPUs, which Paddle's builds do not support."""
