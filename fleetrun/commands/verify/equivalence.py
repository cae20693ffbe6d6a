"""Runs with and without a strategy, in turns, and whether they are equal."""

from __future__ import annotations

import itertools
import json
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.commands import tables
from fleetrun.commands.tune import trials
from fleetrun.commands.tune.halving import MEANINGFUL
from fleetrun.commands.verify import differences
from fleetrun.commands.verify.training_runs import Kind
from fleetrun.conversion import counted
from fleetrun.records import arguments
from fleetrun.records.strategyfiles import IN_EFFECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fleetrun.commands.verify.differences import Difference, Noise, RunDifferences
    from fleetrun.commands.verify.training_runs import VerifyRun, VerifySpec

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
    def is_equal(self) -> bool:
        """Whether the strategy has trained as plain Paddle does."""
        faults = (self.fault, self.strategy_fault, *(each.fault for each in self.strategy))
        return not (self.parted or any(faults))

    def of(self, *, has_strategy: bool) -> list[VerifyRun]:
        """Return the runs with the strategy, or those of plain Paddle."""
        return [
            one
            for one in self.runs
            if one.kind.has_strategy == has_strategy and not one.kind.moves and not one.fault
        ]


def prove(
    spec: VerifySpec,
    launch: Callable[[VerifySpec, Kind, str], VerifyRun],
    say: Callable[[str], object],
) -> Equivalence:
    """Let LAUNCH run what SPEC asks for in turns, and compare; SAY tells of each run."""
    done: list[VerifyRun] = []
    strategy = Kind(spec.name, has_strategy=True)
    plain = Kind("plain Paddle")

    def run(kind: Kind) -> VerifyRun:
        number = sum(one.kind == kind for one in done) + 1
        word = "moved" if kind.moves else "strategy" if kind.has_strategy else "plain"
        one = launch(spec, kind, f"{word}-{number}")
        done.append(one)
        speed = f"{one.updates_per_s:.4g} updates/s" if one.updates_per_s else "too short to time"
        say(f"  {kind.name} {number}: {one.fault or speed}")
        return one

    if spec.merge > 1:
        # What plain Paddle is to do depends on whether it is merged.
        first = run(strategy)
        if first.merged > 1:
            steps = first.merged
            plain = Kind(f"plain Paddle, gradients of {steps} steps added up by hand", merge=steps)
    turns = [plain, strategy] * spec.repeats
    for kind in turns[: -1 if spec.merge > 1 else None]:
        # If the strategy fails at once, it is to be seen whether plain Paddle does.
        if any(one.fault for one in done) and any(one.kind == plain for one in done):
            break
        run(kind)
    failed = next((one for one in done if one.fault and not one.kind.has_strategy), None)
    if failed is not None:
        return Equivalence(tuple(done), fault=f"{failed.kind.name}: {failed.fault}")
    failed = next((one for one in done if one.fault), None)
    if failed is not None:
        return _broken(done, failed)
    found = _compared(done)
    if not found.parted or found.noisy:
        return found
    # Sums in another order are no mistake: how far apart do they make this training?
    moved = run(plain._replace(name=f"{plain.name}, gradients moved by rounding", moves=True))
    return found if moved.fault else _compared(done)


def _broken(done: Sequence[VerifyRun], failed: VerifyRun) -> Equivalence:
    """Return what the run that FAILED with the strategy has shown until then."""
    plain = next(one.snapshots for one in done if not one.kind.has_strategy)
    found = differences.between(*differences.common(plain, failed.snapshots))
    parted = _earliest([found], differences.noise([]), plain)
    return Equivalence(tuple(done), strategy_fault=failed.fault, parted=parted)


def _compared(done: Sequence[VerifyRun]) -> Equivalence:
    proof = Equivalence(tuple(done))
    plain, strategy = (proof.of(has_strategy=each) for each in (False, True))
    first = plain[0].snapshots
    apart = tuple(differences.between(first, one.snapshots) for one in plain[1:])
    moved = [
        differences.between(first, one.snapshots)
        for one in done
        if one.kind.moves and not one.fault
    ]
    found = tuple(differences.between(first, one.snapshots) for one in strategy)
    known = differences.noise([*apart, *moved])
    none = differences.noise([])
    return proof._replace(
        plain=apart,
        strategy=found,
        moved=moved[0] if moved else None,
        parted=_earliest(found, known, first),
        noisy=_earliest(apart, none, first),
        ranks_apart=differences.ranks_apart(first, plain[0].axes),
    )


def _earliest(
    found: Iterable[RunDifferences], known: Noise, first: differences.RunSnapshots
) -> tuple[Difference, ...]:
    all_found = [each for one in found for each in differences.beyond(one, known, first)]
    return tuple(sorted(all_found, key=lambda each: each.update))


def text(spec: VerifySpec, proof: Equivalence) -> str:
    """Return what PROOF has shown, to read."""
    if proof.fault:
        return f"Nothing is proved: {proof.fault}."
    if proof.strategy_fault:
        fault = proof.strategy_fault.rstrip(".")
        first = "".join(f" Both part at {_where(one)}." for one in proof.parted[:1])
        return f"Not equal: plain Paddle trains, and with {spec.name} {fault}.{first}"
    lines = [*_of_plain(proof), *_result(spec, proof)]
    lines.append(tables.layout(_figures(spec, proof), indent=2))
    verdicts = proof.of(has_strategy=True)[0].verdicts.values()
    rows = [
        (one.name, one.asked, one.in_effect or "-", one.status.replace("_", " "), one.why)
        for one in verdicts
    ]
    if rows:
        heads = ("field", "asked", "in effect", "status", "evidence")
        lines.append(tables.layout(rows, heads=heads, indent=2, width=tables.width()))
    return "\n".join(lines)


def _of_plain(proof: Equivalence) -> list[str]:
    """Return what is to be said first: where plain Paddle is not equal to itself."""
    lines = []
    fault = next((each.fault for each in proof.plain if each.fault), "")
    if fault:
        lines.append(f"Two runs of plain Paddle cannot be compared: {fault}.")
    if proof.noisy:
        one = proof.noisy[0]
        why = (
            "they begin with different weights (seed the script, and let it resume from nothing)"
            if not one.update
            else "the script does not compute the same twice (seeds, data, kernels)"
        )
        lines.append(
            f"Two runs of plain Paddle differ themselves: {_where(one)}; {why}. Only what differs "
            "more than they do can be seen."
        )
    if proof.ranks_apart is not None:
        one = proof.ranks_apart
        lines.append(
            f"The ranks of plain Paddle differ themselves: rank {one.rank} from rank "
            f"{one.other_rank} {_by(one)} in {one.name} after update {one.update}: these are not "
            "copies of one model (is it wrapped in DataParallel or fleet's model?)."
        )
    return lines


def _result(spec: VerifySpec, proof: Equivalence) -> list[str]:
    ranks = counted(len(proof.of(has_strategy=False)[0].snapshots.parameters), "rank")
    fault = next((each.fault for each in proof.strategy if each.fault), "")
    if fault:
        return [f"Not equal: {fault}."]
    if proof.parted:
        one = proof.parted[0]
        changing = [name for name in spec.fields if name.startswith(MEANINGFUL)]
        changing = [name for name in changing if not name.startswith(_MERGE)]
        where = f"{_where(one)}. Noise and rounding come to {one.allowed:.3g}."
        lines = [f"Not equal: {spec.name} and plain Paddle part at update {one.update}: {where}"]
        if changing:
            lines.append(f"What {', '.join(changing)} computes is meant to be something else.")
        return lines
    how = "to the last bit"
    if not all(each.are_equal for each in proof.strategy):
        how = "within the noise of two plain runs" if proof.noisy else "within rounding"
    seen = "weights and losses" if any(one.snapshots.losses for one in proof.runs) else "weights"
    lines = [f"Equal: the {seen} are those of plain Paddle {how}, on {ranks}."]
    unseen = [each for run in proof.strategy for each in run.weights.values() if not each.apart]
    if unseen:
        count = len({(each.rank, each.name) for each in unseen})
        verb = "differs" if count == 1 else "differ"
        lines.insert(
            0,
            f"{counted(count, 'parameter')} {verb} only in elements whose values are not recorded: "
            f"{unseen[0].name} of rank {unseen[0].rank} after update {unseen[0].update}, for "
            "example. Whether that is rounding is not known.",
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
    plain, strategy = (proof.of(has_strategy=each) for each in (False, True))
    first = plain[0].snapshots
    made = [each.updates for each in (*plain, *strategy)]
    compared = [update for update in first.updates() if update]
    named = f"{', '.join(map(str, compared))}; timed: {spec.snapshots + 1} to {min(made)}"
    whole = all(
        len(each.values) == each.size
        for rank in first.parameters.values()
        for parameters in rank.values()
        for each in parameters
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
    for what, others in (
        ("plain Paddle again", proof.plain),
        *(() if proof.moved is None else (("moved by rounding", (proof.moved,)),)),
        (spec.name, proof.strategy),
    ):
        weights = differences.largest(one for each in others for one in each.weights.values())
        losses = differences.largest(one for each in others for one in each.losses.values())
        said = f"weights {_most(weights)}, losses {_most(losses) if first.losses else 'not seen'}"
        rows.append((f"apart: {what}", said))
    rows += [("speed", _speed(proof)), *_memory(plain, strategy, spec.name)]
    return rows


def _speed(proof: Equivalence) -> str:
    """Say how fast the strategy is beside plain Paddle, by all neighbours in time."""
    timed = [one for one in proof.runs if one.updates_per_s and not one.kind.moves]
    ratios = [
        (other if other.kind.has_strategy else one).updates_per_s  # type: ignore[operator]
        / (one if other.kind.has_strategy else other).updates_per_s
        for one, other in itertools.pairwise(timed)
        if one.kind.has_strategy != other.kind.has_strategy
    ]
    if not ratios:
        return "too few updates to time: give more --updates"
    return (
        f"{median(ratios):.3f} times that of plain Paddle ({min(ratios):.3f} to "
        f"{max(ratios):.3f} in {counted(len(ratios), 'pair')} of runs)"
    )


def _memory(
    plain: Sequence[VerifyRun], strategy: Sequence[VerifyRun], name: str
) -> Iterable[tuple[str, str]]:
    for what, of in (("memory", "peak_bytes"), ("memory of the GPU", "device_bytes")):
        most = [
            max((getattr(one, of) or 0 for one in runs), default=0) for runs in (plain, strategy)
        ]
        if all(most):
            own, theirs = (f"{each / 2**20:.0f} MiB" for each in most)
            yield what, f"{theirs} at most in a process of {name}, {own} of plain Paddle"


def _where(one: Difference) -> str:
    if not one.name:
        return f"the loss of rank {one.rank} in update {one.update} differs {_by(one)}"
    return f"{one.name} of rank {one.rank} differs {_by(one)} after update {one.update}"


def _by(one: Difference) -> str:
    share = f" ({one.share:.2g} of its largest number)" if one.name and one.largest else ""
    return f"by {one.apart:.3g}{share}"


def _most(one: Difference | None) -> str:
    if one is None:
        return "not at all"
    name = f"{one.name}, " if one.name else ""
    return f"{one.apart:.3g} ({name}rank {one.rank}, update {one.update})"


def write(spec: VerifySpec, proof: Equivalence) -> None:
    """Leave the figures as JSON in the folder that was asked for."""

    def figure(value: float) -> Any:  # noqa: ANN401 - JSON has no infinity
        return value if abs(value) < float("inf") else str(value)

    def row(one: Difference | None) -> Any:  # noqa: ANN401 - JSON
        if one is None:
            return None
        keys = {"update": one.update, "rank": one.rank, "parameter": one.name or None}
        keys |= {} if one.other_rank is None else {"other_rank": one.other_rank}
        return {**keys, "apart": figure(one.apart), "allowed": figure(one.allowed)}

    document = {
        "schema": 1,
        "launch": arguments.conceal([*spec.strategy, *spec.script])[0],
        "updates": spec.updates,
        "equal": None if proof.fault else proof.is_equal,
        "fault": proof.fault or proof.strategy_fault or None,
        "parts_at": row(proof.parted[0] if proof.parted else None),
        "plain_parts_at": row(proof.noisy[0] if proof.noisy else None),
        "plain_ranks_part_at": row(proof.ranks_apart),
        "largest": {
            of: row(
                differences.largest(
                    one for each in proof.strategy for one in getattr(each, of).values()
                )
            )
            for of in ("weights", "losses")
        },
        "runs": [
            {
                "kind": one.kind.name,
                "fault": one.fault or None,
                "updates_per_s": one.updates_per_s,
                "peak_bytes": one.peak_bytes,
                "device_bytes": one.device_bytes,
                "in_effect": [k for k, v in one.verdicts.items() if v.status in IN_EFFECT],
                "folder": one.folder,
            }
            for one in proof.runs
        ],
    }
    trials.write(spec.out, {DATA: json.dumps(document, indent=1) + "\n"})
