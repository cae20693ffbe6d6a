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
from .compression import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..communicators import Hierarchy
    from ..evidence import Evidence
    from ..spec import StrategySpec
    from .paddles_reducer import PaddlesReducer
    from .reducer import Reducer

HIERARCHY = ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
# The backwards of each model that are counted: the second one shows the steady state.
_COUNTED_BACKWARDS = 2
_watching = border.watching("the count of allreduces")
_ALL = (*FUSION, "nccl_comm_num", "sync_nccl_allreduce", *HIERARCHY, *DTYPES)


class ModelRow(NamedTuple):
    """How the gradients of one model are sent."""

    # The bytes of each bucket of Paddle's reducer without a strategy.
    paddles_bytes: Sequence[int]
    nranks: int
    # The reducer: Paddle's if IS_BUILT; and why, if the strategy needs ours.
    reducer: Any = None
    is_built: bool = False
    why: str = ""

    @property
    def bucket_bytes(self) -> list[int]:
        """The bytes of each bucket, in the order of sending."""
        if self.is_built:
            return list(self.reducer.bucket_bytes)
        return [bucket.nbytes for bucket in self.reducer.buckets]

    @property
    def gradients(self) -> int:
        """The number of gradients that are sent."""
        if self.is_built:
            return sum(map(tensors.is_trained, self.reducer.parameters))
        return sum(len(bucket.parameters) for bucket in self.reducer.buckets)


class ReducerReport:
    """Writes the evidence after the first reduced backwards of each model."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # Rows are dropped with their models.
        self._rows: weakref.WeakKeyDictionary[Any, ModelRow] = weakref.WeakKeyDictionary()

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
        self._rows[model] = self._rows[model]._replace(reducer=None, is_built=True, why=why)
        if why:
            self._proof.note(f"Paddle's own reducer averages the gradients of a model: {why}")

    @_watching
    def built(self, reference: weakref.ref[Any], reducer: PaddlesReducer) -> None:
        """Report the buckets of the model REFERENCE, which Paddle's REDUCER begins to average."""
        model: Any = reference()
        self._rows[model] = self._rows[model]._replace(reducer=reducer)
        self._report()

    @_watching
    def reduced(self, reference: weakref.ref[Any], reducer: Reducer) -> None:
        """Count the work of our REDUCER in the backward that has just ended."""
        if reducer.backwards > _COUNTED_BACKWARDS:
            return
        model: Any = reference()
        self._rows[model] = self._rows[model]._replace(reducer=reducer)
        # In its first backward it sends nothing before the end.
        self._proof.awaits_backward = reducer.backwards == 1 and reducer.will_send_early
        self._report()

    def _report(self) -> None:
        rows = [row for row in self._rows.values() if row.reducer is not None]
        rows = [row for row in rows if row.bucket_bytes]
        ours = [row.reducer for row in rows if not row.is_built]
        hierarchy = next(filter(None, (reducer.setup.hierarchy for reducer in ours)), None)
        counts: dict[str, Any] = {
            "gradients": sum(row.gradients for row in rows),
            "allreduces_before": sum(len(row.paddles_bytes) for row in rows),
            "allreduces": sum(
                len(row.bucket_bytes) if row.is_built else sum(row.reducer.calls) for row in rows
            ),
            # An allreduce that is waited for at once overlaps with nothing.
            "early": sum(reducer.early for reducer in ours if reducer.setup.overlaps),
            "bucket_bytes": [size for row in rows for size in row.bucket_bytes],
            "communicators": max([1, *(sum(map(bool, reducer.calls)) for reducer in ours)]),
            "groups": [*map(list, hierarchy.groups)] if hierarchy else [],
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
        self._report_fusion(fused, max(sum(row.bucket_bytes) for row in rows), are_paddles)
        why = next((row.why for row in rows if row.why), "")
        why = why and f"Paddle's own reducer averages here: {why}"
        self._report_overlap(ours, why)
        for name in HIERARCHY:
            self._report_hierarchy(name, rows[0].nranks, hierarchy, why)
        self._report_compression(ours, why)
        self._proof.write()

    def _report_fusion(self, evidence: str, largest: int, are_paddles: bool) -> None:  # noqa: FBT001
        """Report the fields of buckets; LARGEST has the bytes of the largest model."""
        for name in FUSION:
            why_not = ""
            if name != FUSION[0] and not fuses():
                why_not = "fuse_all_reduce_ops is off"
            used = reason = None
            if name == "fuse_grad_size_in_MB" and settings.effective(name) == "auto":
                # Each model has a limit of its own.
                used, reason = describe_auto(largest)
            self._set(
                name, evidence, is_moot=are_paddles, why_not=why_not, used=used, reason=reason or ""
            )

    def _report_overlap(self, ours: Sequence[Reducer], why: str) -> None:
        """Report the communicators that were used, and what ran during the backward."""
        counts = self._proof.counts
        overlaps = settings.overlaps()
        if not ours:
            waits = "and waits for each" if is_synchronous() else "and never waits"
            beside = f"Paddle's own reducer sends them during the backward pass, {waits}"
        elif overlaps:
            beside = (
                f"{counts['early']} of {plural(counts['allreduces'], 'allreduce')} went out before"
                " the last gradient was ready"
            )
            why_late = next((reducer.why_late for reducer in ours if reducer.why_late), "")
            if why_late:
                beside += f"; others at the end: {why_late}"
        else:
            beside = "each allreduce was waited for at once"
        never_waits = not ours and not is_synchronous() and not overlaps
        self._set(
            "sync_nccl_allreduce",
            beside,
            is_moot=not ours or counts["allreduces"] == 1 or (overlaps and not counts["early"]),
            why_not="Paddle's own reducer, which averages here, never waits" * never_waits,
        )
        number = counts["communicators"]
        evidence = f"{plural(number, 'communicator')}{' in turn' * (number > 1)}; {beside}"
        reason = ""
        if number < int(settings.effective("nccl_comm_num", 1)):
            are = "is" if counts["allreduces"] == 1 else "are"
            few = f"there {are} only {plural(counts['allreduces'], 'allreduce')} to share"
            reason = why or few
        self._set(
            "nccl_comm_num",
            evidence,
            is_moot=number == 1,
            why_not=reason if number == 1 else "",
            used=number if reason else None,
            reason=reason,
        )

    def _report_hierarchy(
        self, name: str, nranks: int, hierarchy: Hierarchy | None, why: str
    ) -> None:
        if hierarchy is not None:
            groups = ", ".join(str(list(group)) for group in hierarchy.groups)
            self._set(name, f"groups {groups}; leaders {list(hierarchy.leaders)}")
        elif not settings.effective(HIERARCHY[0]):
            why_not = f"{HIERARCHY[0]} is not on" if name == HIERARCHY[1] else ""
            self._set(name, "every allreduce is among all ranks", is_moot=True, why_not=why_not)
        else:
            size = int(settings.effective(HIERARCHY[1]) or self._spec.topology.ranks_per_node)
            self._set(name, "", why_not=why or settings.one_level(size, nranks))

    def _report_compression(self, ours: Sequence[Reducer], why: str) -> None:
        used = next(filter(None, (reducer.setup.compression for reducer in ours)), None)
        for name in DTYPES:
            if not self._spec.get(name):
                continue
            if used is None:
                if settings.effective(name):
                    self._set(name, "", why_not=why)
            elif name != used.field:
                self._set(name, "", why_not=f"{used.field} is on, too")
            elif used.failure:
                self._proof.field(name, REFUSED, reason=used.failure)
            else:
                self._set(name, f"sums are sent as {used.dtype}")

    def _set(
        self,
        name: str,
        evidence: str,
        *,
        is_moot: bool = False,
        why_not: str = "",
        used: Any = None,
        reason: str = "",
    ) -> None:
        """Report the field NAME if it was requested; IS_MOOT: Paddle alone does the same.

        WHY_NOT: why it has no effect, if so. USED is its value in effect, if that is not the
        requested one, and REASON says why.
        """
        if self._spec.get(name) is None:
            return
        is_scripts = settings.script_wins(name)
        if why_not and not is_scripts:
            self._proof.field(name, NO_EFFECT, reason=why_not, evidence=evidence)
            return
        status = SCRIPT if is_scripts else NO_DIFFERENCE if is_moot else EFFECTIVE
        used = settings.effective(name) if used is None else used
        reason = reason or self._spec.reasons.get(name, "")
        self._proof.field(name, status, in_effect=used, reason=reason, evidence=evidence)
