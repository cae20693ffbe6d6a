"""The hosts that a coordinator knows, by their launchers; a changed table is another one.

It knows the counts that a decision for all hosts needs, as with each message one host changes, and
there may be thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fleetrun.session.seating import Host


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


class HostTable(dict[str, "Host"]):
    """Hosts by the names of their launchers, in the order in which they came; never changed."""

    __slots__ = ("tally",)

    def __init__(self, hosts: Mapping[str, Host], tally: Tally) -> None:
        super().__init__(hosts)
        self.tally = tally

    def with_host(self, host: Host) -> HostTable:
        """Return the table with HOST as it is now."""
        changed = HostTable(self, _moved(self.tally, self.get(host.launcher), host))
        changed[host.launcher] = host
        return changed

    def without(self, launcher: str) -> HostTable:
        """Return the table without the host of LAUNCHER."""
        changed = HostTable(self, _moved(self.tally, self.get(launcher), None))
        changed.pop(launcher, None)
        return changed


def table(hosts: Iterable[Host]) -> HostTable:
    """Return the table of HOSTS."""
    known = {host.launcher: host for host in hosts}
    counts = zip(*map(_marks, known.values()), strict=True)
    return HostTable(known, Tally(*map(sum, counts)))


_NOTHING = (False,) * len(Tally._fields)


def _moved(tally: Tally, old: Host | None, new: Host | None) -> Tally:
    """Return TALLY where a host that was OLD is NEW; None: it is not there."""
    before = _NOTHING if old is None else _marks(old)
    after = _NOTHING if new is None else _marks(new)
    if before == after:
        return tally
    return Tally(*(one - was + now for one, was, now in zip(tally, before, after, strict=True)))


NOBODY = table(())
