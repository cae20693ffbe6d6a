"""Numbers as text: medians with their spread, tables, and whether a goal was reached."""

from __future__ import annotations

import json
import os
import platform
import sys
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeVar

    T = TypeVar("T")


class Summary(NamedTuple):
    """Several rounds of one number."""

    median: float
    low: float
    high: float
    rounds: int


class Goal(NamedTuple):
    """One number to reach; `reached` is None where it could not be measured."""

    what: str
    wanted: str
    seen: str
    reached: bool | None


def summary(values: Sequence[float]) -> Summary:
    """Sum up VALUES, of which there is at least one."""
    return Summary(median(values), min(values), max(values), len(values))


def in_turns(rounds: int, todo: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Yield all of TODO in each of ROUNDS, whose number is from 1; every other one is reversed."""
    for number in range(1, rounds + 1):
        for item in todo if number % 2 else todo[::-1]:
            yield number, item


def ms(value: float) -> str:
    """Write seconds as milliseconds."""
    return f"{value * 1000:.0f}" if abs(value) >= 0.01 else f"{value * 1000:.1f}"


def in_ms(value: float) -> str:
    """Write seconds as milliseconds, with the unit."""
    return f"{ms(value)} ms"


def mb(value: float) -> str:
    """Write bytes as megabytes."""
    return f"{value / 1e6:.1f}"


def spread(measured: Summary, write: Callable[[float], str] = ms) -> str:
    """Write the median, and from where to where the rounds went."""
    return f"{write(measured.median)} ({write(measured.low)}-{write(measured.high)})"


def quartered(values: Sequence[float]) -> str:
    """Write the median of ratios, and the quarters around it."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out ROWS under HEADS, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [title, ""]
    for row in [heads, ["-" * width for width in widths], *rows]:
        first, *others = (cell.ljust if not at else cell.rjust for at, cell in enumerate(row))
        cells = [
            first(widths[0]),
            *(put(width) for put, width in zip(others, widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def goal(
    what: str, seen: float | None, limit: float, write: Callable[[float], str] = in_ms
) -> Goal:
    """Return the goal that WHAT, which was SEEN if it could be measured, is at most LIMIT."""
    wanted = f"<= {write(limit)}"
    if seen is None:
        return Goal(what, wanted, "-", None)
    return Goal(what, wanted, write(seen), seen <= limit)


def goals(reached: Sequence[Goal]) -> str:
    """Say of every goal whether it was reached."""
    words = {True: "reached", False: "MISSED", None: "not measured"}
    rows = [[goal.what, goal.wanted, goal.seen, words[goal.reached]] for goal in reached]
    return table("Goals", ["what", "wanted", "seen", ""], rows)


def unmeasured(failures: Mapping[str, str]) -> None:
    """Print what could not be measured, and why."""
    for name, why in failures.items():
        print(f"{name}: not measured: {why}\n")


def write(chosen: argparse.Namespace, document: Mapping[str, Any]) -> None:
    """Write DOCUMENT to the file of --json, if it is given."""
    if chosen.json:
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return on what this is measured."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def headline(results: dict[str, Any]) -> str:
    """Say on what this was measured: a machine that is busy with something else lies."""
    machine, versions = results["machine"], results["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['cpus']} cores, load {machine['load_before']:.1f} before, {software}\n"


def progress(text: str) -> None:
    """Say how far the measuring is, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
