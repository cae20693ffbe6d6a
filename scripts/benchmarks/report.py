"""Measurements in rounds, and their numbers as text: medians with their spread, and tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from launches import Failed

K = TypeVar("K")
M = TypeVar("M")
Write = Callable[[float], str]


def in_turns(
    rounds: int, todo: Mapping[K, Callable[[], M]]
) -> tuple[dict[K, list[M]], dict[str, str]]:
    """Do each of TODO once in each of ROUNDS, in every other one backwards.

    Return what was measured, and why something was not.
    """
    measured: dict[K, list[M]] = {key: [] for key in todo}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for key in todo if number % 2 == 0 else reversed([*todo]):
            progress(f"round {number + 1} of {rounds}: {key}")
            try:
                measured[key].append(todo[key]())
            except Failed as failure:
                failures[str(key)] = str(failure)
    progress("")
    return measured, failures


def ms(value: float) -> str:
    """Write seconds as milliseconds."""
    return f"{value * 1000:.0f}" if abs(value) >= 0.01 else f"{value * 1000:.1f}"


def times(value: float) -> str:
    """Write a ratio."""
    return f"{value:.2f}"


def spread(values: Sequence[float | None], write: Write = ms) -> str:
    """Write the median, and from where to where the rounds went; `-` if there were none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{write(median(known))} ({write(min(known))}-{write(max(known))})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Write how OURS compares with THEIRS in pairs of a round, which ran under the same load."""
    if len(ours) != len(theirs):
        return "-"
    return spread([a / b for a, b in zip(ours, theirs, strict=True)], times)


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ROWS under HEADS, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    print(f"{title}\n")
    for first, *others in [heads, ["-" * width for width in widths], *rows]:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  " + "  ".join([first.ljust(widths[0]), *cells]).rstrip())
    print()


def finish(chosen: argparse.Namespace, failures: Mapping[str, str], **document: Any) -> int:
    """Print what could not be measured, and write all to the file of --json; return exit code 0."""
    for name, why in failures.items():
        print(f"{name}: not measured: {why}\n")
    if chosen.json:
        document |= {"cpus": os.cpu_count(), "failures": failures}
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas, for an option."""
    return tuple(int(part) for part in text.split(","))


def progress(text: str) -> None:
    """Say how far the measuring is, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
