"""Launches a training for `fleetrun tune` or `verify`, and reads what it has shown."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fleetrun.cli import parser
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import FieldVerdict
from fleetrun.run import libc
from fleetrun.rundir import eventfile, names, rankfile, reading, runs
from fleetrun.rundir.eventfile import EventRecord
from fleetrun.rundir.folder import SHARED, Folder
from fleetrun.rundir.strategyfiles import EFFECTIVE, IN_EFFECT, NO_WORD, SECTIONS
from fleetrun.text import counted

# Fewer timed updates are meaningless.
FEWEST_TIMED = 3
UNSEEN = "it succeeded, but no update was seen (does it train with Paddle?)"
# A field whose name begins so changes what is computed, not only how.
MEANINGFUL = (
    "gradient_merge",
    "amp",
    "fp16_allreduce",
    "bf16_allreduce",
    "dgc",
    "lars",
    "lamb",
    "localsgd",
    "adaptive_localsgd",
    "sync_batch_norm",
    "asp",
)
TIMEOUT = parser.option(
    "timeout", "duration", "Time limit of a run.", default="600", minimum=1, metavar="SECONDS"
)
# Options that tune and verify set themselves, or that measure nothing.
_TAKEN = {
    "log_dir": "the logs of every run are kept under --out",
    "dry_run": "there is nothing to measure then",
    "from_manifest": "give the launch's own options",
}
# The seconds that a launcher has to stop.
_GRACE_S = 60.0
_LONGEST_FAULT = 300
_MERGE = "gradient_merge_configs"


class TrialOutcome(NamedTuple):
    """What a launch has shown; `fault` says why it does not count."""

    fault: str
    # The time of each update on the last rank here, and the losses of each rank by update.
    at: Mapping[int, float]
    losses: Mapping[int, Mapping[int, float]]
    # The peak of the process that held most.
    peak_bytes: int | None
    # By field; the worst one where ranks disagree.
    verdicts: Mapping[str, FieldVerdict]
    events: Sequence[EventRecord]


def refuse_taken(launch: parser.Launch, command: str) -> None:
    """Refuse options of LAUNCH that COMMAND, which launches several times, sets itself."""
    for setting in launch.options:
        if setting.name in _TAKEN:
            why = _TAKEN[setting.name]
            raise UsageError(f"{command} takes no {setting.typed}: {why}.")


@contextmanager
def held_folder(folder: str) -> Iterator[None]:
    """Create FOLDER and hold it, as another command would delete what this one has there.

    EnvironmentFault if it is not writable, or if another command holds it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        why = error.strerror
        raise EnvironmentFault(f"{folder} cannot be written ({why}); see --out.") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise EnvironmentFault(
            f"Another fleetrun tune or verify is using {folder}: wait until it has ended, or "
            "choose another folder with --out."
        ) from None
    except OSError:
        # Some network file systems have no locks.
        pass
    try:
        yield
    finally:
        os.close(fd)


def write(out: str, texts: Mapping[str, str]) -> None:
    """Write TEXTS, by file name, into the folder OUT."""
    folder = Folder(str(Path(out).resolve()))
    for name, text in texts.items():
        folder.write(name, text, SHARED)
    folder.close()


def new_folder(*parts: str) -> Path:
    """Return the folder of PARTS, emptied of what another launch has left."""
    folder = Path(*parts).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


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
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def outcome(code: int | None, folder: Path, run_dir: Path, timeout_s: float) -> TrialOutcome:
    """Return what the launch in RUN_DIR has shown, which ended with CODE; its output is in FOLDER.

    CODE is None if it was stopped after TIMEOUT_S.
    """
    events = list(eventfile.read(str(run_dir / names.EVENTS)))
    at, losses = read_updates(run_dir)
    peaks = [reading.whole(event.more.get("peak_bytes")) or 0 for event in events]
    fault = ""
    if code is None:
        fault = f"it was stopped after {timeout_s:g} s"
    elif code:
        fault = _why(folder, run_dir, code, events)
    return TrialOutcome(fault, at, losses, max(peaks, default=0) or None, _verdicts(events), events)


def too_short(at: Mapping[int, float]) -> str:
    """Return why a launch that has succeeded with the updates AT could not be timed."""
    return f"it succeeded after {counted(len(at), 'update')}, too few to time" if at else UNSEEN


def speeds(at: Mapping[int, float], timed: Sequence[int]) -> tuple[float, ...]:
    """Return updates a second of all updates TIMED, and of each half: the range they vary in.

    Empty if they are too few.

    >>> speeds({1: 10.0, 2: 11.0, 3: 12.5}, (1, 2, 3))
    (0.8, 1.0, 0.6666666666666666)
    """
    middle = len(timed) // 2
    parts = timed, timed[: middle + 1], timed[middle:]
    if len(timed) < FEWEST_TIMED or not all(at[part[-1]] > at[part[0]] for part in parts):
        return ()
    return tuple((part[-1] - part[0]) / (at[part[-1]] - at[part[0]]) for part in parts)


def overlap(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges of two kinds of runs overlap, so that no difference is measured.

    >>> overlap((1.0, 1.2), (1.1, 1.3)), overlap((1.0, 1.1), (1.2, 1.3))
    (True, False)
    """
    return min(first) <= max(other) and min(other) <= max(first)


def read_updates(run_dir: Path) -> tuple[dict[int, float], dict[int, dict[int, float]]]:
    """Return the time of each update on the last rank here, and the losses of each rank."""
    at: dict[int, float] = {}
    losses: dict[int, dict[int, float]] = {}
    folders = [Path(host.path) for host in _hosts(run_dir)]
    for path in [path for folder in folders for path in folder.glob(names.rank_records("*"))]:
        rank = path.name.split(".")[1]
        for update in rankfile.updates(str(path)):
            # Each host has its own clock.
            if path.parent == folders[0]:
                at[update.number] = max(at.get(update.number, update.at), update.at)
            if update.loss is not None and rank.isdigit():
                losses.setdefault(int(rank), {})[update.number] = update.loss
    return at, losses


def _hosts(run_dir: Path) -> list[runs.Run]:
    """Return the launch in RUN_DIR, on all of its hosts whose files are here."""
    return runs.hosts(runs.read(str(run_dir.resolve())))


def _why(folder: Path, run_dir: Path, code: int, events: Sequence[EventRecord]) -> str:
    """Return why a run failed, in one line; its output is in FOLDER."""
    end = events[-1].more if events else {}
    verdict = reading.text(end.get("verdict"))
    parts = [verdict] if verdict and end.get("exit_code") != 0 else []
    reports = [host.report() for host in _hosts(run_dir)]
    culprit = next((report.culprit for report in reports if report and report.culprit), None)
    if culprit is not None:
        words = [line for line in culprit.last_words if line.strip()]
        parts += [f"{culprit.class_}: {culprit.message}"] if culprit.class_ else words[-1:]
    if not parts:
        output = (folder / "output.txt").read_text(errors="replace").split("\n")
        parts = [line for line in output if line.strip()][-1:] or [f"it exited with {code}"]
        if verdict:
            parts.insert(0, f"it exited with {code}, although a training succeeded")
    return " ".join(": ".join(parts).split())[:_LONGEST_FAULT]


def _verdicts(events: Iterable[EventRecord]) -> dict[str, FieldVerdict]:
    reports = [event for event in events if event.event == "strategy_report"]
    verdicts: dict[str, FieldVerdict] = {}
    for verdict in eventfile.verdicts(reports[-1]) if reports else ():
        if verdict.name not in verdicts or verdicts[verdict.name].status in IN_EFFECT:
            verdicts[verdict.name] = verdict
    return verdicts


def idle(key: str, verdicts: Mapping[str, FieldVerdict]) -> FieldVerdict | None:
    """Return the verdict of the field KEY of a strategy if it is known to change nothing."""
    section, dot, name = key.partition(".")
    field = name.partition(".")[0] if dot and section in SECTIONS else section
    verdict = verdicts.get(field)
    return None if verdict is None or verdict.status in {EFFECTIVE, NO_WORD} else verdict


def merged(verdicts: Mapping[str, FieldVerdict]) -> int:
    """Return the number of micro-steps of an update, where gradients were seen to be merged."""
    merge = verdicts.get(_MERGE)
    if merge is None or merge.status not in IN_EFFECT:
        return 1
    steps = [word.partition("=")[2] for word in merge.in_effect.split() if "k_steps" in word]
    return int(steps[0]) if steps and steps[0].isdigit() else 1
