"""Whether a strategy has trained as plain Paddle, by the runs of both, and how to say so; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from fleetrun.commands import tables, trials
from fleetrun.commands.verify import differences
from fleetrun.commands.verify.differences import Difference, ValueKey
from fleetrun.commands.verify.training_runs import VerifyRun, VerifySpec
from fleetrun.rundir import arguments
from fleetrun.rundir.strategyfiles import IN_EFFECT
from fleetrun.text import counted

_MERGE = "gradient_merge"
_Pairs = tuple[Mapping[ValueKey, float], ...]


class Verification(NamedTuple):
    """What the runs have shown."""

    # As plain Paddle, and with the strategy; without the one whose gradients were moved.
    plain: tuple[VerifyRun, ...] = ()
    strategy: tuple[VerifyRun, ...] = ()
    # Why there is no result: plain Paddle fails. And why the strategy alone fails, or its runs
    # cannot be compared with those of plain Paddle; and these not with each other.
    fault: str = ""
    strategy_fault: str = ""
    incomparable: str = ""
    plain_fault: str = ""
    # The first plain run against the others, against each with the strategy, against the moved one.
    plain_pairs: _Pairs = ()
    strategy_pairs: _Pairs = ()
    moved_pairs: _Pairs = ()
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
        return not (self.parted or self.strategy_fault or self.incomparable)

    @property
    def begins_apart(self) -> bool:
        """Whether runs of plain Paddle begin with different weights."""
        return bool(self.noisy) and not self.noisy[0].key.update


def judge(done: Sequence[VerifyRun]) -> Verification:
    """Return what the runs DONE have shown."""
    failed = sorted((run for run in done if run.fault), key=lambda run: run.kind.has_strategy)
    if failed and not failed[0].kind.has_strategy and not failed[0].kind.moves:
        return Verification(fault=f"{failed[0].kind.name}: {failed[0].fault}")
    unmoved = [run for run in done if not run.kind.moves]
    plain, strategy = (
        tuple(run for run in unmoved if run.kind.has_strategy == kind) for kind in (False, True)
    )
    first, others = plain[0].values, [run.values for run in plain[1:]]
    moved = [run.values for run in done if run.kind.moves and not run.fault]
    pairs, plain_pairs, moved_pairs = (
        tuple(differences.apart(first, values) for values in several)
        for several in ([run.values for run in strategy], others, moved)
    )
    faults, plain_faults = (
        [fault for values in several if (fault := differences.fault(first, values))]
        for several in ([run.values for run in strategy], others)
    )
    parted = differences.beyond(first, pairs, (*plain_pairs, *moved_pairs))
    noisy = differences.beyond(first, plain_pairs, ())
    if plain[0].are_printed:
        # Which update a printed loss belongs to is not known.
        parted.sort(key=lambda difference: difference.key.optimizer < 0)
        noisy.sort(key=lambda difference: difference.key.optimizer < 0)
    strategy_fault = next((run.fault for run in strategy if run.fault), "")
    return Verification(
        plain,
        strategy,
        strategy_fault=strategy_fault,
        incomparable=next(iter(faults), "") if not strategy_fault else "",
        plain_fault=next(iter(plain_faults), ""),
        plain_pairs=plain_pairs,
        strategy_pairs=pairs,
        moved_pairs=moved_pairs,
        parted=tuple(parted),
        noisy=tuple(noisy),
        ranks_apart=differences.ranks_apart(first, plain[0].axes),
    )


def text(spec: VerifySpec, result: Verification) -> str:
    """Return what RESULT has shown, to read."""
    if result.fault:
        return f"This proves nothing: {result.fault}."
    if result.strategy_fault:
        fault = result.strategy_fault.rstrip(".")
        first = "".join(f" Both diverge at {_where(result, apart)}." for apart in result.parted[:1])
        return f"Not equal: plain Paddle trains, and with {spec.name} {fault}.{first}"
    lines = [*_of_plain(result), *_of_strategy(spec, result)]
    lines.append(tables.layout(list(_figures(spec, result))))
    rows = [
        (field.name, field.asked, field.in_effect or "-", field.status.replace("_", " "), field.why)
        for field in result.strategy[0].verdicts.values()
    ]
    if rows:
        heads = ("field", "asked", "in effect", "status", "why")
        lines.append(tables.layout(rows, heads=heads, width=tables.width()))
    return "\n".join(lines)


def _of_plain(result: Verification) -> Iterator[str]:
    """Yield where plain Paddle is not equal to itself."""
    if result.plain_fault:
        yield f"Two runs of plain Paddle cannot be compared: {result.plain_fault}."
    if result.noisy:
        why = (
            "they begin with different weights (seed the script, and resume from no checkpoint)."
            if result.begins_apart
            else "the script does not compute the same twice (seeds, data, kernels). Only larger "
            "differences than these are visible."
        )
        yield f"Even two runs of plain Paddle differ: {_where(result, result.noisy[0])}; {why}"
    first = result.ranks_apart
    if first is not None:
        yield (
            f"Even the ranks of plain Paddle differ: {_rank(result, first.key.rank)} from "
            f"{_rank(result, first.other_rank)} {_by(first)} in {first.value.name} after update "
            f"{first.key.update}: these are not copies of one model (is it wrapped in "
            "DataParallel or fleet's model?)."
        )


def _of_strategy(spec: VerifySpec, result: Verification) -> Iterator[str]:
    plain = result.plain[0]
    if result.incomparable:
        yield f"Not equal: {result.incomparable}."
        return
    if result.begins_apart:
        yield "This proves nothing: runs that begin with different weights always differ."
        return
    if result.parted:
        first = result.parted[0]
        where = f"{_where(result, first)}. Noise and rounding come to {first.allowed:.3g}."
        weight = next((apart for apart in result.parted if apart.value.name), None)
        if not first.value.name and weight is not None:
            held = f"{weight.value.name} of {_rank(result, weight.key.rank)}"
            after = f"{_by(weight)} after update {weight.key.update}"
            where += f" The first parameter is {held}: it differs {after}."
        is_printed = not first.value.name and plain.are_printed
        at = "" if is_printed else f" at update {first.key.update}"
        yield f"Not equal: {spec.name} and plain Paddle diverge{at}: {where}"
        changing = [
            name
            for name in spec.fields
            if name.startswith(trials.MEANINGFUL) and not name.startswith(_MERGE)
        ]
        if changing:
            yield f"{', '.join(changing)}: changes the computation on purpose."
        return
    unseen = [key for pair in result.strategy_pairs for key, apart in pair.items() if not apart]
    if unseen:
        names = {(key.rank, plain.values[key].name) for key in unseen}
        verb = "differs" if len(names) == 1 else "differ"
        first_name = f"{plain.values[unseen[0]].name} of {_rank(result, unseen[0].rank)}"
        yield (
            f"{counted(len(names), 'parameter')} {verb} only in elements whose values are not "
            f"recorded: {first_name} after update {unseen[0].update}, for example. Whether that "
            "is rounding is not known."
        )
    how = "to the last bit"
    if any(result.strategy_pairs):
        how = "within the noise of two plain runs" if result.noisy else "within rounding"
    count = len({key.rank for key in plain.values})
    ranks = f"{count} of {plain.ranks} ranks" if plain.ranks > count else counted(count, "rank")
    has_losses = any(key.optimizer < 0 for key in plain.values)
    seen = "weights and losses" if has_losses else "weights"
    yield f"Equal: the {seen} are those of plain Paddle {how}, on {ranks}."


def _figures(spec: VerifySpec, result: Verification) -> Iterator[tuple[str, str]]:
    plain = result.plain[0]
    parameters = {key: value for key, value in plain.values.items() if key.optimizer >= 0}
    made = min(run.updates for run in (*result.plain, *result.strategy))
    compared = sorted({key.update for key in parameters if key.update})
    timed = f"timed: {spec.snapshots + 1} to {made}" if made > spec.snapshots else "none timed"
    short = f"; the script ended after {made}" if made < spec.updates else ""
    yield "updates compared", f"{', '.join(map(str, compared))}; {timed}{short}"
    is_whole = all(len(value.values) == value.size for value in parameters.values())
    how = "all elements" if is_whole else "the checksums of all elements, and some elements"
    count = len({key[2:] for key in parameters})
    ranks = counted(len({key.rank for key in parameters}), "rank")
    yield "parameters", f"{count} on {ranks}, {how}"
    has_losses = len(parameters) < len(plain.values)
    for what, pairs in (
        ("plain Paddle again", result.plain_pairs),
        *((("moved by rounding", result.moved_pairs),) if result.moved_pairs else ()),
        (spec.name, result.strategy_pairs),
    ):
        weights, losses = (_most(result, pairs, of_losses=kind) for kind in (False, True))
        yield f"apart: {what}", f"weights {weights}, losses {losses if has_losses else 'not seen'}"
    yield "speed", _speed(spec, result)
    for what, of in (("memory", "peak_bytes"), ("memory of the GPU", "device_bytes")):
        of_plain, of_strategy = (
            max(getattr(run, of) or 0 for run in runs) for runs in (result.plain, result.strategy)
        )
        if of_plain and of_strategy:
            own, theirs = (f"{size / 2**20:.0f} MiB" for size in (of_strategy, of_plain))
            yield what, f"{own} at most in a process of {spec.name}, {theirs} of plain Paddle"


def _speed(spec: VerifySpec, result: Verification) -> str:
    """Return how much faster the strategy is, if that was measured."""
    plain, strategy = (
        [speed for run in runs for speed in run.speeds] for runs in (result.plain, result.strategy)
    )
    if not plain or not strategy:
        return "too few updates to time: give more --updates"
    own, others = (f"{min(speeds):.4g} to {max(speeds):.4g}" for speeds in (strategy, plain))
    of_each = f"{own} updates/s, plain Paddle {others}"
    if all(trials.idle(name, result.strategy[0].verdicts) for name in spec.fields):
        return f"no difference measured, equal in effect: {of_each}"
    if trials.overlap(plain, strategy):
        return f"no difference measured: {of_each}"
    return f"{median(strategy) / median(plain):.3f} times that of plain Paddle: {of_each}"


def _where(result: Verification, apart: Difference) -> str:
    rank = _rank(result, apart.key.rank)
    if apart.value.name:
        after = f"after update {apart.key.update}"
        return f"{apart.value.name} of {rank} differs {_by(apart)} {after}"
    if result.plain[0].are_printed:
        return f"loss {apart.key.update} that {rank} printed differs {_by(apart)}"
    return f"the loss of {rank} in update {apart.key.update} differs {_by(apart)}"


def _rank(result: Verification, rank: int | None) -> str:
    """Name RANK with its coordinates, where the job has other axes than dp."""
    axes = next((run.axes for run in result.plain if run.axes is not None), None)
    place = axes.place(rank) if axes is not None and rank is not None else ""
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def _by(apart: Difference) -> str:
    largest = apart.value.largest
    share = f" ({apart.apart / largest:.2g} of its largest number)" if largest else ""
    return f"by {apart.apart:.3g}{share if apart.value.name else ''}"


def _largest(pairs: _Pairs, *, of_losses: bool) -> tuple[ValueKey, float] | None:
    apart = [item for pair in pairs for item in pair.items()]
    apart = [(key, by) for key, by in apart if (key.optimizer < 0) == of_losses]
    return max(apart, key=lambda item: item[1], default=None)


def _most(result: Verification, pairs: _Pairs, *, of_losses: bool) -> str:
    largest = _largest(pairs, of_losses=of_losses)
    if largest is None:
        return "not at all"
    key, by = largest
    name = "" if of_losses else f"{result.plain[0].values[key].name}, "
    at = "printed loss" if of_losses and result.plain[0].are_printed else "update"
    return f"{by:.3g} ({name}rank {key.rank}, {at} {key.update})"


def document(spec: VerifySpec, result: Verification, done: Sequence[VerifyRun]) -> str:
    """Return the results of the runs DONE as JSON."""

    def row(apart: Difference | None) -> dict[str, Any] | None:
        if apart is None:
            return None
        # Infinity is no JSON.
        by, allowed = (
            number if abs(number) < float("inf") else str(number)
            for number in (apart.apart, apart.allowed)
        )
        other = {} if apart.other_rank is None else {"other_rank": apart.other_rank}
        return {
            "update": apart.key.update,
            "rank": apart.key.rank,
            "parameter": apart.value.name or None,
            **other,
            "apart": by,
            "allowed": allowed,
        }

    def largest(*, of_losses: bool) -> dict[str, Any] | None:
        most = _largest(result.strategy_pairs, of_losses=of_losses)
        values = result.plain[0].values if result.plain else {}
        return None if most is None else row(Difference(most[0], values[most[0]], most[1]))

    content = {
        "schema": 1,
        "launch": arguments.conceal([*spec.strategy, *spec.script])[0],
        "updates": spec.updates,
        "equal": result.is_equal,
        "fault": result.fault or result.strategy_fault or None,
        "parts_at": row(result.parted[0] if result.parted else None),
        "plain_parts_at": row(result.noisy[0] if result.noisy else None),
        "plain_ranks_part_at": row(result.ranks_apart),
        "largest": {"weights": largest(of_losses=False), "losses": largest(of_losses=True)},
        "runs": [
            {
                "kind": run.kind.name,
                "fault": run.fault or None,
                "updates_per_s": run.speeds[0] if run.speeds else None,
                "peak_bytes": run.peak_bytes,
                "device_bytes": run.device_bytes,
                "in_effect": [k for k, v in run.verdicts.items() if v.status in IN_EFFECT],
                "folder": run.folder,
            }
            for run in done
        ],
    }
    return json.dumps(content, indent=1) + "\n"
