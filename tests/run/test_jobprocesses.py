"""Which processes the hunt kills, and which it must spare."""

from __future__ import annotations

import os
import signal

import pytest

from fleetrun.run import proc
from fleetrun.run.jobprocesses import of_job
from fleetrun.run.proc import Stat


def process(pid: int, parent: int, group: int | None = None) -> Stat:
    return Stat(pid, "S", parent, pid, 0.0, started=pid, group=pid if group is None else group)


@pytest.mark.parametrize(
    ("seen", "before", "killed"),
    [
        # 12 has left its session and its environment behind, and so did its child.
        ([(10, 1), (11, 10), (12, 11), (13, 12), (30, 1), (31, 30)], [], [10, 11, 12, 13]),
        # This process is one of them, and spared.
        ([(10, 1), (os.getpid(), 10)], [], [10]),
        # The rank, 9, died with its group; its child 12 has no mark and another parent by now.
        ([(12, 1), (10, 8, 9)], [(9, 1, 9), (12, 9)], [9, 10, 12]),
    ],
)
def test_the_marked_and_their_descendants_die_and_nobody_else(
    seen: list[tuple[int, ...]], before: list[tuple[int, ...]], killed: list[int]
) -> None:
    groups = {process(*fields).group for fields in seen if fields[0] == 10}
    members = of_job(
        [process(*fields) for fields in seen], [process(*fields) for fields in before], {10}, groups
    )
    assert sorted(member.pid for member in members) == killed


def test_a_later_process_with_the_same_id_gets_no_signal() -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    seen = proc.stat(pid)
    assert seen is not None
    proc.send(seen._replace(started=seen.started - 1), signal.SIGKILL)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    proc.send(seen, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
