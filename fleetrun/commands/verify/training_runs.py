"""Runs one training of `fleetrun verify` in a separate process, and reads its records."""

from __future__ import annotations

import base64
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fleetrun.commands.tune import trials
from fleetrun.commands.verify.differences import Parameter, RunSnapshots
from fleetrun.model import FieldVerdict
from fleetrun.records import names, progress, rankfile, reading, variables
from fleetrun.records.eventfile import EventRecord
from fleetrun.records.rankfile import RankAxes
from fleetrun.records.strategyfiles import IN_EFFECT

_MERGE = "gradient_merge_configs"
# A command may launch several times: the optimizers of its next launch are numbered from here on.
_NEXT_LAUNCH = 1000
_UNSHARED = "have left snapshots in {}: give an --out that is one folder on all hosts"


class VerifySpec(NamedTuple):
    """The comparison and the launch."""

    updates: int
    repeats: int
    timeout_s: float
    out: str
    # The options of a launch as plain Paddle, and with the strategy.
    plain: tuple[str, ...]
    strategy: tuple[str, ...]
    # The script with its arguments, or the command of `fleetrun exec`.
    script: tuple[str, ...]
    is_exec: bool
    # The strategy's name and fields.
    name: str
    fields: tuple[str, ...]
    # Steps of the script per update if it requests merging, and whether gradients are averaged.
    merge: int = 1
    averages: bool = True
    # The launch itself starts ranks on other hosts, whose snapshots must be found here.
    is_by_ssh: bool = False

    @property
    def snapshots(self) -> int:
        """The last of the updates that are compared one by one; those after it are timed."""
        return self.updates // 2


class Kind(NamedTuple):
    """How a run trains: with the strategy, or as plain Paddle that may add up gradients by hand.

    `moves`: the last places of its gradients are changed.
    """

    name: str
    has_strategy: bool = False
    merge: int = 1
    moves: bool = False


class VerifyRun(NamedTuple):
    """The outcome of a run."""

    kind: Kind
    folder: str
    # Why the run does not count.
    fault: str = ""
    snapshots: RunSnapshots = RunSnapshots({}, {})
    # All ranks of the job; those of hosts on which verify was typed, too, have snapshots there.
    ranks: int = 0
    updates: int = 0
    updates_per_s: float | None = None
    # Of each half of the timed updates.
    speeds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    device_bytes: int | None = None
    axes: RankAxes | None = None
    verdicts: Mapping[str, FieldVerdict] = {}

    @property
    def merged(self) -> int:
        """The steps of the script per update that fleetrun has merged."""
        merge = self.verdicts.get(_MERGE)
        if merge is None or merge.status not in IN_EFFECT:
            return 1
        steps = [word.partition("=")[2] for word in merge.in_effect.split() if "k_steps" in word]
        return int(steps[0]) if steps and steps[0].isdigit() else 1


def run(spec: VerifySpec, kind: Kind, name: str) -> VerifyRun:
    """Launch SPEC as a run of KIND in the folder NAME, and return its outcome."""
    folder = trials.new_folder(spec.out, "runs", name)
    snapshots = folder / "snapshots"
    snapshots.mkdir()
    options = ["exec"] * spec.is_exec + [*(spec.strategy if kind.has_strategy else spec.plain)]
    request = {
        "path": str(snapshots),
        "updates": spec.updates,
        "snapshots": spec.snapshots,
        "merge": kind.merge,
        "averages": spec.averages,
        "moves": kind.moves,
    }
    environ = {variables.STOP_AFTER: str(spec.updates), variables.VERIFY: json.dumps(request)}
    if not kind.has_strategy:
        environ[variables.STRATEGY] = ""
    code = trials.launch(options, spec.script, environ, folder, spec.timeout_s)
    parameters, paths, ranks, device_bytes = _read(snapshots)
    # A command below `fleetrun exec` may have its own log folder.
    latest = folder / "log" / names.LATEST
    run_dir = Path(paths[0]).parent if paths else latest
    events, fault = trials.outcome(code, folder, run_dir, spec.timeout_s)
    done = VerifyRun(
        *(kind, str(folder)),
        snapshots=RunSnapshots(parameters, {}),
        verdicts=trials.verdicts_of(events),
    )
    if not fault and spec.is_by_ssh and len(parameters) < max(ranks, 1):
        fault = f"{len(parameters)} of {ranks or 'all'} ranks {_UNSHARED.format(snapshots)}"
    if fault or not parameters:
        return done._replace(fault=fault or trials.UNSEEN)
    at, losses = trials.read_updates(run_dir)
    timed = sorted(number for number in at if number > spec.snapshots)
    return done._replace(
        snapshots=RunSnapshots(
            parameters, losses or _printed(events, run_dir), are_printed=not losses
        ),
        ranks=ranks,
        updates=max(at, default=0),
        updates_per_s=trials.updates_per_s(at, timed),
        speeds=trials.speeds(at, timed),
        peak_bytes=trials.peak_bytes(events),
        device_bytes=device_bytes,
        axes=rankfile.topology(paths),
    )


def _read(
    folder: Path,
) -> tuple[dict[int, dict[tuple[int, int], list[Parameter]]], list[str], int, int | None]:
    """Return the snapshots in FOLDER, the paths of records, how many ranks, and device memory."""
    snapshots: dict[int, dict[tuple[int, int], list[Parameter]]] = {}
    paths: list[str] = []
    launches: dict[str, int] = {}
    ranks, device_bytes = 0, None
    for path in sorted(folder.glob("*.jsonl"), key=lambda item: int(item.stem)):
        for line in reading.lines(str(path)):
            paths.append(reading.text(line.get("records")))
            run_dir = os.path.dirname(paths[-1])
            first = launches.setdefault(run_dir, len(launches) * _NEXT_LAUNCH)
            optimizer, update = (reading.whole(line.get(name)) for name in ("optimizer", "update"))
            with suppress(KeyError, ValueError, TypeError):
                if optimizer is not None and update is not None:
                    key = first + optimizer, update
                    snapshots.setdefault(int(path.stem), {})[key] = _parameters(line)
            ranks = max(ranks, reading.whole(line.get("ranks")) or 0)
            device_bytes = (
                max(device_bytes or 0, reading.whole(line.get("device_bytes")) or 0) or None
            )
    return snapshots, list(dict.fromkeys(filter(None, paths))), ranks, device_bytes


def _parameters(line: Mapping[str, Any]) -> list[Parameter]:
    columns = ("names", "kinds", "dtypes", "sizes", "sums", "largest", "values")
    return [
        Parameter._make((*row, array("d", base64.b64decode(values))))
        for *row, values in zip(*(line[column] for column in columns), strict=True)
    ]


def _printed(events: Sequence[EventRecord], run_dir: Path) -> dict[int, dict[int, float]]:
    """Return the losses that ranks have printed, by number, if Paddle showed none."""
    by_rank = {}
    for rank in sorted({event.rank for event in events if event.rank is not None}):
        with suppress(OSError):
            text = (run_dir / f"{names.LOGS['TRAINER']}.{rank}").read_bytes()
            losses = progress.losses(text)
            if losses:
                by_rank[rank] = dict(enumerate(losses, 1))
    return by_rank
