"""Launches a training for `fleetrun tune` or `verify`, and reads what it has shown."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fleetrun.cli import parser, types
from fleetrun.engines.engine import Engine
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import probe
from fleetrun.model import FieldVerdict
from fleetrun.plan import planner
from fleetrun.run import libc
from fleetrun.rundir import eventfile, names, rankfile, runs
from fleetrun.rundir.strategyfiles import EFFECTIVE, IN_EFFECT, NO_WORD, SECTIONS

# Fewer timed updates are meaningless.
FEWEST_TIMED = 3
TIMEOUT = parser.option("timeout", types.seconds(1), "Time limit of a run.", default="600")
UNSEEN = "it succeeded, but no update was seen (does it train with Paddle?)"
_LONGEST_FAULT = 300


class TrialOutcome(NamedTuple):
    """What a launch has shown; `fault` says why it does not count."""

    fault: str = ""
    folder: str = ""
    # How many updates it made, and updates a second: of those that are timed, and of their halves.
    updates: int = 0
    speeds: tuple[float, ...] = ()
    # The peak of the process that held most.
    peak_bytes: int = 0
    # By field of the strategy; the worst one where ranks disagree.
    verdicts: Mapping[str, FieldVerdict] = {}

    def idle(self, key: str) -> str:
        """Return the status of the field KEY if it is known to change nothing."""
        section, dot, name = key.partition(".")
        field = name.partition(".")[0] if dot and section in SECTIONS else section
        verdict = self.verdicts.get(field)
        is_idle = verdict is not None and verdict.status not in {EFFECTIVE, NO_WORD}
        return verdict.status.replace("_", " ") if verdict is not None and is_idle else ""


def speeds(at: Mapping[int, float], skipped: int) -> tuple[float, ...]:
    """Return updates a second by the time AT of each after the SKIPPED ones, and of each half.

    It is empty if there are too few.

    >>> speeds({1: 9, 2: 10.0, 3: 11.0, 4: 12.5}, 1)
    (0.8, 1.0, 0.6666666666666666)
    """
    timed = [number for number in sorted(at) if number > skipped]
    middle = len(timed) // 2
    if len(timed) < FEWEST_TIMED:
        return ()
    spans = [(part[0], part[-1]) for part in (timed, timed[: middle + 1], timed[middle:])]
    if any(at[end] <= at[begin] for begin, end in spans):
        return ()
    return tuple((end - begin) / (at[end] - at[begin]) for begin, end in spans)


def overlap(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges of two kinds of runs overlap, so that no difference is measured.

    >>> overlap((1.0, 1.2), (1.1, 1.3)), overlap((1.0, 1.1), (1.2, 1.3))
    (True, False)
    """
    return min(first) <= max(other) and min(other) <= max(first)


def check(launch: parser.Launch, usage: str, *, is_planned: bool = True) -> None:
    """Raise the error with which LAUNCH would begin; USAGE is the command and its option.

    Without IS_PLANNED, only errors of the command line are found.
    """
    probe.current_folder()
    command = usage.partition(" ")[0]
    if not launch.script:
        raise UsageError(f"no script to {command}: write `fleetrun {usage} [options] train.py`.")
    for given in launch.options:
        if given.name in {"detach", "dry_run"}:
            raise UsageError(f"{command} takes no {given.typed}: it waits for each training.")
    if is_planned:
        request = parser.launch_request([*launch.words, *launch.script], os.environ)
        engine = Engine.find(request, os.environ, planner.places(request))
        facts = probe.read(request, os.environ, engine.hosts)
        planner.slots(request, facts, planner.share(request, facts))


@contextmanager
def held_folder(folder: str) -> Iterator[None]:
    """Create FOLDER and hold it, as another command would delete what this one has there.

    EnvironmentFault if it is not writable, or if another command holds it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(os.path.join(folder, ".lock"), "w", encoding="utf-8")  # noqa: SIM115 - below
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EnvironmentFault(
            f"Another fleetrun tune or verify is using {folder}: wait until it has ended, or "
            "choose another folder with --out."
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{folder} cannot be written ({error.strerror}); see --out."
        ) from None
    with lock:
        yield


def launch(
    words: Sequence[str],
    script: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> int | None:
    """Run `fleetrun WORDS SCRIPT` with ENVIRON added, its output and logs in FOLDER.

    Return the exit code; None if it was stopped after TIMEOUT_S.
    """
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleetrun", *words, f"--log_dir={folder / 'log'}", *script],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Nothing else ends it if this process is killed.
            preexec_fn=lambda: libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also on Ctrl-C: the ranks end before this process.
            process.terminate()
            process.wait()


def new_folder(*parts: str) -> Path:
    """Return the folder of PARTS, emptied of what another launch has left."""
    folder = Path(*parts).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def outcome(
    code: int | None, folder: Path, run_dir: Path, timeout_s: float, skipped: int
) -> TrialOutcome:
    """Return what the launch in RUN_DIR has shown, which ended with CODE; its output is in FOLDER.

    CODE is None if it was stopped after TIMEOUT_S. The SKIPPED updates are not timed.
    """
    hosts = runs.hosts(runs.read(str(run_dir.resolve())))
    # Each host has its own clock.
    at: dict[int, float] = {}
    for path in Path(hosts[0].path).glob(names.rank_records("*")):
        for update in rankfile.updates(str(path)):
            at[update.number] = max(at.get(update.number, update.at), update.at)
    events = hosts[0].events
    peaks = [event.more.get("peak_bytes") or 0 for event in events]
    fault = ""
    if code is None:
        fault = f"it was stopped after {timeout_s:g} s"
    elif code:
        fault = _fault(folder, hosts, code)
    elif not at:
        fault = UNSEEN
    verdicts: dict[str, FieldVerdict] = {}
    for verdict in eventfile.verdicts(events):
        if verdict.name not in verdicts or verdicts[verdict.name].status in IN_EFFECT:
            verdicts[verdict.name] = verdict
    timed, peak = speeds(at, skipped), max(peaks, default=0)
    return TrialOutcome(fault, str(folder), max(at, default=0), timed, peak, verdicts)


def _fault(folder: Path, hosts: Sequence[runs.Run], code: int) -> str:
    """Return why a run failed, in one line; its output is in FOLDER."""
    reports = [report for run in hosts if (report := run.report()) is not None]
    culprit = next((report.culprit for report in reports if report.culprit), None)
    if culprit is not None:
        last = f"{culprit.class_}: {culprit.message}" if culprit.class_ else ""
        words = [hosts[0].verdict, last or "".join(culprit.last_words[-1:])]
    elif hosts[0].exit_code:
        words = [hosts[0].verdict]
    else:
        output = (folder / "output.txt").read_text(errors="replace").split("\n")
        although = ", although a training succeeded" if hosts[0].verdict else ""
        words = [f"it exited with {code}{although}", *[x for x in output if x.strip()][-1:]]
    return " ".join(": ".join(filter(None, words)).split())[:_LONGEST_FAULT]
