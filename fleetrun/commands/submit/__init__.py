"""`fleetrun submit`: writes a job for a cluster's queue, and submits it."""

from __future__ import annotations

import click

from fleetrun.commands.submit import kubernetes, slurm


@click.group("submit", no_args_is_help=False)
def command() -> None:
    """Submit a job to Slurm or Kubernetes; the words after `--` are the fleetrun command there."""


command.add_command(slurm.command)
command.add_command(kubernetes.command)
