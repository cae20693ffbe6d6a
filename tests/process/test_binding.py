"""Ranks run on the CPUs of the plan, and the launcher stays where it was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from processes import supervisor_of
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

ALLOWED = sorted(os.sched_getaffinity(0))
# Prints the CPUs that the kernel allows a process and its first child; and the number of threads.
SHOW = """
list() { sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/$1/status; }
echo "$(list $$) $(list self) ${OMP_NUM_THREADS-unset}" >draft$R
mv draft$R shown$R
until [ -e go ]; do sleep 0.01; done
"""


def shown(job: Command, ranks: int, allowed: set[int]) -> list[tuple[set[int], set[int], str]]:
    """Run JOB, whose launcher may use ALLOWED; return the output of its ranks."""
    launcher = job.start_until(*(f"shown{rank}" for rank in range(ranks)))
    # The launcher is bound to a rank's CPUs only while it starts that rank.
    until(lambda: os.sched_getaffinity(supervisor_of(launcher.pid)) == allowed)
    ended = job.release(launcher)
    assert ended.code == 0, ended.stderr
    lines = []
    for rank in range(ranks):
        own, child, threads = (job.folder / f"shown{rank}").read_text().split()
        lines.append((numbers(own), numbers(child), threads))
    return lines


def numbers(listed: str) -> set[int]:
    """Read a list of CPUs."""
    cpus: set[int] = set()
    for piece in listed.split(","):
        low, _, high = piece.partition("-")
        cpus |= set(range(int(low), int(high or low) + 1))
    return cpus


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU cannot be divided")
@pytest.mark.parametrize("how", ["cores", "numa"])
def test_s79_workers_have_cpus_of_their_own(tmp_path: Path, how: str) -> None:
    first, second = shown(Command(tmp_path, SHOW, f"--bind={how}"), 2, set(ALLOWED))
    assert not first[0] & second[0]
    assert first[0] | second[0] == set(ALLOWED)
    for own, child, threads in (first, second):
        assert child == own
        assert threads == str(len(own))
