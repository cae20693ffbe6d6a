"""`fleetrun tune`: find the fastest values of a strategy's knobs by training with each of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fleetrun import probe
from fleetrun.plan.visible import visible_lines
from fleetrun.printing import put

if TYPE_CHECKING:
    from collections.abc import Sequence


def command(words: Sequence[str]) -> int:
    """Do what `fleetrun tune WORDS` asks for, and return the exit code.

    Raises UsageError for what cannot be tuned; 1 is returned when no candidate works.
    """
    from fleetrun.tune import race, result, trial, wishes  # noqa: PLC0415 - keeps `import` cheap

    wanted = wishes.parse(words)
    if wanted is None:
        return put(wishes.HELP)
    probe.current_folder()
    wanted = wishes.settle(wanted, os.environ)
    track = trial.Track(wanted)

    # A pipe is read while it runs.
    def tell(text: str) -> None:
        put(f"{visible_lines(text)}\n")

    tell(f"fleetrun tune: {len(wanted.candidates)} candidates; everything is kept in {wanted.out}")
    standings = race.run(wanted, track.run, tell=tell)
    tell(result.table(standings))
    best = result.write(wanted, standings)
    if best is None:
        print("No candidate works, so there is nothing to choose.")
        return 1
    for doubt in result.doubts(standings):
        tell(doubt)
    tell(f"Fastest: {best.candidate}. Launch with --strategy={wanted.out}/{result.BEST}.")
    return 0
