"""Reports the effect of each field on the models of DataParallel.

What fleetrun's reducer sends is counted in a backward. Paddle's own reducer cannot be observed: its
buckets are reported as they were built.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import border, settings
from ..buckets import FUSION, MEBIBYTE, describe_auto, fuses
from ..communicators import is_synchronous
from ..evidence import EFFECTIVE, NO_DIFFERENCE, NO_EFFECT, REFUSED, SCRIPT, plural
from ..paddle_api import tensors
from . import levels
from .compression import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..evidence import Evidence
    from ..spec import StrategySpec
    from .compression import Compression
    from .paddles_reducer import PaddlesReducer
    from .reducer import Reducer

_HIERARCHY = (levels.FIELD, levels.SIZE)
# The backwards of each model that are counted: the second one shows the steady state.
_COUNTED_BACKWARDS = 2
_watching = border.watching("the count of allreduces")
_ALL = (*FUSION, "nccl_comm_num", "sync_nccl_allreduce", *_HIERARCHY, *DTYPES)


class ModelRow(NamedTuple):
    """How the gradients of one model are sent, in buckets of so many bytes."""

    # By Paddle's reducer without a strategy.
    paddles_bytes: Sequence[int]
    nranks: int
    gradients: int = 0
    bucket_bytes: Sequence[int] = ()
    # By our reducer: the allreduces of each communicator, and those during the backward.
    calls: Sequence[int] = ()
    early: int = 0
    why_late: str = ""
    groups: Sequence[Sequence[int]] = ()
    leaders: Sequence[int] = ()
    compression: Compression | None = None
    # Paddle's reducer sends them; and why, if the strategy needs ours.
    is_built: bool = False
    why: str = ""


class ReducerReport:
    """Writes the evidence after the first reduced backwards of each model."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # Rows are dropped with their models.
        self._rows: weakref.WeakKeyDictionary[Any, ModelRow] = weakref.WeakKeyDictionary()
        # Why allreduces have one level or two, with `auto`.
        self.why_levels = ""

    @_watching
    def single_rank(self) -> None:
        """Report that there is only one rank."""
        self._proof.graph = "dygraph"
        for name in _ALL:
            if name in self._spec.strategy:
                self._proof.field(name, NO_EFFECT, reason="one rank: nothing to reduce")

    def add(self, model: Any, paddles_bytes: Sequence[int]) -> None:
        """Report MODEL from now on, for which Paddle alone has buckets of PADDLES_BYTES."""
        self._rows[model] = ModelRow(paddles_bytes, len(model.group.ranks))

    @_watching
    def hand_over(self, model: Any, why: str) -> None:
        """Record that Paddle's reducer averages MODEL; WHY, if the strategy needs ours."""
        row = self._rows[model]
        self._rows[model] = row._replace(is_built=True, why=why)
        if why:
            self._proof.note(f"Paddle's own reducer averages the gradients of a model: {why}")

    @_watching
    def built(self, reference: weakref.ref[Any], reducer: PaddlesReducer) -> None:
        """Report the buckets of the model REFERENCE, which Paddle's REDUCER begins to average."""
        model = reference()
        trained = list(filter(tensors.is_trained, reducer.parameters))
        row = self._rows[model]
        self._rows[model] = row._replace(gradients=len(trained), bucket_bytes=reducer.bucket_bytes)
        self._report()

    @_watching
    def reduced(self, reference: weakref.ref[Any], reducer: Reducer) -> None:
        """Count the work of our REDUCER in the backward that has just ended."""
        if reducer.backwards > _COUNTED_BACKWARDS:
            return
        model, hierarchy = reference(), reducer.setup.hierarchy
        row = self._rows[model]
        self._rows[model] = row._replace(
            gradients=sum(len(bucket.parameters) for bucket in reducer.buckets),
            bucket_bytes=[bucket.nbytes for bucket in reducer.buckets],
            calls=reducer.calls,
            # An allreduce that is waited for at once overlaps with nothing.
            early=reducer.early if reducer.setup.overlaps else 0,
            why_late=reducer.why_late or "",
            groups=hierarchy.groups if hierarchy else (),
            leaders=hierarchy.leaders if hierarchy else (),
            compression=reducer.setup.compression,
        )
        # In its first backward it sends nothing before the end.
        self._proof.awaits_backward = reducer.backwards == 1 and reducer.will_send_early
        self._report()

    def _report(self) -> None:
        rows = [row for row in self._rows.values() if row.bucket_bytes]
        ours = [row for row in rows if not row.is_built]
        counts: dict[str, Any] = {
            "gradients": sum(row.gradients for row in rows),
            "allreduces_before": sum(len(row.paddles_bytes) for row in rows),
            "allreduces": sum(
                len(row.bucket_bytes) if row.is_built else sum(row.calls) for row in rows
            ),
            "early": sum(row.early for row in ours),
            "bucket_bytes": [size for row in rows for size in row.bucket_bytes],
            "communicators": max(sum(1 for calls in row.calls if calls) or 1 for row in rows),
            "groups": next(([*map(list, row.groups)] for row in ours if row.groups), []),
        }
        self._proof.graph = "dygraph"
        self._proof.counts.update(counts)
        fused = (
            f"{plural(counts['gradients'], 'gradient')} in"
            f" {plural(counts['allreduces'], 'allreduce')}"
            f" (Paddle: {counts['allreduces_before']});"
            f" largest {max(counts['bucket_bytes']) / MEBIBYTE:.3g} MB"
        )
        if len(ours) < len(rows):
            fused += "; as built: Paddle's own reducer sends them, which cannot be observed"
        are_paddles = all(sorted(row.paddles_bytes) == sorted(row.bucket_bytes) for row in rows)
        for name in FUSION:
            self._report_field(name, fused, is_moot=are_paddles)
        why = next((row.why for row in rows if row.why), "")
        self._report_overlap(rows, ours)
        for name in _HIERARCHY:
            self._report_hierarchy(name, rows, ours, why)
        for name in DTYPES:
            self._report_compression(name, ours, why)
        self._proof.write()

    def _report_overlap(self, rows: Sequence[ModelRow], ours: Sequence[ModelRow]) -> None:
        """Report the communicators that were used, and what ran during the backward."""
        counts = self._proof.counts
        if not ours:
            beside = (
                "Paddle's own reducer sends them during the backward pass, and waits for each"
                if is_synchronous()
                else "Paddle's own reducer sends them during the backward pass, and never waits"
            )
        elif settings.overlaps():
            beside = (
                f"{counts['early']} of {plural(counts['allreduces'], 'allreduce')} went out before"
                " the last gradient was ready"
            )
            why_late = next((row.why_late for row in ours if row.why_late), "")
            if why_late:
                beside += f"; others at the end: {why_late}"
        else:
            beside = "each allreduce was waited for at once"
        name = "sync_nccl_allreduce"
        if not ours and not is_synchronous() and settings.effective(name):
            self._say_no(name, "Paddle's own reducer, which averages here, never waits", beside)
        else:
            is_moot = not ours or counts["allreduces"] == 1
            is_moot = is_moot or (settings.overlaps() and not counts["early"])
            self._report_field(name, beside, is_moot=is_moot)
        number = counts["communicators"]
        in_turn = " in turn" if number > 1 else ""
        evidence = f"{plural(number, 'communicator')}{in_turn}; {beside}"
        name, asked = "nccl_comm_num", int(settings.effective("nccl_comm_num", 1))
        why = next((row.why for row in rows if row.why), "")
        if number < asked:
            are = "is" if counts["allreduces"] == 1 else "are"
            reason = why and f"Paddle's own reducer averages here: {why}"
            reason = reason or (
                f"there {are} only {plural(counts['allreduces'], 'allreduce')} to share"
            )
            if number == 1:
                self._say_no(name, reason, evidence)
            else:
                self._report_field(name, evidence, used=number, reason=reason)
        else:
            self._report_field(name, evidence, is_moot=number == 1)

    def _say_no(self, name: str, reason: str, evidence: str = "") -> None:
        """Report that the field NAME has no effect for REASON, if it was requested."""
        if settings.script_wins(name):
            self._report_field(name, evidence)
        elif self._spec.get(name) is not None:
            self._proof.field(name, NO_EFFECT, reason=reason, evidence=evidence)

    def _report_field(
        self,
        name: str,
        evidence: str,
        *,
        is_moot: bool = False,
        used: Any = None,
        reason: str = "",
    ) -> None:
        """Report the field NAME if it was requested; IS_MOOT: Paddle alone does the same.

        USED is its value in effect, if that is not the requested one, and REASON says why.
        """
        if self._spec.get(name) is None:
            return
        is_scripts = settings.script_wins(name)
        used = settings.effective(name) if used is None else used
        reason = reason or self._spec.reasons.get(name, "")
        if name == "fuse_grad_size_in_MB" and used == "auto":
            # Each model has a limit of its own; report the largest.
            used, reason = describe_auto(max(sum(row.bucket_bytes) for row in self._rows.values()))
        elif name in FUSION[1:] and not is_scripts and not fuses():
            self._say_no(name, "fuse_all_reduce_ops is off", evidence)
            return
        status = SCRIPT if is_scripts else NO_DIFFERENCE if is_moot else EFFECTIVE
        self._proof.field(name, status, in_effect=used, reason=reason, evidence=evidence)

    def _report_compression(self, name: str, ours: Sequence[ModelRow], why: str) -> None:
        if not self._spec.get(name):
            return
        used = next((row.compression for row in ours if row.compression), None)
        if used is None:
            if settings.effective(name):
                self._say_no(name, f"Paddle's own reducer averages here: {why}")
        elif name != used.field:
            self._say_no(name, f"{used.field} is on, too")
        elif used.failure:
            self._proof.field(name, REFUSED, reason=used.failure)
        else:
            self._report_field(name, f"sums are sent as {used.dtype}")

    def _report_hierarchy(
        self, name: str, rows: Sequence[ModelRow], ours: Sequence[ModelRow], why: str
    ) -> None:
        requested = self._spec.get(name)
        if requested is None:
            return
        is_switch = name == levels.FIELD
        two = next((row for row in ours if row.groups), None)
        if two is not None:
            groups = ", ".join(str(list(group)) for group in two.groups)
            evidence = f"groups {groups}; leaders {list(two.leaders)}"
        elif is_switch and requested in (False, levels.AUTO):
            evidence = "every allreduce is among all ranks"
        elif not self._spec.get(levels.FIELD):
            self._say_no(name, f"{levels.FIELD} is not on")
            return
        else:
            size = int(settings.effective(levels.SIZE) or self._spec.topology.ranks_per_node)
            reason = why and f"Paddle's own reducer averages here: {why}"
            reason = reason or self.why_levels or settings.one_level(size, rows[0].nranks)
            self._say_no(name, reason)
            return
        if is_switch and settings.effective(name) == levels.AUTO:
            status = NO_DIFFERENCE if two is None else EFFECTIVE
            reason = f"auto: {why or self.why_levels}"
            self._proof.field(
                name, status, in_effect=two is not None, reason=reason, evidence=evidence
            )
        else:
            self._report_field(name, evidence, is_moot=two is None)
