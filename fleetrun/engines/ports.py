"""TCP ports for ranks: free ones, reserved among launches, or requested ones, which are checked."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
from collections.abc import Iterator, Sequence
from contextlib import closing

from fleetrun.errors import EnvironmentFault
from fleetrun.host import tcp

# Where to look for free ports: above those of services, below Kubernetes' NodePorts (30000), and
# above the kernel's default range for outgoing connections.
_FIELDS = (range(10240, 30000), range(61000, 65536))
# Launches that start together have neighbouring process ids, which this prime sets far apart.
_STRIDE = 7919


class Ports:
    """Ports from a start that PID determines, reserved among all fleetruns until `close`.

    A TCP socket held open would keep the worker from binding, so the reservation is an abstract
    Unix socket of the port's name, in this network namespace: the kernel allows one of each, and
    drops it with its owner.

    EPHEMERAL is the range of outgoing connections, which is avoided; by default the kernel's.
    """

    def __init__(self, pid: int, ephemeral: tuple[int, int] | None = None) -> None:
        self._pid, self._ephemeral = pid, ephemeral
        self._held: list[_socket.socket] = []

    def free(self, count: int) -> tuple[int, ...]:
        """Return COUNT ports that nobody else uses."""
        free = filter(self._is_free, self._candidates())
        ports = tuple(port for _, port in zip(range(count), free, strict=False))
        if len(ports) < count:
            self.close()
            raise EnvironmentFault(
                f"{count} free ports are needed, and this host has only {len(ports)} left outside "
                "the range of outgoing connections (/proc/sys/net/ipv4/ip_local_port_range)."
            )
        return ports

    def _candidates(self) -> Iterator[int]:
        """Yield every port worth trying, from a place that our pid decides."""
        low, high = self._ephemeral or tcp.ephemeral()
        ports = [port for field in _FIELDS for port in field if not low <= port <= high]
        # If all are in the kernel's range, those that it has not handed out are still free.
        ports = ports or [port for field in _FIELDS for port in field]
        start = self._pid * _STRIDE % len(ports)
        yield from ports[start:]
        yield from ports[:start]

    def _is_free(self, port: int) -> bool:
        """Whether PORT is free; it is then not given out again."""
        if not self._reserve(port, None):
            return False
        if not _can_bind(port, None, reuse=False):
            self._held.pop().close()
            return False
        return True

    def take(self, ports: Sequence[int], address: str | None = None) -> None:
        """Make sure that PORTS can be used, on ADDRESS or on all addresses."""
        for port in ports:
            # With SO_REUSEADDR: connections of the last run that linger do not matter.
            if self._reserve(port, address) and _can_bind(port, address, reuse=True):
                continue
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

    def _reserve(self, port: int, address: str | None) -> bool:
        """Reserve PORT among fleetruns; False when another has it."""
        lock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        name = str(port) if address is None else f"{port}/{address}"
        try:
            lock.bind(f"\0fleetrun/port/{name}")
        except OSError as error:
            lock.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise EnvironmentFault(f"Port {port} cannot be reserved: {error.strerror}.") from None
        self._held.append(lock)
        return True


class GuessedPorts(Ports):
    """Ports for a dry run: numbers that look free, without opening anything."""

    def __init__(self, pid: int, ephemeral: tuple[int, int] | None = None) -> None:
        super().__init__(pid, ephemeral)
        self._given = set(tcp.used())

    def _is_free(self, port: int) -> bool:
        is_free = port not in self._given
        self._given.add(port)
        return is_free

    def take(self, ports: Sequence[int], address: str | None = None) -> None:  # noqa: ARG002
        """Remember PORTS; the launch will find out whether they can be used."""
        self._given.update(ports)


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
