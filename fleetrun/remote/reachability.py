"""Checks that the hosts of a job reach each other: each connects to all others."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import os
from collections.abc import Sequence
from functools import partial

from fleetrun.remote.protocol import HostEndpoint
from fleetrun.run.loop import Loop
from fleetrun.run.tcpconnect import Link, TcpConnect, resolve
from fleetrun.session.connection import reason

# The kernel repeats a lost packet after 1 and 3 s.
_TIMEOUT_S = 5.0
# Connections are never accepted: the kernel completes the handshake of this many.
_MOST = 4096


class OpenPort:
    """The first free one of PORTS, to which others may connect until it is closed."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.port = 0
        self._socket: _socket.socket | None = None
        for port in ports:
            listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
                listener.listen(_MOST)
            except OSError:
                listener.close()
                continue
            self.port, self._socket = port, listener
            break

    def close(self) -> None:
        """Close the port."""
        if self._socket is not None:
            self._socket.close()


def missing(
    places: Sequence[HostEndpoint], timeout_s: float = _TIMEOUT_S
) -> tuple[tuple[str, str], ...]:
    """Return those of PLACES that cannot be connected to within TIMEOUT_S: a name and why."""
    loop = Loop()
    faults: dict[HostEndpoint, str] = {}
    calls: dict[HostEndpoint, TcpConnect] = {}

    def connected(place: HostEndpoint, link: Link | None, number: int) -> None:
        del calls[place]
        if link is not None:
            link.socket.close()
        elif number == errno.ETIMEDOUT:
            faults[place] = f"no answer within {timeout_s:g} s"
        else:
            faults[place] = reason(OSError(number, os.strerror(number)))

    for place in places:
        # IPv4, like the ranks' endpoints.
        addresses = [
            address
            for address in resolve(place.address, place.port)
            if address.family == _socket.AF_INET
        ]
        if addresses:
            calls[place] = TcpConnect(addresses[0], loop, partial(connected, place), timeout_s)
        else:
            faults[place] = "its name cannot be resolved"
    while calls:
        loop.turn()
    loop.close()
    return tuple(
        (
            place.name,
            f"it does not reach {place.name} at {place.address}:{place.port} ({faults[place]}).",
        )
        for place in places
        if place in faults
    )
