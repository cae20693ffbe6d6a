"""Hosts by ssh in tests: a real sshd for each connection, or a program instead of ssh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkout import ROOT
from commandline import Command
from ports import free
from processes import MARKER
from sshd_hosts import SSHD, configure

# Two hosts on loopback, each with an address to itself.
HOSTS = "127.0.0.1,127.0.0.2"


def ssh_option(folder: Path, marker: str, greeting: str = "") -> str:
    """Return --ssh for an ssh whose every connection has an sshd of its own, on a pipe."""
    server = f'ForceCommand echo {greeting}; eval "$SSH_ORIGINAL_COMMAND"\n' if greeting else ""
    client = f"""\
Host nowhere
  ProxyCommand echo no route to it >&2; false
Host *
  ProxyCommand {SSHD} -i -f {folder}/sshd_config
"""
    made = configure(folder, server, client, **{MARKER: marker, "PYTHONPATH": str(ROOT)})
    return f"--ssh=ssh -F {made}"


def by_ssh(
    folder: Path, script: str, *options: str, hosts: str = HOSTS, greeting: str = ""
) -> Command:
    """Return the command of a job on HOSTS, one rank on each."""
    if not SSHD:
        pytest.skip("there is no sshd here (Debian: apt install openssh-server)")
    if os.geteuid() == 0:
        # The privilege separation folder of root's sshd, which any running sshd has.
        Path("/run/sshd").mkdir(exist_ok=True)
    command = Command(folder, script, ranks=1)
    ssh = ssh_option(folder / "ssh", command.marker, greeting)
    port = f"--start_port={free(1)[0]}"
    command.argv[-1:-1] = [f"--hosts={hosts}", ssh, port, *options]
    return command


def instead_of_ssh(folder: Path, script: str) -> str:
    """Return the option for a program that does SCRIPT where ssh would connect."""
    path = folder / "instead"
    path.write_text(f"#!/bin/sh\nfor command; do :; done\n{script}\n")
    path.chmod(0o755)
    return f"--ssh={path}"


def by_instead(
    folder: Path, ssh: str, script: str, *options: str, hosts: str = "127.0.0.1"
) -> Command:
    """Return the command of a job on HOSTS, one rank on each, where SSH is done instead of ssh."""
    command = Command(folder, script, ranks=1)
    # A host alone takes no port that a test holds.
    port = [f"--start_port={free(1)[0]}"] if "," in hosts else []
    command.argv[-1:-1] = [f"--hosts={hosts}", instead_of_ssh(folder, ssh), *port, *options]
    return command
