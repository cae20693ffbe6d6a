"""Launches of several processes of ours: by ssh, as a step of Slurm, or as an engine's tasks."""
