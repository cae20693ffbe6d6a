"""What the processes of ranks use of this host, by /proc: processor time, memory, threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.run import proc

if TYPE_CHECKING:
    from collections.abc import Iterable

_PAGE = os.sysconf("SC_PAGE_SIZE")
# In /proc/PID/stat behind the name, as proc.fields counts: threads, and resident pages.
_THREADS, _RESIDENT = 17, 21


class Usage(NamedTuple):
    """What a process and all that it has started use; memory that they share counts for each."""

    # The letter of the leader's state.
    state: str
    # All time on a processor since they began, in seconds.
    cpu_s: float
    resident_bytes: int
    threads: int
    processes: int


def of(leaders: Iterable[int]) -> dict[int, Usage]:
    """Return the usage of each of LEADERS that is alive, with its family."""
    wanted = set(leaders)
    if not wanted:
        return {}
    found: dict[int, Usage] = {}
    words: dict[int, list[bytes]] = {}
    everybody = []
    for pid in proc.pids():
        its = proc.fields(pid)
        one = proc.parsed(pid, its)
        if one is not None:
            words[pid] = its
            everybody.append(one)
    for leader, members in proc.families(everybody, wanted).items():
        own = [words[one.pid] for one in members]
        if leader in words:
            found[leader] = Usage(
                state=words[leader][0].decode(),
                cpu_s=sum(one.cpu_s for one in members),
                resident_bytes=sum(int(one[_RESIDENT]) for one in own) * _PAGE,
                threads=sum(int(one[_THREADS]) for one in own),
                processes=len(own),
            )
    return found
