"""Checks of a host for a job: each is a function that reads, judges and names the fix."""
