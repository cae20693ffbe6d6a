"""Launches the trainings of `fleetrun verify`, and reads the snapshots of their ranks."""

from __future__ import annotations

import base64
import json
import os
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fleetrun.commands import trials
from fleetrun.commands.verify.differences import Value, ValueKey, Values
from fleetrun.model import FieldVerdict
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


class Kind(NamedTuple):
    """How a run trains; `moves`: the last places of its gradients are changed."""

    name: str
    has_strategy: bool = False
    moves: bool = False


class VerifyRun(NamedTuple):
    """The outcome of a run; `fault` says why it does not count."""

    kind: Kind
    folder: str
    fault: str = ""
    values: Values = MappingProxyType({})
    # All ranks of the job; those of hosts on which verify was typed, too, have snapshots there.
    ranks: int = 0
    updates: int = 0
    # Updates a second of the second half, and of the two parts of it.
    speeds: tuple[float, ...] = ()
    peak_bytes: int = 0
    device_bytes: int = 0
    axes: RankAxes | None = None
    verdicts: Mapping[str, FieldVerdict] = MappingProxyType({})
    # Fields of the strategy that are known to change nothing.
    idle: frozenset[str] = frozenset()


def run(spec: VerifySpec, kind: Kind, name: str) -> VerifyRun:
    """Launch SPEC as a run of KIND in the folder NAME, and return its outcome."""
    folder = trials.new_folder(spec.out, "runs", name)
    snapshots = folder / "snapshots"
    snapshots.mkdir()
    words = ["exec"] * spec.is_exec + [*(spec.strategy if kind.has_strategy else spec.plain)]
    request = {
        "path": str(snapshots),
        "updates": spec.updates,
        "snapshots": spec.snapshots,
        "moves": kind.moves,
    }
    environ = {variables.STOP_AFTER: str(spec.updates), variables.VERIFY: json.dumps(request)}
    if not kind.has_strategy:
        environ[variables.STRATEGY] = ""
    code = trials.launch(words, spec.script, environ, folder, spec.timeout_s)
    done, paths = _with_snapshots(snapshots, VerifyRun(kind, str(folder)))
    # A command below `fleetrun exec` may have its own log folder.
    run_dir = Path(paths[0]).parent if paths else folder / "log" / names.LATEST
    shown = trials.outcome(code, folder, run_dir, spec.timeout_s)
    ranks = sorted({key.rank for key in done.values})
    fault = shown.fault or ("" if ranks else trials.too_short({}))
    if not fault and spec.is_by_ssh and len(ranks) < done.ranks:
        fault = (
            f"{len(ranks)} of {done.ranks} ranks have left snapshots in {snapshots}: give an --out "
            "that is one folder on all hosts"
        )
    return done._replace(
        fault=fault,
        updates=max(shown.at, default=0),
        speeds=shown.speeds(spec.snapshots),
        peak_bytes=shown.peak_bytes or 0,
        axes=rankfile.topology(paths),
        verdicts=shown.verdicts,
        idle=frozenset(name for name in spec.fields if shown.idle(name)),
    )


def _with_snapshots(folder: Path, done: VerifyRun) -> tuple[VerifyRun, list[str]]:
    """Return DONE with the snapshots in FOLDER, and the paths of the ranks' records."""
    values: dict[ValueKey, Value] = {}
    paths: list[str] = []
    launches: dict[str, int] = {}
    ranks = device_bytes = 0
    for path in sorted(folder.glob("*.jsonl"), key=lambda item: int(item.stem)):
        for line in reading.lines(str(path)):
            paths.append(reading.text(line.get("records")))
            run_dir = os.path.dirname(paths[-1])
            first = launches.setdefault(run_dir, len(launches) * _NEXT_LAUNCH)
            with suppress(KeyError, ValueError, TypeError):
                optimizer = first + line["optimizer"]
                rows = zip(*(line[column] for column in _COLUMNS), strict=True)
                values |= {
                    ValueKey(line["update"], int(path.stem), optimizer, at): Value._make(
                        (*row, array("d", base64.b64decode(elements)))
                    )
                    for at, (*row, elements) in enumerate(rows)
                }
            ranks = max(ranks, reading.whole(line.get("ranks")) or 0)
            device_bytes = max(device_bytes, reading.whole(line.get("device_bytes")) or 0)
    done = done._replace(values=values, ranks=ranks, device_bytes=device_bytes)
    return done, list(dict.fromkeys(filter(None, paths)))
