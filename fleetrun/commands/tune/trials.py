"""Runs a candidate: a launch in a separate process, and its results."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fleetrun.commands.tune.candidates import FEWEST_TIMED, Candidate, TuneSpec
from fleetrun.commands.tune.halving import Trial
from fleetrun.conversion import counted
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import FieldVerdict
from fleetrun.records import eventfile, names, rankfile, reading, reportfile, runs, variables
from fleetrun.records.eventfile import EventRecord
from fleetrun.records.folder import SHARED, Folder
from fleetrun.records.strategyfiles import EFFECTIVE, IN_EFFECT, NO_DIFFERENCE, NO_WORD, SECTIONS
from fleetrun.run import libc

# The seconds that a launcher has to stop.
_GRACE_S = 60.0
_LONGEST_FAULT = 300
UNSEEN = "it succeeded, but no update was seen (does it train with Paddle?)"


def run(spec: TuneSpec, candidate: Candidate, steps: int, name: str) -> Trial:
    """Launch CANDIDATE in the folder NAME for its planning updates and STEPS more."""
    folder = new_folder(spec.out, "trials", name)
    planning = spec.planning(candidate)
    options = [*spec.launch, *(f"--set={key}={value}" for key, value in candidate.values)]
    environ = {variables.STOP_AFTER: str(planning + steps)}
    code = launch(options, spec.script, environ, folder, spec.timeout_s)
    run_dir = folder / "log" / names.LATEST
    events, fault = outcome(code, folder, run_dir, spec.timeout_s)
    if fault:
        return Trial(fault=fault, folder=str(folder))
    at, losses = read_updates(run_dir)
    timed = sorted(at)[planning + spec.warmup :]
    speed = updates_per_s(at, timed)
    if speed is None:
        return Trial(fault=untimed(run_dir), folder=str(folder))
    verdicts = verdicts_of(events)
    return Trial(
        updates_per_s=speed,
        speeds=speeds(at, timed),
        # After as many updates as the other candidates.
        loss=losses.get(0, {}).get(timed[-1] - planning),
        peak_bytes=peak_bytes(events),
        merged=_merged(candidate, verdicts),
        idle=_idle(candidate, verdicts),
        folder=str(folder),
    )


def new_folder(*parts: str) -> Path:
    """Return the folder of PARTS, emptied of what another launch has left."""
    folder = Path(*parts).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def refuse_invalid(options: Sequence[str], script: Sequence[str]) -> None:
    """Raise UsageError or EnvironmentFault, as a launch does, if OPTIONS or SCRIPT are wrong."""
    words = [sys.executable, "-m", "fleetrun", "--dry-run", *options, *script]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", check=False
    )
    for kind in (UsageError, EnvironmentFault):
        if done.returncode == kind.exit_code:
            sentence = done.stderr.strip().rpartition("\n")[2]
            raise kind(sentence.removeprefix("fleetrun: "))


def launch(
    options: Sequence[str],
    script: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> int | None:
    """Run `fleetrun OPTIONS SCRIPT` with ENVIRON added, its output and logs in FOLDER.

    Return the exit code; None if it was stopped after TIMEOUT_S.
    """
    words = [*options, f"--log_dir={folder / 'log'}", *script]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleetrun", *words],
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


def outcome(
    code: int | None, folder: Path, run_dir: Path, timeout_s: float
) -> tuple[list[EventRecord], str]:
    """Return the events of a launch that ended with CODE, and why it failed, or nothing."""
    events = list(eventfile.read(str(run_dir / names.EVENTS)))
    if code is None:
        return events, f"it was stopped after {timeout_s:g} s"
    return events, _why(folder, run_dir, code, events) if code else ""


def updates_per_s(at: Mapping[int, float], timed: Sequence[int]) -> float | None:
    """Return the speed by the times AT of the updates TIMED, sorted; None if they are too few."""
    if len(timed) < FEWEST_TIMED or at[timed[-1]] <= at[timed[0]]:
        return None
    return (timed[-1] - timed[0]) / (at[timed[-1]] - at[timed[0]])


def speeds(at: Mapping[int, float], timed: Sequence[int]) -> tuple[float, ...]:
    """Return the speed of each half of the updates TIMED, as the range within which it varies.

    >>> speeds({1: 10.0, 2: 11.0, 3: 13.0}, (1, 2, 3))
    (1.0, 0.5)
    """
    middle = len(timed) // 2
    halves = timed[: middle + 1], timed[middle:]
    if len(timed) < FEWEST_TIMED or not all(at[half[-1]] > at[half[0]] for half in halves):
        return ()
    return tuple((half[-1] - half[0]) / (at[half[-1]] - at[half[0]]) for half in halves)


def overlap(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges of two kinds of runs overlap, so that no difference is measured.

    >>> overlap((1.0, 1.2), (1.1, 1.3)), overlap((1.0, 1.1), (1.2, 1.3))
    (True, False)
    """
    return min(first) <= max(other) and min(other) <= max(first)


def write(out: str, texts: Mapping[str, str]) -> None:
    """Write TEXTS, by file name, into the folder OUT."""
    folder = Folder(str(Path(out).resolve()))
    for name, text in texts.items():
        folder.write(name, text, SHARED)
    folder.close()


def untimed(run_dir: Path) -> str:
    """Return why a launch that has succeeded could not be timed."""
    at, _ = read_updates(run_dir)
    return f"it succeeded after {counted(len(at), 'update')}, too few to time" if at else UNSEEN


def read_updates(run_dir: Path) -> tuple[dict[int, float], dict[int, dict[int, float]]]:
    """Return the time of each update on the last rank here, and the losses of each rank."""
    at: dict[int, float] = {}
    losses: dict[int, dict[int, float]] = {}
    folders = [Path(host.path) for host in hosts(run_dir)]
    for path in [path for folder in folders for path in folder.glob(names.rank_records("*"))]:
        rank = path.name.split(".")[1]
        for update in rankfile.updates(str(path)):
            # Each host has its own clock.
            if path.parent == folders[0]:
                at[update.number] = max(at.get(update.number, update.at), update.at)
            if update.loss is not None and rank.isdigit():
                losses.setdefault(int(rank), {})[update.number] = update.loss
    return at, losses


def hosts(run_dir: Path) -> list[runs.Run]:
    """Return the launch in RUN_DIR, on all of its hosts whose files are here."""
    return runs.hosts(runs.read(str(run_dir.resolve())))


def peak_bytes(events: Iterable[EventRecord]) -> int | None:
    """Return the peak host memory of any process, None if unknown."""
    peaks = (reading.whole(event.more.get("peak_bytes")) or 0 for event in events)
    return max(peaks, default=0) or None


def _why(folder: Path, run_dir: Path, code: int, events: Sequence[EventRecord]) -> str:
    """Return why a run failed, in one line; its output is in FOLDER."""
    end = events[-1].more if events else {}
    verdict = reading.text(end.get("verdict"))
    parts = [verdict] if verdict and end.get("exit_code") != 0 else []
    reports = [reportfile.read(str(Path(host.path) / names.REPORT)) for host in hosts(run_dir)]
    culprit = next((report.culprit for report in reports if report and report.culprit), None)
    if culprit is not None:
        words = [line for line in culprit.last_words if line.strip()]
        parts += [f"{culprit.kind}: {culprit.message}"] if culprit.kind else words[-1:]
    if not parts:
        output = (folder / "output.txt").read_text(errors="replace").split("\n")
        parts = [line for line in output if line.strip()][-1:] or [f"it exited with {code}"]
        if verdict:
            parts.insert(0, f"it exited with {code}, although a training succeeded")
    return " ".join(": ".join(parts).split())[:_LONGEST_FAULT]


def verdicts_of(events: Iterable[EventRecord]) -> dict[str, FieldVerdict]:
    """Return the verdict of each field; the worst one if ranks disagree."""
    reports = [event for event in events if event.event == "strategy_report"]
    verdicts: dict[str, FieldVerdict] = {}
    for verdict in eventfile.verdicts(reports[-1]) if reports else ():
        if verdict.name not in verdicts or verdicts[verdict.name].status in IN_EFFECT:
            verdicts[verdict.name] = verdict
    return verdicts


def _field(key: str) -> str:
    """Return the name of a varied field in the evidence.

    >>> _field("gradient_merge_configs.k_steps"), _field("build_strategy.fuse_bn_act_ops")
    ('gradient_merge_configs', 'fuse_bn_act_ops')
    """
    section, dot, name = key.partition(".")
    is_section = section in SECTIONS
    return name.partition(".")[0] if dot and is_section else section


def _merged(candidate: Candidate, verdicts: dict[str, FieldVerdict]) -> int:
    merge = verdicts.get("gradient_merge_configs")
    if merge is None or merge.status not in IN_EFFECT:
        return 1
    for key, value in candidate.values:
        if key.endswith("gradient_merge_configs.k_steps") and value.isdigit():
            return max(1, int(value))
    return 1


def is_idle(key: str, verdicts: Mapping[str, FieldVerdict]) -> bool:
    """Whether the field KEY is known to change nothing."""
    verdict = verdicts.get(_field(key))
    return verdict is not None and verdict.status not in {EFFECTIVE, NO_WORD}


def _idle(
    candidate: Candidate, verdicts: Mapping[str, FieldVerdict]
) -> tuple[tuple[str, str], ...]:
    """Return the varied fields that change nothing, each with a sentence about it."""
    sentences = []
    for key, _ in candidate.values:
        verdict = verdicts.get(_field(key))
        if verdict is not None and is_idle(key, verdicts):
            why = f" ({verdict.why})" if verdict.why else ""
            is_moot = verdict.status == NO_DIFFERENCE
            status = "makes no difference" if is_moot else f"is not in effect: {verdict.status}"
            sentences.append((key, f"{key} {status}{why}"))
    return tuple(sentences)
