"""The control groups of a process, in either version."""

from __future__ import annotations

import os

from fleetrun.probe import files
from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def folders(root: str = "/", process: int | str = "self") -> Iterable[str]:
    """Yield the folders of PROCESS's cgroups, innermost first, as far as they are visible."""
    base = os.path.join(root, "sys/fs/cgroup")
    for line in files.text(os.path.join(root, f"proc/{process}/cgroup")).splitlines():
        kinds, path = line.split(":", 2)[1:]
        tops = [os.path.join(base, kinds)] if kinds else [base, os.path.join(base, "unified")]
        for top in tops:
            inner = path.strip("/")
            # In a container the path may be that outside; then the top is ours.
            while inner:
                yield os.path.join(top, inner)
                inner = os.path.dirname(inner)
            yield top


def throttled_s(root: str = "/", process: int | str = "self") -> float:
    """Return how long the limits of PROCESS's cgroups have held back their processors' queues."""
    total = 0.0
    for folder in folders(root, process):
        words = files.text(os.path.join(folder, "cpu.stat")).split()
        counts = dict(zip(words[::2], words[1::2], strict=False))
        # Version 2 counts in microseconds, version 1 in nanoseconds.
        total += int(counts.get("throttled_usec", "0")) / 1e6
        total += int(counts.get("throttled_time", "0")) / 1e9
    return total
