"""Hosts by ssh in tests: a real sshd for each connection or host, or a program instead of ssh."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import Command
from ports import free
from processes import MARKER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab import Host

# Two hosts on loopback, each with an address to itself.
HOSTS = "127.0.0.1,127.0.0.2"
SSHD = next((path for path in ("/usr/sbin/sshd", "/usr/bin/sshd") if Path(path).exists()), "")
SERVER = """\
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
SetEnv {variables}
"""
CLIENT = """\
Host *
  User {user}
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking no
  LogLevel ERROR
"""


def _need_sshd() -> None:
    if not SSHD:
        pytest.skip("there is no sshd here (Debian: apt install openssh-server)")


def configure(folder: Path, server: str, client: str = "", **variables: str) -> Path:
    """Make keys in FOLDER, the file of an sshd there, and that of ssh, which is returned.

    Sessions get VARIABLES. SERVER and CLIENT are lines beside the usual ones, CLIENT before them.
    """
    folder.mkdir()
    for key in ("id", "hostkey"):
        generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(generate, check=True)
    shutil.copy(folder / "id.pub", folder / "authorized_keys")
    told = " ".join(f"{name}={value}" for name, value in variables.items())
    (folder / "sshd_config").write_text(server + SERVER.format(folder=folder, variables=told))
    usual = CLIENT.format(folder=folder, user=getpass.getuser())
    (folder / "ssh_config").write_text(client + usual)
    return folder / "ssh_config"


def option(hosts: Sequence[Host], folder: Path, **variables: str) -> str:
    """Return --ssh for HOSTS on which there is an sshd; skips where there is none."""
    _need_sshd()
    return f"--ssh=ssh -F {on_hosts(hosts, folder, **variables)}"


def on_hosts(hosts: Sequence[Host], folder: Path, **variables: str) -> Path:
    """Start an sshd on each of HOSTS, which gives its sessions VARIABLES; return ssh's file."""
    made = configure(folder, "Port 22\nPidFile none\n", **variables)
    Path("/run/sshd").mkdir(exist_ok=True)
    for host in hosts:
        # A shell of ssh's reads it, and may start anything.
        host.run("mount", "--bind", "/dev/null", str(Path.home() / ".bashrc"), check=False)
        host.run(SSHD, "-f", str(folder / "sshd_config"))
    return made


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
    _need_sshd()
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
