"""Runs with and without a strategy, in turns, and whether they are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from fleetrun.commands import tables
from fleetrun.commands.tune import trials
from fleetrun.commands.tune.halving import MEANINGFUL
from fleetrun.commands.verify import differences
from fleetrun.commands.verify.differences import Difference, Noise, RunDifferences
from fleetrun.commands.verify.training_runs import Kind, VerifyRun, VerifySpec
from fleetrun.conversion import counted
from fleetrun.records import arguments
from fleetrun.records.strategyfiles import IN_EFFECT

DATA = "verify.json"
_MERGE = "gradient_merge"


class Equivalence(NamedTuple):
    """What the runs have shown."""

    runs: tuple[VerifyRun, ...]
    # Why there is no result: plain Paddle fails. And why the strategy alone fails.
    fault: str = ""
    strategy_fault: str = ""
    # The first plain run against the others; against each run with the strategy; and against the
    # one whose gradients were moved in their last places, if that was needed.
    plain: tuple[RunDifferences, ...] = ()
    strategy: tuple[RunDifferences, ...] = ()
    moved: RunDifferences | None = None
    # What of the strategy's runs is more than rounding and noise; in the order of updates.
    parted: tuple[Difference, ...] = ()
    # Where plain runs differ by more than rounding, and the ranks of one.
    noisy: tuple[Difference, ...] = ()
    ranks_apart: Difference | None = None

    @property
    def is_equal(self) -> bool | None:
        """Whether the strategy has trained as plain Paddle does; None: it cannot be known."""
        if self.fault or self.begins_apart:
            return None
        faults = (self.strategy_fault, *(pair.fault for pair in self.strategy))
        return not (self.parted or any(faults))

    @property
    def begins_apart(self) -> bool:
        """Whether runs of plain Paddle begin with different weights."""
        return bool(self.noisy) and not self.noisy[0].update

    def of(self, *, has_strategy: bool) -> list[VerifyRun]:
        """Return the runs with the strategy, or those of plain Paddle."""
        return [
            run
            for run in self.runs
            if run.kind.has_strategy == has_strategy and not run.kind.moves and not run.fault
        ]


def prove(
    spec: VerifySpec,
    launch: Callable[[VerifySpec, Kind, str], VerifyRun],
    log: Callable[[str], object],
) -> Equivalence:
    """Run the trainings of SPEC in turns by LAUNCH, and compare them; LOG gets a line of each."""
    done: list[VerifyRun] = []
    strategy = Kind(spec.name, has_strategy=True)
    plain = Kind("plain Paddle")

    def train(kind: Kind) -> VerifyRun:
        number = sum(run.kind == kind for run in done) + 1
        word = "moved" if kind.moves else "strategy" if kind.has_strategy else "plain"
        run = launch(spec, kind, f"{word}-{number}")
        done.append(run)
        speed = f"{run.updates_per_s:.4g} updates/s" if run.updates_per_s else "too short to time"
        log(f"  {kind.name} {number}: {run.fault or speed}")
        return run

    if spec.merge > 1:
        # What plain Paddle is to do depends on whether it is merged.
        first = train(strategy)
        if first.merged > 1:
            steps = first.merged
            plain = Kind(f"plain Paddle, gradients of {steps} steps added up by hand", merge=steps)
    turns = [plain, strategy] * spec.repeats
    for kind in turns[: -1 if spec.merge > 1 else None]:
        # If the strategy fails at once, it is to be seen whether plain Paddle does.
        if any(run.fault for run in done) and any(run.kind == plain for run in done):
            break
        train(kind)
    failed = next((run for run in done if run.fault and not run.kind.has_strategy), None)
    if failed is not None:
        return Equivalence(tuple(done), fault=f"{failed.kind.name}: {failed.fault}")
    failed = next((run for run in done if run.fault), None)
    if failed is not None:
        return _broken(done, failed)
    equivalence = _compared(done)
    # Where verify runs on each host, ranks may have parted on another one, which waits for us.
    is_apart = any(run.ranks > len(run.snapshots.parameters) for run in done)
    if not is_apart and (not equivalence.parted or equivalence.noisy):
        return equivalence
    # Sums in another order are not a mistake: how far apart do they make this training?
    moved = train(plain._replace(name=f"{plain.name}, gradients moved by rounding", moves=True))
    return equivalence if moved.fault else _compared(done)


def _broken(done: Sequence[VerifyRun], failed: VerifyRun) -> Equivalence:
    """Return what the run that FAILED with the strategy has shown until then."""
    plain = next(run.snapshots for run in done if not run.kind.has_strategy)
    pair = differences.between(*differences.common(plain, failed.snapshots))
    parted = _earliest([pair], differences.noise([]), plain)
    return Equivalence(tuple(done), strategy_fault=failed.fault, parted=parted)


def _compared(done: Sequence[VerifyRun]) -> Equivalence:
    proof = Equivalence(tuple(done))
    plain, strategy = (proof.of(has_strategy=has_strategy) for has_strategy in (False, True))
    first = plain[0].snapshots
    apart = tuple(differences.between(first, run.snapshots) for run in plain[1:])
    moved = [
        differences.between(first, run.snapshots)
        for run in done
        if run.kind.moves and not run.fault
    ]
    pairs = tuple(differences.between(first, run.snapshots) for run in strategy)
    known = differences.noise([*apart, *moved])
    none = differences.noise([])
    return proof._replace(
        plain=apart,
        strategy=pairs,
        moved=moved[0] if moved else None,
        parted=_earliest(pairs, known, first),
        noisy=_earliest(apart, none, first),
        ranks_apart=differences.ranks_apart(first, plain[0].axes),
    )


def _earliest(
    pairs: Iterable[RunDifferences], known: Noise, first: differences.RunSnapshots
) -> tuple[Difference, ...]:
    parted = [apart for pair in pairs for apart in differences.beyond(pair, known, first)]
    return tuple(sorted(parted, key=lambda apart: (apart.is_printed, apart.update)))


def text(spec: VerifySpec, proof: Equivalence) -> str:
    """Return what PROOF has shown, to read."""
    if proof.fault:
        return f"This proves nothing: {proof.fault}."
    if proof.strategy_fault:
        fault = proof.strategy_fault.rstrip(".")
        first = "".join(f" Both diverge at {_where(proof, apart)}." for apart in proof.parted[:1])
        return f"Not equal: plain Paddle trains, and with {spec.name} {fault}.{first}"
    lines = [*_of_plain(proof), *_result(spec, proof)]
    lines.append(tables.layout(_figures(spec, proof), indent=2))
    verdicts = proof.of(has_strategy=True)[0].verdicts.values()
    rows = [
        (field.name, field.asked, field.in_effect or "-", field.status.replace("_", " "), field.why)
        for field in verdicts
    ]
    if rows:
        heads = ("field", "asked", "in effect", "status", "why")
        lines.append(tables.layout(rows, heads=heads, indent=2, width=tables.width()))
    return "\n".join(lines)


def _of_plain(proof: Equivalence) -> list[str]:
    """Return the first lines: where plain Paddle is not equal to itself."""
    lines = []
    fault = next((pair.fault for pair in proof.plain if pair.fault), "")
    if fault:
        lines.append(f"Two runs of plain Paddle cannot be compared: {fault}.")
    if proof.noisy:
        first = proof.noisy[0]
        why = (
            "they begin with different weights (seed the script, and resume from no checkpoint)"
            if proof.begins_apart
            else "the script does not compute the same twice (seeds, data, kernels)"
        )
        rest = "" if proof.begins_apart else " Only larger differences than these are visible."
        lines.append(f"Even two runs of plain Paddle differ: {_where(proof, first)}; {why}.{rest}")
    if proof.ranks_apart is not None:
        first = proof.ranks_apart
        lines.append(
            f"Even the ranks of plain Paddle differ: {_rank(proof, first.rank)} "
            f"from {_rank(proof, first.other_rank)} {_by(first)} in {first.name} after update "
            f"{first.update}: these are not copies of one model (is it wrapped in DataParallel or "
            "fleet's model?)."
        )
    return lines


def _result(spec: VerifySpec, proof: Equivalence) -> list[str]:
    plain = proof.of(has_strategy=False)[0]
    count = len(plain.snapshots.parameters)
    ranks = f"{count} of {plain.ranks} ranks" if plain.ranks > count else counted(count, "rank")
    fault = next((pair.fault for pair in proof.strategy if pair.fault), "")
    if fault:
        return [f"Not equal: {fault}."]
    if proof.begins_apart:
        return ["This proves nothing: runs that begin with different weights always differ."]
    if proof.parted:
        first = proof.parted[0]
        changing = [name for name in spec.fields if name.startswith(MEANINGFUL)]
        changing = [name for name in changing if not name.startswith(_MERGE)]
        where = f"{_where(proof, first)}. Noise and rounding come to {first.allowed:.3g}."
        weight = next((difference for difference in proof.parted if difference.name), None)
        if not first.name and weight is not None:
            held = f"{weight.name} of {_rank(proof, weight.rank)}"
            where += f" The first parameter is {held}: it differs {_after(weight)}."
        at = "" if first.is_printed else f" at update {first.update}"
        lines = [f"Not equal: {spec.name} and plain Paddle diverge{at}: {where}"]
        if changing:
            lines.append(f"{', '.join(changing)}: changes the computation on purpose.")
        return lines
    how = "to the last bit"
    if not all(pair.are_equal for pair in proof.strategy):
        how = "within the noise of two plain runs" if proof.noisy else "within rounding"
    seen = "weights and losses" if any(run.snapshots.losses for run in proof.runs) else "weights"
    lines = [f"Equal: the {seen} are those of plain Paddle {how}, on {ranks}."]
    unseen = [
        difference
        for run in proof.strategy
        for difference in run.weights.values()
        if not difference.apart
    ]
    if unseen:
        count = len({(difference.rank, difference.name) for difference in unseen})
        verb = "differs" if count == 1 else "differ"
        lines.insert(
            0,
            f"{counted(count, 'parameter')} {verb} only in elements whose values are not recorded: "
            f"{unseen[0].name} of {_rank(proof, unseen[0].rank)} after update "
            f"{unseen[0].update}, for example. Whether that is rounding is not known.",
        )
    merge = proof.of(has_strategy=False)[0].kind.merge
    if merge > 1:
        lines.append(
            f"Compared by rounds: each update of {spec.name} with plain Paddle that adds up the "
            f"gradients of {merge} steps by hand. Plain Paddle that steps each time computes "
            "something else."
        )
    return lines


def _figures(spec: VerifySpec, proof: Equivalence) -> list[tuple[str, str]]:
    plain, strategy = (proof.of(has_strategy=kind) for kind in (False, True))
    first = plain[0].snapshots
    made = min(run.updates for run in (*plain, *strategy))
    compared = [update for update in first.updates() if update]
    timed = f"timed: {spec.snapshots + 1} to {made}" if made > spec.snapshots else "none timed"
    short = f"; the script ended after {made}" if made < spec.updates else ""
    named = f"{', '.join(map(str, compared))}; {timed}{short}"
    whole = all(
        len(parameter.values) == parameter.size
        for rank in first.parameters.values()
        for parameters in rank.values()
        for parameter in parameters
    )
    count = {
        (key, place)
        for rank in first.parameters.values()
        for (key, _), held in rank.items()
        for place in range(len(held))
    }
    how = "all elements" if whole else "the checksums of all elements, and some elements"
    rows = [
        ("updates compared", named),
        ("parameters", f"{len(count)} on {counted(len(first.parameters), 'rank')}, {how}"),
    ]
    for what, pairs in (
        ("plain Paddle again", proof.plain),
        *(() if proof.moved is None else (("moved by rounding", (proof.moved,)),)),
        (spec.name, proof.strategy),
    ):
        weights = differences.largest(
            difference for pair in pairs for difference in pair.weights.values()
        )
        losses = differences.largest(
            difference for pair in pairs for difference in pair.losses.values()
        )
        largest = (
            f"weights {_most(weights)}, losses {_most(losses) if first.losses else 'not seen'}"
        )
        rows.append((f"apart: {what}", largest))
    rows += [("speed", _speed(spec, proof)), *_memory(plain, strategy, spec.name)]
    return rows


def _speed(spec: VerifySpec, proof: Equivalence) -> str:
    """Return how much faster the strategy is, if that was measured."""
    plain, strategy = (
        [speed for run in proof.of(has_strategy=kind) for speed in run.speeds]
        for kind in (False, True)
    )
    if not plain or not strategy:
        return "too few updates to time: give more --updates"
    of_each = f"{_interval(strategy)} updates/s, plain Paddle {_interval(plain)}"
    verdicts = proof.of(has_strategy=True)[0].verdicts
    if all(trials.is_idle(name, verdicts) for name in spec.fields):
        return f"no difference measured, equal in effect: {of_each}"
    if trials.overlap(plain, strategy):
        return f"no difference measured: {of_each}"
    return f"{median(strategy) / median(plain):.3f} times that of plain Paddle: {of_each}"


def _interval(speeds: Sequence[float]) -> str:
    return f"{min(speeds):.4g} to {max(speeds):.4g}"


def _memory(
    plain: Sequence[VerifyRun], strategy: Sequence[VerifyRun], name: str
) -> Iterable[tuple[str, str]]:
    for what, of in (("memory", "peak_bytes"), ("memory of the GPU", "device_bytes")):
        most = [
            max((getattr(run, of) or 0 for run in runs), default=0) for runs in (plain, strategy)
        ]
        if all(most):
            own, theirs = (f"{size / 2**20:.0f} MiB" for size in most)
            yield what, f"{theirs} at most in a process of {name}, {own} of plain Paddle"


def _where(proof: Equivalence, difference: Difference) -> str:
    rank = _rank(proof, difference.rank)
    if difference.is_printed:
        return f"loss {difference.update} that {rank} printed differs {_by(difference)}"
    if not difference.name:
        return f"the loss of {rank} in update {difference.update} differs {_by(difference)}"
    return f"{difference.name} of {rank} differs {_after(difference)}"


def _rank(proof: Equivalence, rank: int | None) -> str:
    """Name RANK with its coordinates, where the job has other axes than dp."""
    axes = next((run.axes for run in proof.runs if run.axes is not None), None)
    place = axes.place(rank) if axes is not None and rank is not None else ""
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def _after(difference: Difference) -> str:
    return f"{_by(difference)} after update {difference.update}"


def _by(difference: Difference) -> str:
    share = (
        f" ({difference.share:.2g} of its largest number)"
        if difference.name and difference.largest
        else ""
    )
    return f"by {difference.apart:.3g}{share}"


def _most(difference: Difference | None) -> str:
    if difference is None:
        return "not at all"
    name = f"{difference.name}, " if difference.name else ""
    at = "printed loss" if difference.is_printed else "update"
    return f"{difference.apart:.3g} ({name}rank {difference.rank}, {at} {difference.update})"


def write(spec: VerifySpec, proof: Equivalence) -> None:
    """Write the results as JSON to the requested folder."""

    def figure(value: float) -> Any:  # noqa: ANN401 - JSON has no infinity
        return value if abs(value) < float("inf") else str(value)

    def row(difference: Difference | None) -> Any:  # noqa: ANN401 - JSON
        if difference is None:
            return None
        keys = {
            "update": difference.update,
            "rank": difference.rank,
            "parameter": difference.name or None,
        }
        keys |= {} if difference.other_rank is None else {"other_rank": difference.other_rank}
        return {**keys, "apart": figure(difference.apart), "allowed": figure(difference.allowed)}

    document = {
        "schema": 1,
        "launch": arguments.conceal([*spec.strategy, *spec.script])[0],
        "updates": spec.updates,
        "equal": proof.is_equal,
        "fault": proof.fault or proof.strategy_fault or None,
        "parts_at": row(proof.parted[0] if proof.parted else None),
        "plain_parts_at": row(proof.noisy[0] if proof.noisy else None),
        "plain_ranks_part_at": row(proof.ranks_apart),
        "largest": {
            of: row(
                differences.largest(
                    difference
                    for pair in proof.strategy
                    for difference in getattr(pair, of).values()
                )
            )
            for of in ("weights", "losses")
        },
        "runs": [
            {
                "kind": run.kind.name,
                "fault": run.fault or None,
                "updates_per_s": run.updates_per_s,
                "peak_bytes": run.peak_bytes,
                "device_bytes": run.device_bytes,
                "in_effect": [k for k, v in run.verdicts.items() if v.status in IN_EFFECT],
                "folder": run.folder,
            }
            for run in proof.runs
        ],
    }
    trials.write(spec.out, {DATA: json.dumps(document, indent=1) + "\n"})
