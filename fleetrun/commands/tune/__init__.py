"""`fleetrun tune`: finds the fastest values of a strategy's fields, or the losses of scaling."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import Any

import click

from fleetrun import probe
from fleetrun.commands import parser, tables
from fleetrun.commands.tune import candidates, halving, scaling, summary, trials
from fleetrun.errors import EnvironmentFault
from fleetrun.printing import say


def _tune(launch: parser.Launch, **own: Any) -> int:  # noqa: ANN401 - as candidates.make has them
    """Return 0, or 1 if no candidate works; UsageError if it cannot be tuned."""
    study = candidates.make(launch, **own)
    probe.current_folder()
    sizes = scaling.sizes(own["scaling"], study) if own["scaling"] else ()
    study = candidates.settle(study, os.environ)

    make_folder(study.out)
    if sizes:
        return scaling.run(study, sizes, say, tables.width())
    say(f"fleetrun tune: {len(study.candidates)} candidates; everything is kept in {study.out}")
    results = halving.run(study, partial(trials.run, study), log=say)
    say(summary.table(results, tables.width()))
    best = summary.write(study, results)
    if best is None:
        say("No candidate works, so there is nothing to choose.")
        return 1
    for doubt in summary.doubts(results):
        say(doubt)
    say(f"Fastest: {best.candidate}. Launch with --strategy={study.out}/{summary.BEST}.")
    return 0


def make_folder(folder: str) -> None:
    """Create FOLDER; EnvironmentFault if it is not writable."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = error.strerror
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return
        why = os.strerror(errno.EACCES)
    raise EnvironmentFault(f"{folder} cannot be written ({why}); see --out.")


TIMEOUT = parser.option(
    "timeout", "duration", "Time limit of a run.", default="600", minimum=1, metavar="SECONDS"
)
command = parser.LaunchCommand(
    "tune",
    help="Train a few steps with every combination of the values, train the better half longer, "
    "and rank them. The script runs unmodified, with the launch options and one --set KEY=VALUE "
    "for each --vary.",
    options_metavar="--vary KEY=A,B,... [--vary ...]|--scaling 1,2,4 [OPTIONS] [LAUNCH OPTIONS] "
    "SCRIPT [ARGUMENTS]...",
    callback=click.pass_obj(_tune),
    params=[
        parser.option(
            "vary",
            "pairs",
            "A field of the strategy and the values to try (repeatable). For a part of a field "
            "that the strategy enables, its name is enough: k_steps=1,2,4.",
            metavar="KEY=A,B,...",
        ),
        parser.option(
            "scaling",
            "text",
            "Instead of --vary: train with these numbers of devices (with --hosts: of hosts), and "
            "report the efficiency of each, the largest losses, and what to change.",
            metavar="1,2,4",
        ),
        parser.option(
            "steps", "int", "Number of updates in the last round.", default="30", minimum=2
        ),
        parser.option(
            "warmup",
            "int",
            "Number of first updates of each run that are not timed.",
            default="5",
            minimum=0,
        ),
        parser.option(
            "repeats", "int", "Runs of each candidate per round, in turns.", default="2", minimum=1
        ),
        TIMEOUT,
        parser.option(
            "out",
            "text",
            "Output folder: best.yaml, tune.json, tune.html, trials/.",
            default="tune",
            metavar="DIR",
            path="dir",
        ),
    ],
)
