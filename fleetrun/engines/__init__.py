"""Engines: each finds the hosts of a job, and the ports of their ranks, in one environment."""
