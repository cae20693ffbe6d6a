"""`fleetrun tune`: finds the fastest values of a strategy's fields."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from fleetrun.cli import parser
from fleetrun.cli.options import FieldValues
from fleetrun.commands import tables, trials
from fleetrun.commands.tune import candidates, halving, summary
from fleetrun.host import probe
from fleetrun.printing import put, say, tell


def _tune(launch: parser.Launch, **own: Any) -> int:  # noqa: ANN401 - as candidates.make has them
    """Return 0, or 1 if no candidate works; UsageError if it cannot be tuned."""
    spec = candidates.make(launch, **own)
    probe.current_folder()
    spec = candidates.settle(spec, os.environ)
    log = tell if spec.is_json else say
    with trials.held_folder(spec.out):
        log(f"fleetrun tune: {len(spec.candidates)} candidates; everything is kept in {spec.out}")
        results = halving.run(spec, partial(halving.launch, spec), log=log)
        summary.write(spec, results)
        log(summary.table(results, tables.width()))
        log(summary.conclusion(spec, results))
        if spec.is_json:
            put(Path(spec.out, summary.DATA).read_text(encoding="utf-8"))
    return 0 if summary.leaders(results) else 1


command = parser.LaunchCommand(
    "tune",
    help="Train a few steps with every combination of the values, train the better half longer, "
    "and rank them. The script runs unmodified, with the launch options and one --set KEY=VALUE "
    "for each --vary.",
    options_metavar="--vary KEY=A,B,... [--vary ...] [OPTIONS] [LAUNCH OPTIONS] "
    "SCRIPT [ARGUMENTS]...",
    callback=click.pass_obj(_tune),
    params=[
        parser.option(
            "vary",
            FieldValues(),
            "A field of the strategy and the values to try (repeatable). For a part of a field "
            "that the strategy enables, its name is enough: k_steps=1,2,4.",
            metavar="KEY=A,B,...",
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
        trials.TIMEOUT,
        parser.option(
            "out",
            "text",
            "Output folder: best.yaml, tune.json, trials/.",
            default="tune",
            metavar="DIR",
            path="dir",
        ),
        parser.option(
            "json",
            "flag",
            "Print tune.json at the end, and everything else on standard error.",
        ),
    ],
)
