"""TCP ports for ranks: free ones, reserved among launches, or requested ones, which are checked."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
from collections.abc import Sequence
from contextlib import closing
from itertools import islice

from fleetrun.errors import EnvironmentFault
from fleetrun.host import tcp

# Where to look for free ports: above those of services, below Kubernetes' NodePorts (30000), and
# above the kernel's default range for outgoing connections.
_PORTS = (*range(10240, 30000), *range(61000, 65536))
# Launches that start together have neighbouring process ids, which this prime sets far apart.
_STRIDE = 7919


class Ports:
    """Ports from a start that PID determines, reserved among all fleetruns until `close`.

    A TCP socket held open would keep the worker from binding, so the reservation is an abstract
    Unix socket of the port's name, in this network namespace: the kernel allows one of each, and
    drops it with its owner.
    """

    def __init__(self, pid: int, *, is_dry: bool = False) -> None:
        self._pid = pid
        self._held: list[_socket.socket] = []
        # A dry run opens nothing: it guesses what is free, and takes what is requested.
        self._guessed = set(tcp.used()) if is_dry else None

    def free(self, count: int) -> tuple[int, ...]:
        """Return COUNT ports that nobody else uses."""
        low, high = tcp.ephemeral()
        # If all are in the kernel's range, those that it has not handed out are still free.
        ports = [port for port in _PORTS if not low <= port <= high] or _PORTS
        start = self._pid * _STRIDE % len(ports)
        candidates = (*ports[start:], *ports[:start])
        # Without SO_REUSEADDR: connections of others that linger do matter.
        free = (port for port in candidates if self._reserve(port, None, reuse=False))
        chosen = tuple(islice(free, count))
        if len(chosen) < count:
            self.close()
            raise EnvironmentFault(
                f"{count} free ports are needed, and this host has only {len(chosen)} left outside "
                "the range of outgoing connections (/proc/sys/net/ipv4/ip_local_port_range)."
            )
        return chosen

    def take(self, ports: Sequence[int], address: str | None = None) -> None:
        """Make sure that PORTS can be used, on ADDRESS or on all addresses."""
        for port in ports:
            # Connections of the last run that linger do not matter.
            if not self._reserve(port, address, reuse=True):
                self.close()
                raise EnvironmentFault(
                    f"Port {port} is taken by {tcp.holder(port) or tcp.STRANGER}. Stop it, or give "
                    "another --start_port (the same on every host)."
                )

    def close(self) -> None:
        """Release the ports that were held."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _reserve(self, port: int, address: str | None, *, reuse: bool) -> bool:
        """Reserve PORT among fleetruns; False if another, or another program, has it."""
        if self._guessed is not None:
            is_free = reuse or port not in self._guessed
            self._guessed.add(port)
            return is_free
        lock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0fleetrun/port/{port}{f'/{address}' if address else ''}")
            is_free = _can_bind(port, address, reuse=reuse)
        except OSError:
            is_free = False
        if is_free:
            self._held.append(lock)
        else:
            lock.close()
        return is_free


def _can_bind(port: int, address: str | None, *, reuse: bool) -> bool:
    """Check that a server can bind PORT now, on ADDRESS or on every address."""
    # A socket for both families collides with any listener of either; there may be no IPv6.
    every = ((_socket.AF_INET6, "::"), (_socket.AF_INET, "0.0.0.0"))  # noqa: S104 - closed at once
    for family, host in every if address is None else ((_socket.AF_INET, address),):
        try:
            with closing(_socket.socket(family, _socket.SOCK_STREAM)) as server:
                server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, int(reuse))
                if family == _socket.AF_INET6:
                    server.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
                server.bind((host, port))
        except OSError as error:
            refusal = error
        else:
            return True
        if refusal.errno == errno.EADDRINUSE:
            return False
    where = f" on {address}" if address is not None else ""
    raise EnvironmentFault(f"Port {port} cannot be used{where}: {refusal.strerror}.")
