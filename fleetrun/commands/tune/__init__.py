"""`fleetrun tune`: finds the fastest values of a strategy's fields."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from fleetrun import probe
from fleetrun.commands import parser, tables
from fleetrun.commands.tune import candidates, halving, summary, trials
from fleetrun.errors import EnvironmentFault
from fleetrun.printing import put, say, tell


def _tune(launch: parser.Launch, **own: Any) -> int:  # noqa: ANN401 - as candidates.make has them
    """Return 0, or 1 if no candidate works; UsageError if it cannot be tuned."""
    study = candidates.make(launch, **own)
    probe.current_folder()
    study = candidates.settle(study, os.environ)
    log = tell if study.is_json else say
    with held_folder(study.out):
        code = _search(study, log)
        if study.is_json:
            put(Path(study.out, summary.DATA).read_text(encoding="utf-8"))
        return code


def _search(study: candidates.TuneSpec, log: Callable[[str], object]) -> int:
    log(f"fleetrun tune: {len(study.candidates)} candidates; everything is kept in {study.out}")
    results = halving.run(study, partial(trials.run, study), log=log)
    log(summary.table(results, tables.width()))
    summary.write(study, results)
    log(summary.conclusion(study, results))
    return 0 if summary.leaders(results) else 1


@contextmanager
def held_folder(folder: str) -> Iterator[None]:
    """Create FOLDER and hold it, as another command would delete what this one has there.

    EnvironmentFault if it is not writable, or if another command holds it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if not os.access(folder, os.W_OK | os.X_OK):
            os.close(fd)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        why = error.strerror
        raise EnvironmentFault(f"{folder} cannot be written ({why}); see --out.") from None
    try:
        _hold(fd, folder)
        yield
    finally:
        os.close(fd)


def _hold(fd: int, folder: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EnvironmentFault(
            f"Another fleetrun tune or verify is using {folder}: wait until it has ended, or "
            "choose another folder with --out."
        ) from None
    except OSError:
        # Some network file systems have no locks.
        return


TIMEOUT = parser.option(
    "timeout", "duration", "Time limit of a run.", default="600", minimum=1, metavar="SECONDS"
)
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
            "pairs",
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
        TIMEOUT,
        parser.option(
            "out",
            "text",
            "Output folder: best.yaml, tune.json, tune.html, trials/.",
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
