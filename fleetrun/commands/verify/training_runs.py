"""Runs the trainings of `fleetrun verify` in turns, each in a separate process."""

from __future__ import annotations

import base64
import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fleetrun.commands import trials
from fleetrun.commands.verify.differences import Value, ValueKey, Values, loss
from fleetrun.model import FieldVerdict
from fleetrun.rundir import names, progress, rankfile, reading, variables
from fleetrun.rundir.rankfile import RankAxes

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
    # The launch itself starts ranks on other hosts, whose snapshots must be found here.
    is_by_ssh: bool = False

    @property
    def snapshots(self) -> int:
        """The last of the updates that are compared one by one; those after it are timed."""
        return self.updates // 2


class Kind(NamedTuple):
    """How a run trains: with the strategy, or as plain Paddle.

    `moves`: the last places of its gradients are changed.
    """

    name: str
    has_strategy: bool = False
    moves: bool = False


class VerifyRun(NamedTuple):
    """The outcome of a run; `fault` says why it does not count."""

    kind: Kind
    folder: str
    fault: str = ""
    values: Values = MappingProxyType({})
    # Losses are those that the ranks printed, by their number.
    are_printed: bool = False
    # All ranks of the job; those of hosts on which verify was typed, too, have snapshots there.
    ranks: int = 0
    updates: int = 0
    # Updates a second of the second half, and of the two parts of it.
    speeds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    device_bytes: int | None = None
    axes: RankAxes | None = None
    verdicts: Mapping[str, FieldVerdict] = MappingProxyType({})


def run_all(
    spec: VerifySpec,
    launch: Callable[[VerifySpec, Kind, str], VerifyRun],
    log: Callable[[str], object],
    is_settled: Callable[[Sequence[VerifyRun]], bool],
) -> list[VerifyRun]:
    """Run the trainings of SPEC in turns by LAUNCH; LOG gets a line of each.

    If IS_SETTLED is false of them, plain Paddle runs once more with gradients moved by rounding.
    """
    done: list[VerifyRun] = []
    strategy, plain = Kind(spec.name, has_strategy=True), Kind("plain Paddle")

    def train(kind: Kind) -> VerifyRun:
        number = sum(run.kind == kind for run in done) + 1
        word = "moved" if kind.moves else "strategy" if kind.has_strategy else "plain"
        run = launch(spec, kind, f"{word}-{number}")
        done.append(run)
        speed = f"{run.speeds[0]:.4g} updates/s" if run.speeds else "too short to time"
        log(f"  {kind.name} {number}: {run.fault or speed}")
        return run

    for kind in [plain, strategy] * spec.repeats:
        # If the strategy fails at once, it is to be seen whether plain Paddle does.
        if any(run.fault for run in done) and any(run.kind == plain for run in done):
            return done
        train(kind)
    # Where verify runs on each host, ranks may have parted on another one, which waits for us.
    is_apart = any(run.ranks > len({key.rank for key in run.values}) for run in done)
    if not any(run.fault for run in done) and (is_apart or not is_settled(done)):
        # Sums in another order are not a mistake: how far apart do they make this training?
        train(plain._replace(name=f"{plain.name}, gradients moved by rounding", moves=True))
    return done


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
    done, paths = _read(snapshots, VerifyRun(kind, str(folder)))
    # A command below `fleetrun exec` may have its own log folder.
    run_dir = Path(paths[0]).parent if paths else folder / "log" / names.LATEST
    seen = trials.outcome(code, folder, run_dir, spec.timeout_s)
    done = done._replace(fault=seen.fault, verdicts=seen.verdicts)
    ranks = {key.rank for key in done.values}
    if not done.fault and spec.is_by_ssh and len(ranks) < max(done.ranks, 1):
        fault = f"{len(ranks)} of {done.ranks or 'all'} ranks {_UNSHARED.format(snapshots)}"
        return done._replace(fault=fault)
    if done.fault or not ranks:
        return done._replace(fault=done.fault or trials.UNSEEN)
    rank_losses = seen.losses
    if not rank_losses:
        # Those that ranks have printed, by number.
        logs = {rank: run_dir / f"{names.LOGS['TRAINER']}.{rank}" for rank in sorted(ranks)}
        texts = {rank: log.read_bytes() for rank, log in logs.items() if log.exists()}
        rank_losses = {
            rank: dict(enumerate(progress.losses(text), 1)) for rank, text in texts.items()
        }
    losses = {
        ValueKey(update, rank): loss(number)
        for rank, numbers in rank_losses.items()
        for update, number in numbers.items()
    }
    timed = sorted(number for number in seen.at if number > spec.snapshots)
    return done._replace(
        values={**done.values, **losses},
        are_printed=not seen.losses,
        updates=max(seen.at, default=0),
        speeds=trials.speeds(seen.at, timed),
        peak_bytes=seen.peak_bytes,
        axes=rankfile.topology(paths),
    )


def _read(folder: Path, done: VerifyRun) -> tuple[VerifyRun, list[str]]:
    """Return DONE with the snapshots in FOLDER, and the paths of the ranks' records."""
    values: dict[ValueKey, Value] = {}
    paths: list[str] = []
    launches: dict[str, int] = {}
    ranks = device_bytes = 0
    columns = ("names", "kinds", "dtypes", "sizes", "sums", "largest", "values")
    for path in sorted(folder.glob("*.jsonl"), key=lambda item: int(item.stem)):
        for line in reading.lines(str(path)):
            paths.append(reading.text(line.get("records")))
            run_dir = os.path.dirname(paths[-1])
            first = launches.setdefault(run_dir, len(launches) * _NEXT_LAUNCH)
            with suppress(KeyError, ValueError, TypeError):
                optimizer = first + line["optimizer"]
                rows = zip(*(line[column] for column in columns), strict=True)
                values |= {
                    ValueKey(line["update"], int(path.stem), optimizer, at): Value._make(
                        (*row, array("d", base64.b64decode(elements)))
                    )
                    for at, (*row, elements) in enumerate(rows)
                }
            ranks = max(ranks, reading.whole(line.get("ranks")) or 0)
            device_bytes = max(device_bytes, reading.whole(line.get("device_bytes")) or 0)
    done = done._replace(values=values, ranks=ranks, device_bytes=device_bytes or None)
    return done, list(dict.fromkeys(filter(None, paths)))
