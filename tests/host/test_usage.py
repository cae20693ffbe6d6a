"""A rank's usage includes all processes that it has started."""

from __future__ import annotations

import subprocess
import sys

from waiting import until

from fleetrun.host import usage

# Starts a child that holds memory, as a data loader does, and works a little.
CODE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "held = bytearray(64 << 20); input()"],
    stdin=subprocess.PIPE)
sum(range(3_000_000))
print(flush=True)
input()
"""


def test_a_family_is_counted_as_one() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    leader.stdout.readline()

    def used() -> usage.Usage:
        return usage.of([leader.pid, 2**22 + 1])[leader.pid]

    until(lambda: used().resident_bytes > 64 << 20)
    family = used()
    assert family.processes == 2
    assert family.threads >= 2
    assert family.cpu_s > 0
    assert family.state in "RS"
    leader.communicate(b"\n")
    assert usage.of([leader.pid]) == {}
    assert usage.of([]) == {}
