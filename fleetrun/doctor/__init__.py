"""Findings about a host for a job, each with the command that fixes it; pure."""
