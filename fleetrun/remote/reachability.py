"""Whether the hosts of a job reach each other: each tries to connect to every other one."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import os
import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.remote.protocol import HostEndpoint

# As long as a lost packet is sent again twice.
_TIMEOUT_S = 5.0
# Nobody is let in: the kernel shakes hands, and keeps so many.
_MOST = 4096


class OpenPort:
    """The first free one of PORTS of this host, which others may connect to until it is closed."""

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
        """Let nobody connect any more."""
        if self._socket is not None:
            self._socket.close()


def missing(
    places: Sequence[HostEndpoint], timeout_s: float = _TIMEOUT_S
) -> tuple[tuple[str, str], ...]:
    """Return those of PLACES that cannot be connected to within TIMEOUT_S: a name and why."""
    faults: dict[str, str] = {}
    waiting: dict[int, tuple[HostEndpoint, _socket.socket]] = {}
    poll = select.poll()
    for place in places:
        try:
            family, _, _, _, where = _socket.getaddrinfo(
                place.address, place.port, _socket.AF_INET, _socket.SOCK_STREAM
            )[0]
        except OSError as error:
            faults[place.name] = f"its name cannot be resolved: {error.strerror}"
            continue
        made = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
        code = made.connect_ex(where)
        if code in {0, errno.EINPROGRESS}:
            waiting[made.fileno()] = place, made
            poll.register(made, select.POLLOUT)
        else:
            faults[place.name] = os.strerror(code).lower()
            made.close()
    until = time.monotonic() + timeout_s
    while waiting and (left := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            place, made = waiting.pop(fd)
            code = made.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
            if code:
                faults[place.name] = os.strerror(code).lower()
            poll.unregister(made)
            made.close()
    for place, made in waiting.values():
        faults[place.name] = f"no answer within {timeout_s:g} s"
        with suppress(OSError):
            made.close()
    found = []
    for place in places:
        if place.name in faults:
            where_to = f"{place.name} at {place.address}:{place.port}"
            found.append((place.name, f"it does not reach {where_to} ({faults[place.name]})."))
    return tuple(found)
