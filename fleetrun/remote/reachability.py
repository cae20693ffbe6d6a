"""Checks that the hosts of a job reach each other: each connects to all others."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import os
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.run.loop import Loop
from fleetrun.session.connection import reason
from fleetrun.session.dialer import TcpConnect
from fleetrun.session.resolver import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.remote.protocol import HostEndpoint
    from fleetrun.session.connection import Link

# A lost packet is sent again after 1 and 3 s.
_TIMEOUT_S = 5.0
# Connections are not accepted: the kernel completes the handshake of this many.
_MOST = 4096


class OpenPort:
    """The first free one of PORTS, to which others may connect until it is closed."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.port = 0
        self._socket: _socket.socket | None = None
        for port in ports:
            made = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            made.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            try:
                made.bind(("", port))
                made.listen(_MOST)
            except OSError:
                made.close()
                continue
            self.port, self._socket = port, made
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
        # As the endpoints of ranks are.
        found = [one for one in resolve(place.address, place.port) if one.family == _socket.AF_INET]
        if found:
            calls[place] = TcpConnect(found[0], loop, partial(connected, place), timeout_s)
        else:
            faults[place] = "its name cannot be resolved"
    while calls:
        loop.turn()
    loop.close()
    return tuple(
        (one.name, f"it does not reach {one.name} at {one.address}:{one.port} ({faults[one]}).")
        for one in places
        if one in faults
    )
