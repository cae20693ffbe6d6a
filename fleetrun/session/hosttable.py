"""The hosts that a coordinator knows, by their launchers: immutable, and cheap to change one of.

With each message one of them changes, of which there may be ten thousand. A changed table shares
all but a small part with the one before, and knows the counts that a decision for all hosts needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    from fleetrun.session.seating import Host

    # None: the place of one that is gone.
    Blocks: TypeAlias = tuple[tuple[Host | None, ...], ...]

# A change copies one block and the list of blocks: at ten thousand hosts, both are about as long.
_BLOCK = 128


class Tally(NamedTuple):
    """How many hosts are connected, have joined the next generation, or have a place in this one.

    The last three count hosts with a place, by what they have said of this generation.
    """

    connected: int = 0
    here: int = 0
    seated: int = 0
    ready: int = 0
    done: int = 0
    stopped: int = 0


def _marks(host: Host) -> tuple[bool, ...]:
    """Return for what HOST counts, in the order of Tally."""
    is_connected, is_seated = host.connection is not None, host.is_seated
    return (
        is_connected,
        is_connected and host.is_joined,
        is_seated,
        is_seated and host.is_ready,
        is_seated and host.is_done,
        is_seated and host.is_stopped,
    )


class HostTable:
    """Hosts by the names of their launchers, in the order in which they came."""

    __slots__ = ("_blocks", "_places", "tally")

    def __init__(self, places: dict[str, int], blocks: Blocks, tally: Tally) -> None:
        self._places = places
        self._blocks = blocks
        self.tally = tally

    def with_host(self, host: Host) -> HostTable:
        """Return the table with HOST as it is now."""
        place = self._places.get(host.launcher)
        if place is None:
            return self._with_new(host)
        tally = _moved(self.tally, self[host.launcher], host)
        return HostTable(self._places, self._with(place, host), tally)

    def without(self, launcher: str) -> HostTable:
        """Return the table without the host of LAUNCHER."""
        place = self._places.get(launcher)
        if place is None:
            return self
        places = dict(self._places)
        del places[launcher]
        if self._end > 2 * len(places) + _BLOCK:
            # Places of those who are gone are not given again, so too many are empty by now.
            return table(host for host in self.values() if host.launcher != launcher)
        tally = _moved(self.tally, self[launcher], None)
        return HostTable(places, self._with(place, None), tally)

    def _with_new(self, host: Host) -> HostTable:
        places = {**self._places, host.launcher: self._end}
        whole = self._end // _BLOCK
        last = self._blocks[whole] if whole < len(self._blocks) else ()
        blocks = (*self._blocks[:whole], (*last, host))
        return HostTable(places, blocks, _moved(self.tally, None, host))

    def _with(self, place: int, host: Host | None) -> Blocks:
        row, column = divmod(place, _BLOCK)
        block = self._blocks[row]
        block = (*block[:column], host, *block[column + 1 :])
        return (*self._blocks[:row], block, *self._blocks[row + 1 :])

    @property
    def _end(self) -> int:
        """The place after the last one."""
        return sum(map(len, self._blocks[-1:])) + _BLOCK * max(0, len(self._blocks) - 1)

    def get(self, launcher: str) -> Host | None:
        """Return the host of LAUNCHER, if it is known."""
        place = self._places.get(launcher)
        return None if place is None else self._blocks[place // _BLOCK][place % _BLOCK]

    def __getitem__(self, launcher: str) -> Host:
        host = self.get(launcher)
        if host is None:
            raise KeyError(launcher)
        return host

    def values(self) -> Iterator[Host]:
        """Yield all hosts."""
        return (host for block in self._blocks for host in block if host is not None)

    def __contains__(self, launcher: str) -> bool:
        return launcher in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def table(hosts: Iterable[Host]) -> HostTable:
    """Return the table of HOSTS."""
    known = list(hosts)
    places = {host.launcher: place for place, host in enumerate(known)}
    firsts = range(0, len(known), _BLOCK)
    blocks = tuple(tuple(known[first : first + _BLOCK]) for first in firsts)
    counts = zip(*map(_marks, known), strict=True)
    return HostTable(places, blocks, Tally(*map(sum, counts)))


_NOTHING = (False,) * len(Tally._fields)


def _moved(tally: Tally, old: Host | None, new: Host | None) -> Tally:
    """Return TALLY where a host that was OLD is NEW; None: it is not there."""
    before = _NOTHING if old is None else _marks(old)
    after = _NOTHING if new is None else _marks(new)
    if before == after:
        return tally
    return Tally(*(one - was + now for one, was, now in zip(tally, before, after, strict=True)))


NOBODY = table(())
