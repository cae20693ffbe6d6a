"""A real sshd on each namespace host, with temporary keys."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab import Host

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
    if not SSHD:
        import pytest  # benchmarks know what they need

        pytest.skip("there is no sshd here (Debian: apt install openssh-server)")
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
