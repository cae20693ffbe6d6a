"""What became of the launches of scripts/chaos, on one host or several."""

from __future__ import annotations

import sys
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Result(NamedTuple):
    """What became of one launch."""

    number: int
    fault: str
    took_s: float
    allowed_s: float = 1.0
    lost: str = ""


def announce(result: Result, options: str, seed: int, progress: str) -> None:
    """Print a lost launch and the OPTIONS that repeat it; on a terminal, PROGRESS otherwise."""
    if result.lost:
        print(f"LOST in launch {result.number}, {result.fault}: {result.lost}")
        again = f"scripts/chaos {options}--seed {seed} --only {result.number}"
        print(f"  again: {again}", flush=True)
    elif sys.stderr.isatty():
        print(f"\r\033[K{progress}: {result.fault}", end="\r", file=sys.stderr, flush=True)


def report(
    names: Sequence[str], results: Sequence[Result], seed: int, seconds: float, hit: str = ""
) -> int:
    """Print what was tried, how long it took from the fault to the end, and what was lost.

    NAMES are those of all faults, HIT what is wrong besides; return the exit code.
    """
    print(
        f"\n  {'fault':32} {'tried':>5} {'lost':>5}  from fault to end, ms: min median max, "
        "and the most of its bound"
    )
    for name in names:
        mine = [result for result in results if result.fault == name]
        took = [result.took_s * 1000 for result in mine if not result.lost]
        times = ""
        if took:
            most = max(result.took_s / result.allowed_s for result in mine if not result.lost)
            times = f"{min(took):6.0f} {median(took):6.0f} {max(took):6.0f} {most:5.0%}"
        if mine:
            print(f"  {name:32} {len(mine):5} {len(mine) - len(took):5}  {times}")
    if hit:
        print(f"\nLOST: {hit}")
    count = sum(bool(result.lost) for result in results) + bool(hit)
    print(f"\n{len(results)} launches in {seconds:.0f} s, seed {seed}: {count or 'nothing'} lost")
    return 1 if count else 0
