"""TCP ports of this host: which are in use, and by whom."""

from __future__ import annotations

import os

from fleetrun.host import files
from fleetrun.run import proc

# The kernel's default range of ports for outgoing connections.
_EPHEMERAL = (32768, 60999)
# Who holds a port, if that is not ours to know.
STRANGER = "a process that only root can identify"


def ephemeral(root: str = "/") -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    try:
        text = files.text(os.path.join(root, "proc/sys/net/ipv4/ip_local_port_range"))
        low, high = (int(word) for word in text.split())
    except ValueError:
        return _EPHEMERAL
    return low, high


def used() -> frozenset[int]:
    """Return the local TCP ports in use, read without opening anything."""
    ports = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in files.text(path).splitlines()[1:]:
            local = line.split(None, 2)[1]
            ports.add(int(local.rpartition(":")[2], 16))
    return frozenset(ports)


def holder(port: int) -> str | None:
    """Name the process that holds TCP port PORT: `pid 123 (python train.py)`."""
    # Only a fault needs it, and it takes 25 ms to import.
    import psutil

    # Ports that launchers hold for their ranks show as abstract sockets of this name.
    reserved = f"@fleetrun/port/{port}"
    for kind in ("tcp", "unix"):
        for connection in psutil.net_connections(kind):
            local = connection.laddr
            held = str(local) == reserved if not isinstance(local, tuple) else local[1:] == (port,)
            # Lingering connections no longer belong to a process.
            if held and connection.pid is not None:
                command = proc.command(connection.pid)
                return f"pid {connection.pid}" + (f" ({command})" if command else "")
    return None
