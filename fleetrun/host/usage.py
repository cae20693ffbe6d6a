"""The resources that ranks use on this host, from /proc: processor time, memory, threads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from fleetrun.run import proc

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """The resources of a process and its descendants; shared memory counts for each."""

    # The letter of the leader's state.
    state: str
    # Processor time since they began, in seconds.
    cpu_s: float
    resident_bytes: int
    threads: int
    processes: int


def of(leaders: Iterable[int]) -> dict[int, Usage]:
    """Return the usage of each of LEADERS that is alive, with its family."""
    wanted = set(leaders)
    if not wanted:
        return {}
    everybody = proc.all_processes()
    own = {process.pid: process for process in everybody}
    return {
        leader: Usage(
            state=own[leader].state,
            cpu_s=sum(process.cpu_s for process in members),
            resident_bytes=sum(process.resident_pages for process in members) * _PAGE,
            threads=sum(process.threads for process in members),
            processes=len(members),
        )
        for leader, members in proc.families(everybody, wanted).items()
        if leader in own
    }


def percent(before: tuple[float, float] | None, now: tuple[float, float]) -> float | None:
    """Return the use of processors between two looks: monotonic and processor seconds of each.

    >>> percent((10.0, 3.0), (12.0, 4.0)), percent(None, (12.0, 4.0))
    (50.0, None)
    """
    if before is None or now[0] <= before[0]:
        return None
    return max(0.0, 100 * (now[1] - before[1]) / (now[0] - before[0]))
