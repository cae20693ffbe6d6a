"""What the runs of `fleetrun verify` have shown, as text and as JSON; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from textwrap import indent
from typing import NamedTuple

from fleetrun.commands import tables, trials
from fleetrun.commands.verify import differences
from fleetrun.commands.verify.differences import Difference, ValueKey
from fleetrun.commands.verify.training_runs import MOVED, PLAIN, STRATEGY, VerifyRun, VerifySpec
from fleetrun.rundir import secrets
from fleetrun.text import counted

_Pairs = tuple[Mapping[ValueKey, float], ...]


class Verification(NamedTuple):
    """What the runs have shown."""

    # As plain Paddle, and with the strategy; without the one whose gradients were moved.
    plain: tuple[VerifyRun, ...] = ()
    strategy: tuple[VerifyRun, ...] = ()
    # Why there is no result: plain Paddle fails, or makes other updates each time. And why the
    # strategy alone fails, or cannot be compared.
    fault: str = ""
    strategy_fault: str = ""
    # The first plain run against the others, against each with the strategy, against the moved one.
    plain_pairs: _Pairs = ()
    strategy_pairs: _Pairs = ()
    moved_pairs: _Pairs = ()
    # What of the strategy's runs is more than rounding and noise; in the order of updates.
    diverging: tuple[Difference, ...] = ()
    # Where plain runs differ by more than rounding.
    noisy: tuple[Difference, ...] = ()

    @property
    def starts_differ(self) -> bool:
        """Whether runs of plain Paddle begin with different weights."""
        return bool(self.noisy) and not self.noisy[0].key.update

    @property
    def is_equal(self) -> bool | None:
        """Whether the strategy has trained as plain Paddle does; None: it cannot be known."""
        if self.fault or self.starts_differ:
            return None
        return not (self.diverging or self.strategy_fault)


def judge(done: Sequence[VerifyRun]) -> Verification:
    """Return what the runs DONE have shown, the first of which is one of plain Paddle."""
    first = done[0].values
    plain = tuple(run for run in done if run.kind == PLAIN)
    strategy = tuple(run for run in done if run.kind == STRATEGY)
    moved = [run for run in done if run.kind == MOVED and not run.fault]
    fault, strategy_fault = (
        next(filter(None, (run.fault or differences.fault(first, run.values) for run in runs)), "")
        for runs in (plain, strategy)
    )
    if fault:
        return Verification(fault=f"plain Paddle: {fault}")
    strategy_pairs, plain_pairs, moved_pairs = (
        tuple(differences.apart(first, run.values) for run in runs)
        for runs in (strategy, plain[1:], moved)
    )
    return Verification(
        plain,
        strategy,
        strategy_fault=strategy_fault,
        plain_pairs=plain_pairs,
        strategy_pairs=strategy_pairs,
        moved_pairs=moved_pairs,
        diverging=differences.beyond(first, strategy_pairs, (*plain_pairs, *moved_pairs)),
        noisy=differences.beyond(first, plain_pairs, ()),
    )


def text(spec: VerifySpec, result: Verification) -> str:
    """Return what RESULT has shown, to read."""
    if result.fault:
        return f"The runs cannot be compared: {result.fault.rstrip('.')}."
    if result.strategy_fault:
        first = "".join(f" Both diverge at {_where(result, d)}." for d in result.diverging[:1])
        fault = result.strategy_fault.rstrip(".")
        return f"Not equal: plain Paddle trains, and with {spec.name} {fault}.{first}"
    lines = [*_sentences(spec, result)]
    figures = tables.layout(list(_figures(spec, result)))
    rows = [
        (field.name, field.asked, field.in_effect or "-", field.status.replace("_", " "), field.why)
        for field in result.strategy[0].shown.verdicts.values()
    ]
    heads = ("field", "asked", "in effect", "status", "why")
    fields = tables.layout(rows, heads=heads, width=max(tables.width() - 2, 0)) if rows else ""
    lines.append(indent(f"{figures}\n{fields}".rstrip("\n"), "  "))
    return "\n".join(lines)


def _sentences(spec: VerifySpec, result: Verification) -> Iterator[str]:
    """Yield whether plain Paddle is equal to itself, and the strategy to it."""
    plain = result.plain[0]
    if result.noisy:
        why = (
            "they begin with different weights (seed the script, and resume from no checkpoint)."
            if result.starts_differ
            else "the script does not compute the same twice (seeds, data, kernels). Only larger "
            "differences than these are visible."
        )
        yield f"Even two runs of plain Paddle differ: {_where(result, result.noisy[0])}; {why}"
    if result.starts_differ:
        yield "The runs cannot be compared: those that begin with different weights always differ."
        return
    if result.diverging:
        first = result.diverging[0]
        yield (
            f"Not equal: {spec.name} and plain Paddle diverge at update {first.key.update}: "
            f"{_where(result, first)}. Noise and rounding come to {first.allowed:.3g}."
        )
        ours, plains = (_are_equal(run, first.key) for run in (result.strategy[0], plain))
        if ours and not plains:
            yield "There, ranks of plain Paddle differ, which is wrong; the strategy's are equal."
        return
    how = "to the last bit"
    if any(result.strategy_pairs):
        how = "within the noise of two plain runs" if result.noisy else "within rounding"
    if any(not by for pair in result.strategy_pairs for by in pair.values()):
        how += " as far as elements are recorded (others differ)"
    count = len({key.rank for key in plain.values})
    ranks = f"{count} of {plain.ranks} ranks" if plain.ranks > count else counted(count, "rank")
    yield f"Equal: the weights are those of plain Paddle {how}, on {ranks}."


def _are_equal(run: VerifyRun, key: ValueKey) -> bool:
    """Whether all ranks of RUN hold the same bits of what KEY names."""
    own = (value for it, value in run.values.items() if it._replace(rank=key.rank) == key)
    return len({value.checksum for value in own}) == 1


def _figures(spec: VerifySpec, result: Verification) -> Iterator[tuple[str, str]]:
    values = result.plain[0].values
    made = min(run.shown.updates for run in (*result.plain, *result.strategy))
    compared = sorted({key.update for key in values if key.update})
    timed = f"timed: {spec.snapshots + 1} to {made}" if made > spec.snapshots else "none timed"
    short = f"; the script ended after {made}" if made < spec.updates else ""
    yield "updates compared", f"{', '.join(map(str, compared))}; {timed}{short}"
    for what, pairs in (
        ("plain Paddle again", result.plain_pairs),
        ("moved by rounding", result.moved_pairs),
        (spec.name, result.strategy_pairs),
    ):
        apart = max(((by, key) for pair in pairs for key, by in pair.items()), default=None)
        if apart is not None:
            by, key = apart
            place = f"{values[key].name}, rank {key.rank}, update {key.update}"
            yield f"apart: {what}", f"{by:.3g} ({place})"
        elif pairs:
            yield f"apart: {what}", "not at all"
    yield "speed", _speed(spec, result)
    own, theirs = (
        max(run.shown.peak_bytes for run in several) >> 20
        for several in (result.strategy, result.plain)
    )
    if own and theirs:
        yield "memory", f"at most {own} MiB in a process of {spec.name}, {theirs} of plain Paddle"


def _speed(spec: VerifySpec, result: Verification) -> str:
    """Return how much faster the strategy is, if that was measured."""
    plain, strategy = (
        [speed for run in several for speed in run.shown.speeds]
        for several in (result.plain, result.strategy)
    )
    if not plain or not strategy:
        return "too few updates to time: give more --updates"
    own, others = (f"{min(speeds):.4g} to {max(speeds):.4g}" for speeds in (strategy, plain))
    of_each = f"{own} updates/s, plain Paddle {others}"
    if all(map(result.strategy[0].shown.idle, spec.fields)):
        return f"no difference measured, equal in effect: {of_each}"
    if spec.repeats == 1:
        return f"of one run each, which --repeats=2 compares: {of_each}"
    if trials.overlap(plain, strategy):
        return f"no difference measured: {of_each}"
    return f"{median(strategy) / median(plain):.3f} times that of plain Paddle: {of_each}"


def _where(result: Verification, difference: Difference) -> str:
    key, largest = difference.key, difference.value.largest
    share = f" ({difference.apart / largest:.2g} of its largest number)" if largest else ""
    return (
        f"{difference.value.name} of {_rank(result, key.rank)} differs by "
        f"{difference.apart:.3g}{share} after update {key.update}"
    )


def _rank(result: Verification, rank: int) -> str:
    """Name RANK with its coordinates, where the job has other axes than dp."""
    axes = result.plain[0].axes
    place = "" if axes is None else axes.place(rank)
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def document(spec: VerifySpec, result: Verification, done: Sequence[VerifyRun]) -> str:
    """Return the results of the runs DONE as JSON."""
    runs = [
        {
            "kind": run.kind,
            "fault": run.fault or None,
            "updates_per_s": run.shown.speeds[0] if run.shown.speeds else None,
            "peak_bytes": run.shown.peak_bytes or None,
            "folder": run.shown.folder,
        }
        for run in done
    ]
    first = result.diverging[0] if result.diverging else None
    content = {
        "schema": 3,
        "launch": secrets.conceal([*spec.strategy, *spec.script]),
        "updates": spec.updates,
        "equal": result.is_equal,
        "fault": result.fault or result.strategy_fault or None,
        # The first difference of all.
        "update": first and first.key.update,
        "rank": first and first.key.rank,
        "parameter": first and first.value.name,
        "runs": runs,
    }
    return json.dumps(content, indent=1) + "\n"
