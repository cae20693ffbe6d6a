"""`fleetrun tune`: find the fastest values of a strategy's knobs by training with each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def command(words: Sequence[str]) -> int:
    """Do what `fleetrun tune WORDS` asks for, and return the exit code.

    Raises UsageError for what cannot be tuned; 1 is returned when no candidate works.
    """
    from fleetrun.strategy import load  # noqa: PLC0415 - keeps `import` cheap
    from fleetrun.tune import race, result, trial, wishes  # noqa: PLC0415

    wanted = wishes.parse(words)
    if wanted is None:
        print(wishes.HELP, end="")
        return 0
    for candidate in wanted.candidates:
        # A mistake is told before anything runs.
        load.combine([], [load.parse_set(f"{key}={value}") for key, value in candidate.values])
    track = trial.Track(wanted)
    print(f"fleetrun tune: {len(wanted.candidates)} candidates; everything is kept in {wanted.out}")
    standings = race.run(wanted, track.run, tell=print)
    print(result.table(standings))
    best = result.write(wanted, standings)
    if best is None:
        print("No candidate works, so there is nothing to choose.")
        return 1
    for doubt in result.doubts(standings):
        print(doubt)
    print(f"Fastest: {best.candidate}. Add --strategy={wanted.out}/{result.BEST} to the launch.")
    return 0
