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
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import FieldVerdict
from fleetrun.run import libc
from fleetrun.rundir import eventfile, names, reading, runs
from fleetrun.rundir.strategyfiles import EFFECTIVE, IN_EFFECT, NO_WORD, SECTIONS
from fleetrun.text import counted

# Fewer timed updates are meaningless.
FEWEST_TIMED = 3
# A field whose name begins so changes what is computed, not only how.
CHANGES_RESULTS = (
    *("gradient_merge", "amp", "fp16_allreduce", "bf16_allreduce", "dgc", "lars", "lamb"),
    *("localsgd", "adaptive_localsgd", "sync_batch_norm", "asp"),
)
TIMEOUT = parser.option(
    "timeout", types.seconds(1), "Time limit of a run.", default="600", metavar="SECONDS"
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
    # The time of each update on the last rank here, and the last loss of a rank.
    at: Mapping[int, float]
    loss: float | None
    # The peak of the process that held most.
    peak_bytes: int | None
    # By field; the worst one where ranks disagree.
    verdicts: Mapping[str, FieldVerdict]

    def speeds(self, skipped: int) -> tuple[float, ...]:
        """Return updates a second after the SKIPPED ones, and of each half; empty if too few.

        >>> TrialOutcome("", {1: 9, 2: 10.0, 3: 11.0, 4: 12.5}, None, None, {}).speeds(1)
        (0.8, 1.0, 0.6666666666666666)
        """
        timed = [number for number in sorted(self.at) if number > skipped]
        middle = len(timed) // 2
        if len(timed) < FEWEST_TIMED:
            return ()
        spans = [(part[0], part[-1]) for part in (timed, timed[: middle + 1], timed[middle:])]
        took_s = [self.at[end] - self.at[begin] for begin, end in spans]
        if min(took_s) <= 0:
            return ()
        return tuple((end - begin) / s for (begin, end), s in zip(spans, took_s, strict=True))

    @property
    def micro_steps(self) -> int:
        """The backward passes of an update, where gradients were seen to be merged."""
        merge = self.verdicts.get(_MERGE)
        if merge is None or merge.status not in IN_EFFECT:
            return 1
        steps = [word.partition("=")[2] for word in merge.in_effect.split() if "k_steps" in word]
        return int(steps[0]) if steps and steps[0].isdigit() else 1

    def idle(self, key: str) -> FieldVerdict | None:
        """Return the verdict of the field KEY of a strategy if it is known to change nothing."""
        section, dot, name = key.partition(".")
        field = name.partition(".")[0] if dot and section in SECTIONS else section
        verdict = self.verdicts.get(field)
        return None if verdict is None or verdict.status in {EFFECTIVE, NO_WORD} else verdict


def too_short(at: Mapping[int, float]) -> str:
    """Return why a launch that has succeeded with the updates AT could not be timed."""
    if not at:
        return "it succeeded, but no update was seen (does it train with Paddle?)"
    return f"it succeeded after {counted(len(at), 'update')}, too few to time"


def overlap(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges of two kinds of runs overlap, so that no difference is measured.

    >>> overlap((1.0, 1.2), (1.1, 1.3)), overlap((1.0, 1.1), (1.2, 1.3))
    (True, False)
    """
    return min(first) <= max(other) and min(other) <= max(first)


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
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def new_folder(*parts: str) -> Path:
    """Return the folder of PARTS, emptied of what another launch has left."""
    folder = Path(*parts).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def outcome(code: int | None, folder: Path, run_dir: Path, timeout_s: float) -> TrialOutcome:
    """Return what the launch in RUN_DIR has shown, which ended with CODE; its output is in FOLDER.

    CODE is None if it was stopped after TIMEOUT_S.
    """
    hosts = runs.hosts(runs.read(str(run_dir.resolve())))
    # Each host has its own clock.
    at, loss = _updates(hosts[0])
    events = hosts[0].events
    peaks = [reading.whole(event.more.get("peak_bytes")) or 0 for event in events]
    fault = ""
    if code is None:
        fault = f"it was stopped after {timeout_s:g} s"
    elif code:
        fault = _fault(folder, hosts, code)
    verdicts: dict[str, FieldVerdict] = {}
    reports = [event for event in events if event.event == "strategy_report"]
    for verdict in eventfile.verdicts(reports[-1]) if reports else ():
        if verdict.name not in verdicts or verdicts[verdict.name].status in IN_EFFECT:
            verdicts[verdict.name] = verdict
    return TrialOutcome(fault, at, loss, max(peaks, default=0) or None, verdicts)


def _updates(run: runs.Run) -> tuple[dict[int, float], float | None]:
    """Return the time of each update of RUN on its last rank, and the last loss of a rank."""
    at: dict[int, float] = {}
    loss = None
    for path in sorted(Path(run.path).glob(names.rank_records("*"))):
        for update in run.updates(path.name.split(".")[1]):
            at[update.number] = max(at.get(update.number, update.at), update.at)
            loss = update.loss if update.loss is not None else loss
    return at, loss


def _fault(folder: Path, hosts: Sequence[runs.Run], code: int) -> str:
    """Return why a run failed, in one line; its output is in FOLDER."""
    reports = [report for run in hosts if (report := run.report()) is not None]
    culprit = next((report.culprit for report in reports if report.culprit), None)
    parts = [hosts[0].verdict] if hosts[0].verdict and hosts[0].exit_code else []
    if culprit is not None:
        words = [line for line in culprit.last_words if line.strip()]
        parts += [f"{culprit.class_}: {culprit.message}"] if culprit.class_ else words[-1:]
    if not parts:
        output = (folder / "output.txt").read_text(errors="replace").split("\n")
        parts = [line for line in output if line.strip()][-1:] or [f"it exited with {code}"]
        if hosts[0].verdict:
            parts.insert(0, f"it exited with {code}, although a training succeeded")
    return " ".join(": ".join(parts).split())[:_LONGEST_FAULT]
