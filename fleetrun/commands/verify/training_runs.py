"""Launches the trainings of `fleetrun verify`, and reads the snapshots of their ranks."""

from __future__ import annotations

import base64
import json
import os
from array import array
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fleetrun.commands import trials
from fleetrun.commands.trials import TrialOutcome
from fleetrun.commands.verify.differences import Value, ValueKey, Values
from fleetrun.rundir import names, rankfile, reading, variables
from fleetrun.rundir.rankfile import RankAxes

# A command may launch several times: the optimizers of its next launch are numbered from here on.
_NEXT_LAUNCH = 1000
_COLUMNS = ("names", "dtypes", "sizes", "sums", "largest", "values")


class VerifySpec(NamedTuple):
    """The comparison and the launch."""

    # The options of a launch as plain Paddle, and with the strategy.
    plain: tuple[str, ...]
    strategy: tuple[str, ...]
    # The script with its arguments, or the command of `fleetrun exec`.
    script: tuple[str, ...]
    is_exec: bool
    # The strategy's name and fields.
    name: str
    fields: tuple[str, ...]
    # The launch itself starts ranks on other hosts, whose snapshots must be found here.
    is_by_ssh: bool = False
    updates: int = 20
    repeats: int = 1
    timeout_s: float = 600.0
    out: str = "verify"

    @property
    def snapshots(self) -> int:
        """The last of the updates that are compared one by one; those after it are timed."""
        return self.updates // 2


# How a run trains; MOVED: as plain Paddle, with the last places of gradients changed.
PLAIN, STRATEGY, MOVED = "plain", "strategy", "moved"


class VerifyRun(NamedTuple):
    """The outcome of a run; `fault` says why it does not count."""

    # PLAIN, STRATEGY or MOVED.
    kind: str
    fault: str
    shown: TrialOutcome
    values: Values
    # All ranks of the job; those of hosts on which verify was typed, too, have snapshots there.
    ranks: int
    axes: RankAxes | None


def run(spec: VerifySpec, kind: str, name: str) -> VerifyRun:
    """Launch SPEC as a run of KIND in the folder NAME, and return its outcome."""
    folder = trials.new_folder(spec.out, "runs", name)
    snapshots = folder / "snapshots"
    snapshots.mkdir()
    words = ["exec"] * spec.is_exec + [*(spec.strategy if kind == STRATEGY else spec.plain)]
    request = {
        "path": str(snapshots),
        "updates": spec.updates,
        "snapshots": spec.snapshots,
        "moves": kind == MOVED,
    }
    environ = {variables.STOP_AFTER: str(spec.updates), variables.VERIFY: json.dumps(request)}
    if kind != STRATEGY:
        environ[variables.STRATEGY] = ""
    code = trials.launch(words, spec.script, environ, folder, spec.timeout_s)
    values: dict[ValueKey, Value] = {}
    # The records of ranks, and the number of the first optimizer of each launch.
    records: dict[str, None] = {}
    launches: dict[str, int] = {}
    count = 0
    for path in sorted(snapshots.glob("*.jsonl"), key=lambda item: int(item.stem)):
        for line in reading.lines(str(path)):
            record = reading.text(line.get("records"))
            records[record] = None
            first = launches.setdefault(os.path.dirname(record), len(launches) * _NEXT_LAUNCH)
            with suppress(KeyError, ValueError, TypeError):
                key = ValueKey(line["update"], int(path.stem), first + line["optimizer"])
                rows = zip(*(line[column] for column in _COLUMNS), strict=True)
                for at, (*row, elements) in enumerate(rows):
                    numbers = array("d", base64.b64decode(elements))
                    values[key._replace(at=at)] = Value._make((*row, numbers))
            count = max(count, line.get("ranks") or 0)
    # A command below `fleetrun exec` may have its own log folder.
    run_dir = Path(next(iter(records))).parent if records else folder / "log" / names.LATEST
    shown = trials.outcome(code, folder, run_dir, spec.timeout_s, spec.snapshots)
    ranks, fault = {key.rank for key in values}, shown.fault
    if not fault and not ranks:
        fault = trials.UNSEEN
    elif not fault and spec.is_by_ssh and len(ranks) < count:
        fault = (
            f"{len(ranks)} of {count} ranks have left snapshots in {snapshots}: give an --out "
            "that is one folder on all hosts"
        )
    return VerifyRun(kind, fault, shown, values, count, rankfile.topology(records))
