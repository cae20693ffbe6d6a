"""Findings about measured allreduces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.doctor.nvidia import Gpus
from fleetrun.text import format_size


class Transfer(NamedTuple):
    """Allreduces of one size: bytes, seconds of each, and whether the sums were correct."""

    nbytes: int
    seconds: float
    is_right: bool


class Transfers(NamedTuple):
    """The measurements of the two ranks, and the bandwidth of a plain TCP connection (B/s)."""

    backend: str
    ranks: int
    rows: tuple[Transfer, ...] = ()
    link: float | None = None
    # Why there are no rows: the job's exit and its last words.
    trouble: str = ""


# NVLink 3 and 4 carry 25 GB/s each way (NVIDIA's data sheets of A100 and H100).
_NVLINK_BYTES_S, _NVLINK_FROM = 25e9, (8, 0)
# A smaller share of the link's bandwidth is a fault and not protocol overhead: gloo sums on one CPU
# and copies twice.
_SHARE = 0.05
# Even a loaded host needs less for 1 KiB; delayed acknowledgements cost 40 ms.
_LATENCY_S = 0.02


def bandwidth(row: Transfer, ranks: int) -> float:
    """Return the bandwidth of each rank's link in ROW, in bytes per second.

    As NCCL's tests count it: a ring allreduce moves 2 (n - 1) / n of the data over each link.
    """
    return row.nbytes * 2 * (ranks - 1) / ranks / row.seconds


def judge(transfers: Transfers, gpus: Gpus) -> Iterator[Finding]:
    """Yield the findings about TRANSFERS."""
    check = "allreduce"
    if transfers.trouble:
        yield error(
            check,
            f"two ranks could not run it: {transfers.trouble}",
            "no training with several ranks will work here",
            "fleetrun --nproc_per_node=2 --tee=all run_check",
        )
        return
    if not transfers.rows:
        yield ok(
            check,
            f"{transfers.ranks} ranks ran it over {transfers.backend}; rank 0's host has the times",
        )
        return
    wrong = [row for row in transfers.rows if not row.is_right]
    if wrong:
        yield error(
            check,
            f"the sum of {format_size(wrong[0].nbytes)} over {transfers.backend} is wrong",
            "training here gives wrong results, too",
            "nvidia-smi -q -d ECC; --nccl P2P_DISABLE=1  # is the sum right then?",
        )
        return
    latency = transfers.rows[0].seconds
    best = max(transfers.rows, key=lambda row: bandwidth(row, transfers.ranks))
    reached = bandwidth(best, transfers.ranks)
    link = link_speed(transfers, gpus)
    seen = (
        f"right over {transfers.backend}: {latency * 1e6:.0f} us for"
        f" {format_size(transfers.rows[0].nbytes)}, {_rate(reached)} at {format_size(best.nbytes)}"
    )
    if link is not None:
        seen += f"; the link carries {_rate(link)}"
    if link is not None and reached < _SHARE * link:
        means = "something other than the link holds the ranks up"
        fix = "--nccl DEBUG=INFO  # which path does it take?; top; fleetrun --bind=numa"
        yield warning(check, seen, means, fix)
    elif latency > _LATENCY_S:
        means = "every small allreduce waits that long: --strategy=comm_fusion makes them few"
        yield warning(check, seen, means, "ping -c 20 <host>; top  # a busy host or a slow way?")
    else:
        yield ok(check, seen)


def link_speed(transfers_: Transfers, gpus: Gpus) -> float | None:
    """Return the bandwidth between the ranks in bytes per second; None if unknown."""
    if transfers_.backend != "nccl":
        return transfers_.link
    speeds = [
        gpu.nvlinks[0] * _NVLINK_BYTES_S
        for gpu in gpus.gpus
        if gpu.nvlinks and gpu.capability is not None and gpu.capability >= _NVLINK_FROM
    ]
    return min(speeds) if speeds and len(speeds) == len(gpus.gpus) else None


def rows(transfers: Transfers) -> tuple[tuple[str, str, str], ...]:
    """Return size, latency and bandwidth of each row as text."""
    return tuple(
        (
            format_size(row.nbytes),
            f"{row.seconds * 1e6:.0f} us",
            _rate(bandwidth(row, transfers.ranks)),
        )
        for row in transfers.rows
    )


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.3g} GB/s"
