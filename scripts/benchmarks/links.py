"""Two hosts that are namespaces of this machine, and a link of so many Mbit/s between them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from peers import ROOT
from processes import Failed

sys.path.insert(0, str(ROOT / "tests"))

import lab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# As much as passes at once: what a millisecond takes, and two large packets at least.
_LEAST_BURST_BYTES = 131072
# Jobs at the same time take ports that are far apart.
_FIRST_PORT, _APART = 6170, 1000


@contextmanager
def linked(mbits: int, folder: Path) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Make the hosts; yield for each the words before a command that runs it there.

    Only the network is the host's own: processes have the ids by which this machine knows them.
    """
    if why := "that needs root" if not lab.is_root() else lab.missing():
        raise Failed(f"no link of {mbits} Mbit/s: {why}")
    burst = max(_LEAST_BURST_BYTES, mbits * 1_000_000 // 8 // 1000)
    with lab.hosts(2, folder) as hosts:
        for host in hosts:
            host.run(
                *("tc", "qdisc", "add", "dev", "eth0", "root", "tbf"),
                *("rate", f"{mbits}mbit", "burst", str(burst), "latency", "200ms"),
            )
        yield tuple(("nsenter", "-t", str(host.pid), "-n", "--") for host in hosts)


def options(side: int) -> tuple[str, ...]:
    """Return the options of the launchers of one of several jobs on these hosts, SIDE."""
    ips = ",".join(f"{lab.SUBNET}.{number}" for number in (1, 2))
    return (f"--ips={ips}", f"--start_port={_FIRST_PORT + side * _APART}")
