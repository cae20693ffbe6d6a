"""Reports the effect of each field on the models of DataParallel.

What fleetrun's reducer sends is counted in a backward. Paddle's own reducer cannot be observed: its
buckets are reported as they were built.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import border, settings
from ..buckets import FUSION, MEBIBYTE, auto_limit_mb, fuses
from ..communicators import is_synchronous
from ..evidence import EFFECTIVE, NO_DIFFERENCE, NO_EFFECT, REFUSED, SCRIPT, plural
from ..paddle_api import tensors
from .compression import DTYPES
from .paddles_reducer import PaddlesReducer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..evidence import Evidence
    from ..spec import StrategySpec
    from .reducer import Reducer

HIERARCHY = ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
UNUSED = "find_unused_parameters"
# The backwards of each model that are counted: the second one shows the steady state.
_COUNTED_BACKWARDS = 2
_watching = border.watching("the count of allreduces")
FIELDS = (*FUSION, "nccl_comm_num", "sync_nccl_allreduce", *HIERARCHY, *DTYPES, UNUSED)


class ModelRow(NamedTuple):
    """How the gradients of one model are sent."""

    # The bytes of each bucket of Paddle's reducer without a strategy; and those that are sent.
    paddles_bytes: Sequence[int]
    bucket_bytes: Sequence[int]
    gradients: int
    nranks: int
    # fleetrun's reducer; None: Paddle's averages.
    ours: Reducer | None


class ReducerReport:
    """Writes the evidence after the first reduced backwards of each model."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # By model: the bytes of the buckets that Paddle alone has.
        self.paddles_bytes: weakref.WeakKeyDictionary[Any, Sequence[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._rows: weakref.WeakKeyDictionary[Any, ModelRow] = weakref.WeakKeyDictionary()
        # Why Paddle's reducer averages a model although the strategy needs fleetrun's.
        self.why_paddles = ""

    @_watching
    def uses(self, reference: weakref.ref[Any], reducer: Reducer | PaddlesReducer) -> None:
        """Report that REDUCER averages the model REFERENCE, as it begins to or just has."""
        model: Any = reference()
        ours = None if isinstance(reducer, PaddlesReducer) else reducer
        if ours is not None:
            if model is None or ours.backwards > _COUNTED_BACKWARDS:
                return
            # In its first backward it sends nothing before the end.
            self._proof.awaits_backward = ours.backwards == 1 and ours.will_send_early
        self._rows[model] = ModelRow(
            self.paddles_bytes[model],
            tuple(reducer.bucket_bytes),
            sum(map(tensors.is_trained, reducer.parameters)),
            len(model.group.ranks),
            ours,
        )
        rows = [row for row in self._rows.values() if row.bucket_bytes]
        if rows:
            looks = any(known.find_unused_parameters for known in self._rows)
            does = "looks for them" if looks else "does not look for them"
            self._set(UNUSED, f"the reducer {does}", is_moot=not looks)
            self._report(rows)

    def _report(self, rows: Sequence[ModelRow]) -> None:
        ours = [row.ours for row in rows if row.ours is not None]
        hierarchy = next(filter(None, (reducer.setup.hierarchy for reducer in ours)), None)
        counts: dict[str, Any] = {
            "gradients": sum(row.gradients for row in rows),
            "allreduces_before": sum(len(row.paddles_bytes) for row in rows),
            "allreduces": sum(
                len(row.bucket_bytes) if row.ours is None else sum(row.ours.calls) for row in rows
            ),
            # An allreduce that is waited for at once overlaps with nothing.
            "early": sum(reducer.early for reducer in ours if reducer.setup.overlaps),
            "bucket_bytes": [size for row in rows for size in row.bucket_bytes],
            "communicators": max([1, *(sum(map(bool, reducer.calls)) for reducer in ours)]),
            "groups": [*map(list, hierarchy.groups)] if hierarchy else [],
        }
        self._proof.graph = "dygraph"
        self._proof.counts.update(counts)
        self._report_fusion(rows, counts)
        self._report_overlap(ours, counts)
        self._report_hierarchy(counts["groups"], rows[0].nranks)
        self._report_compression(ours)
        self._proof.write()

    def _report_fusion(self, rows: Sequence[ModelRow], counts: Mapping[str, Any]) -> None:
        """Report the fields of buckets."""
        fused = (
            f"{plural(counts['gradients'], 'gradient')} in"
            f" {plural(counts['allreduces'], 'allreduce')}"
            f" (Paddle: {counts['allreduces_before']});"
            f" largest {max(counts['bucket_bytes']) / MEBIBYTE:.3g} MB"
        )
        if any(row.ours is None for row in rows):
            fused += "; as built: Paddle's own reducer sends them, which cannot be observed"
        are_paddles = all(sorted(row.paddles_bytes) == sorted(row.bucket_bytes) for row in rows)
        # Each model has a limit of its own; this is that of the largest.
        auto = auto_limit_mb(max(sum(row.bucket_bytes) for row in rows))
        for name in FUSION:
            why_not = "fuse_all_reduce_ops is off" * (name != FUSION[0] and not fuses())
            used = auto if settings.effective(name) == "auto" else None
            self._set(name, fused, is_moot=are_paddles, why_not=why_not, used=used)

    def _report_overlap(self, ours: Sequence[Reducer], counts: Mapping[str, Any]) -> None:
        """Report what ran during the backward, and over which communicators."""
        overlaps, number = settings.overlaps(), counts["communicators"]
        never_waits = not ours and not is_synchronous()
        sent = plural(counts["allreduces"], "allreduce")
        if not ours:
            waits = "never waits" if never_waits else "waits for each"
            beside = f"Paddle's own reducer sends them during the backward pass, and {waits}"
        elif overlaps:
            beside = f"{counts['early']} of {sent} went out before the last gradient was ready"
            why_late = next((reducer.why_late for reducer in ours if reducer.why_late), "")
            beside += f"; others at the end: {why_late}" * bool(why_late)
        else:
            beside = "each allreduce was waited for at once"
        is_moot = not ours or counts["allreduces"] == 1 or (overlaps and not counts["early"])
        why_not = "Paddle's own reducer, which averages here, never waits"
        why_not *= never_waits and not overlaps
        self._set("sync_nccl_allreduce", beside, is_moot=is_moot, why_not=why_not)
        few, name = "", "nccl_comm_num"
        if number < int(settings.effective(name, 1)):
            few = self.why_paddles or f"there are too few to share: {sent}"
        details = few * (number > 1) or beside
        evidence = f"{plural(number, 'communicator')}{' in turn' * (number > 1)}; {details}"
        self._set(name, evidence, is_moot=number == 1, why_not=few * (number == 1), used=number)

    def _report_hierarchy(self, groups: Sequence[Sequence[int]], nranks: int) -> None:
        switch, group_size = HIERARCHY
        evidence, why_not = "every allreduce is among all ranks", ""
        if groups:
            leaders = [group[0] for group in groups]
            evidence = f"groups {', '.join(map(str, groups))}; leaders {leaders}"
        elif settings.effective(switch):
            size = int(settings.effective(group_size) or self._spec.topology.ranks_per_node)
            why_not = self.why_paddles or f"groups of {size} among {nranks} ranks are one level"
        self._set(switch, evidence, is_moot=not groups, why_not=why_not)
        if not groups:
            why_not = why_not or f"{switch} is not on"
        self._set(group_size, evidence, why_not=why_not)

    def _report_compression(self, ours: Sequence[Reducer]) -> None:
        used = next(filter(None, (reducer.setup.compression for reducer in ours)), None)
        casts = any(bucket.is_cast for reducer in ours for bucket in reducer.buckets)
        for name in filter(settings.effective, DTYPES):
            if used is None:
                self._set(name, "", why_not=self.why_paddles)
            elif name != used.field:
                self._set(name, "", why_not=f"{used.field} is on, too")
            elif used.failure:
                self._proof.field(name, REFUSED, reason=used.failure)
            elif not casts:
                self._set(name, "", why_not="no gradient is in float32")
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
    ) -> None:
        """Report the field NAME if it was requested; IS_MOOT: Paddle alone does the same.

        WHY_NOT: why it has no effect, if so. USED: its value in effect, if not the requested one.
        """
        if self._spec.get(name) is None:
            return
        is_scripts = settings.script_wins(name)
        if why_not and not is_scripts:
            self._proof.field(name, NO_EFFECT, reason=why_not, evidence=evidence)
            return
        status = SCRIPT if is_scripts else NO_DIFFERENCE if is_moot else EFFECTIVE
        used = settings.effective(name) if used is None else used
        reason = self._spec.reasons.get(name, "")
        self._proof.field(name, status, in_effect=used, reason=reason, evidence=evidence)
