"""Checks before any rank starts that the hosts of a job reach each other's rank ports.

Each host listens on the ports that it holds for its ranks, and proves to callers that it belongs to
the job, as in the session. Afterwards the ranks listen there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest

from fleetrun.run.loop import Waiting
from fleetrun.session.authentication import Key
from fleetrun.session.codec import Codec
from fleetrun.session.connection import Connection, Wire
from fleetrun.session.dialer import Dialer, Target, in_words
from fleetrun.session.listener import EVERYWHERE, Listener
from fleetrun.session.messages import Entry

# How many endpoints a host tries, on how many hosts at least and at most, and for how long: a call
# takes both ends half a millisecond, and the kernel repeats a lost packet after a second.
_MOST, _HOSTS, _MOST_HOSTS, _WITHIN_S = 16, 3, 5, 1.0
# The most unauthenticated callers, and how long each may take.
_MOST_PENDING, _ANSWER_S = 64, 2.0
_SILENCE = f"no answer within {_WITHIN_S:g} s (is a firewall in between?)"


def chosen(entries: Sequence[Entry], own_index: int) -> tuple[Target, ...]:
    """Return the endpoints of ENTRIES that host OWN_INDEX tries: of the first host and neighbours.

    >>> from fleetrun.session.messages import Entry
    >>> entries = [Entry(name, name, name, (1, 2), ((), ())) for name in "abcd"]
    >>> [str(target) for target in chosen(entries, 1)]
    ['a:1', 'c:1', 'd:1', 'a:2', 'c:2', 'd:2']
    """
    count = len(entries)
    distances = chain.from_iterable((near, -near) for near in range(1, count))
    places = dict.fromkeys((0, *((own_index + distance) % count for distance in distances)))
    tried: list[list[Target]] = []
    for place in places:
        entry = entries[place]
        # Nothing lies between processes of one host.
        if place == own_index or entry.host == entries[own_index].host:
            continue
        is_enough = len(tried) >= _HOSTS and sum(map(len, tried)) >= _MOST
        if is_enough or len(tried) == _MOST_HOSTS:
            break
        master_ports = () if entry.master_port is None else (entry.master_port,)
        tried.append([Target(entry.host, port) for port in (*master_ports, *entry.ports)])
    in_turn = chain.from_iterable(zip_longest(*tried))
    return tuple(target for target in in_turn if target is not None)[:_MOST]


class PortCheck:
    """Listens on the ports of this host's ranks, and calls those of other hosts, which know KEY.

    ALLOWED are the addresses that may call; None: all. This host calls from SOURCE. RESOLVED are
    the addresses of host names.
    """

    def __init__(
        self,
        key: Key,
        *,
        allowed: frozenset[str] | None = None,
        source: str = "",
        resolved: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._key = key
        self._allowed = allowed
        self._source = source
        self._resolved = resolved or {}
        self._listener: Listener | None = None
        self._dialers: dict[Target, Dialer] = {}
        # The endpoints that the last check did not reach, and why.
        self.failures: dict[Target, str] = {}

    def hold(self, ports: Sequence[int], waiting: Waiting) -> None:
        """Listen on those of PORTS that are free."""
        if self._listener is not None or not ports:
            return
        self._listener = Listener(
            (EVERYWHERE,),
            ports,
            Wire(self._key, Codec(), waiting),
            opened=lambda caller: caller.close(),
            allowed=self._allowed,
            most_pending=_MOST_PENDING,
            introduction_s=_ANSWER_S,
        )
        self._listener.hold()
        self._listener.open()

    def release(self) -> None:
        """Stop listening and calling."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._dialers:
            self._waiting.timer("ports", None, self._conclude)
        for dialer in self._dialers.values():
            dialer.close()
        self._dialers.clear()

    def begin(self, targets: Sequence[Target], waiting: Waiting, done: Callable[[], None]) -> None:
        """Call all TARGETS at once; call DONE when all have answered or the time is up."""
        self._waiting, self._done = waiting, done
        self.failures = {}
        if not targets:
            done()
            return
        wire = Wire(self._key, Codec(), waiting, self._source)
        waiting.timer("ports", time.monotonic() + _WITHIN_S, self._conclude)
        for target in targets:
            addresses = [
                address for address in self._resolved.get(target.host, ()) if address[:4] != "127."
            ]
            self._dialers[target] = Dialer(
                [target._replace(host=addresses[0]) if addresses else target],
                wire,
                opened=partial(self._reached, target),
            )
        for dialer in list(self._dialers.values()):
            dialer.begin()

    def _reached(self, target: Target, connection: Connection) -> None:
        connection.close()
        self._dialers.pop(target, None)
        if not self._dialers:
            self._conclude()

    def _conclude(self) -> None:
        self._waiting.timer("ports", None, self._conclude)
        for target, dialer in self._dialers.items():
            self.failures[target] = next(iter(dialer.troubles.values()), _SILENCE)
            dialer.close()
        self._dialers.clear()
        self._done()

    def remark(self) -> str:
        """Return a sentence about what was not reached; empty if all was."""
        if not self.failures:
            return ""
        return (
            f"This host does not reach ports of other hosts' ranks: {in_words(self.failures)}. The "
            "job starts anyway, but may hang."
        )
