"""One run of a candidate: the launch in a process of its own, and what it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fleetrun.commands.tune.candidates import FEWEST_TIMED
from fleetrun.commands.tune.halving import Trial
from fleetrun.records import eventfile, names, rankfile, reading, reportfile, variables
from fleetrun.records.strategyfiles import EFFECTIVE, IN_EFFECT, NO_DIFFERENCE, SECTIONS

if TYPE_CHECKING:
    from fleetrun.commands.tune.candidates import Candidate, TuneSpec
    from fleetrun.model import FieldVerdict
    from fleetrun.records.eventfile import EventRecord

# How long a launcher that was asked to stop has for it.
_GRACE_S = 60.0
_LONGEST_FAULT = 300


class Runner:
    """Where candidates run, one after the other."""

    def __init__(self, spec: TuneSpec) -> None:
        self._spec = spec

    def run(self, candidate: Candidate, steps: int, name: str) -> Trial:
        """Launch CANDIDATE in the folder NAME for STEPS updates and those in which it plans.

        Return how it went.
        """
        folder = Path(self._spec.out).absolute() / "trials" / name
        folder.mkdir(parents=True, exist_ok=True)
        # A launch that is refused leaves none, and must not be judged by another's.
        (folder / "log" / names.LATEST).unlink(missing_ok=True)
        planning = self._spec.planning(candidate)
        code, is_late = self._launch(candidate, planning + steps, folder)
        events = list(eventfile.read(str(folder / "log" / names.LATEST / names.EVENTS)))
        if is_late:
            fault = f"it was stopped after {self._spec.timeout_s:g} s"
            return Trial(fault=fault, folder=str(folder))
        if code:
            return Trial(fault=_why(folder, code, events), folder=str(folder))
        at, losses = read_updates(folder / "log" / names.LATEST)
        timed = sorted(at)[planning + self._spec.warmup :]
        if len(timed) < FEWEST_TIMED or at[timed[-1]] <= at[timed[0]]:
            made = len(at)
            fault = (
                f"it succeeded after {made} updates, too few to time"
                if made
                else "it succeeded, but no update was seen: does it train with Paddle?"
            )
            return Trial(fault=fault, folder=str(folder))
        verdicts = _verdicts(events)
        return Trial(
            updates_per_s=(timed[-1] - timed[0]) / (at[timed[-1]] - at[timed[0]]),
            # After as many updates as the other candidates have made.
            loss=losses.get(timed[-1] - planning),
            peak_bytes=max(
                (reading.whole(one.more.get("peak_bytes")) or 0 for one in events), default=0
            )
            or None,
            merged=_merged(candidate, verdicts),
            idle=_idle(candidate, verdicts),
            folder=str(folder),
        )

    def _launch(self, candidate: Candidate, steps: int, folder: Path) -> tuple[int, bool]:
        spec = self._spec
        argv = [sys.executable, "-m", "fleetrun", *spec.launch, f"--log_dir={folder / 'log'}"]
        argv += [f"--set={key}={value}" for key, value in candidate.values]
        environ = {
            **os.environ,
            variables.STOP_AFTER: str(steps),
        }
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*argv, *spec.script],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                return process.wait(spec.timeout_s), False
            except subprocess.TimeoutExpired:
                return process.returncode or 0, True
            finally:
                # Also when somebody presses Ctrl-C: the ranks end before we do.
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(_GRACE_S)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()


def read_updates(run_dir: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return when each update was made by the last rank that made it, and rank 0's losses."""
    at: dict[int, float] = {}
    losses: dict[int, float] = {}
    for path in run_dir.glob(names.rank_records("*")):
        for one in rankfile.updates(str(path)):
            at[one.number] = max(at.get(one.number, one.at), one.at)
            if path.name == names.rank_records("0") and one.loss is not None:
                losses[one.number] = one.loss
    return at, losses


def _why(folder: Path, code: int, events: list[EventRecord]) -> str:
    """Return why a run failed, in one line."""
    verdict = reading.text(events[-1].more.get("verdict")) if events else ""
    parts = [verdict] if verdict else []
    found = reportfile.read(str(folder / "log" / names.LATEST / names.REPORT))
    if found is not None and found.culprit is not None:
        one = found.culprit
        words = [line for line in one.last_words if line.strip()]
        parts += [f"{one.kind}: {one.message}"] if one.kind else words[-1:]
    if not parts:
        said = (folder / "output.txt").read_text(errors="replace").split("\n")
        parts = [line for line in said if line.strip()][-1:] or [f"it exited with {code}"]
    return " ".join(": ".join(parts).split())[:_LONGEST_FAULT]


def _verdicts(events: list[EventRecord]) -> dict[str, FieldVerdict]:
    """Return what became of each field, where all ranks agree or the worst that one says."""
    judged = [one for one in events if one.event == "strategy_report"]
    found: dict[str, FieldVerdict] = {}
    for one in eventfile.verdicts(judged[-1]) if judged else ():
        if one.name not in found or found[one.name].status in IN_EFFECT:
            found[one.name] = one
    return found


def _field(key: str) -> str:
    """Return under which name the evidence speaks of a varied field.

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


def _idle(candidate: Candidate, verdicts: dict[str, FieldVerdict]) -> tuple[str, ...]:
    """Return which varied fields change nothing, as far as the evidence says."""
    found = []
    for key, _ in candidate.values:
        one = verdicts.get(_field(key))
        if one is not None and one.status != EFFECTIVE:
            why = f" ({one.why})" if one.why else ""
            is_moot = one.status == NO_DIFFERENCE
            status = "makes no difference" if is_moot else f"is not in effect: {one.status}"
            found.append(f"{key} {status}{why}")
    return tuple(found)
