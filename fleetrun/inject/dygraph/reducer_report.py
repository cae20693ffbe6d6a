"""Reports the effect of each field on our reducer, as counted in a backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import border, settings
from ..buckets import COUNTS, FUSION, MEBIBYTE, describe_auto, fuses
from ..evidence import EFFECTIVE, NO_DIFFERENCE, NO_EFFECT, REFUSED, SCRIPT, plural
from . import levels
from .compression import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..communicators import Communicator, Hierarchy
    from ..evidence import Evidence
    from ..spec import StrategySpec
    from .compression import Compression
    from .reducer import Reducer

_HIERARCHY = (levels.FIELD, levels.SIZE)
# The backwards of each model that are counted.
_COUNTED_BACKWARDS = 2
_watching = border.watching("the count of allreduces")
_ALL = (*FUSION, "nccl_comm_num", "sync_nccl_allreduce", *_HIERARCHY, *DTYPES)


class ReducerSetup(NamedTuple):
    """How the reducer of the model NUMBER was created."""

    number: int
    communicators: Sequence[Communicator]
    hierarchy: Hierarchy | None
    # The bytes of each bucket of Paddle's own reducer.
    paddles_bytes: Sequence[int]
    overlaps: bool
    nranks: int
    compression: Compression | None = None
    # Why it has one level or two, with `auto`.
    why_levels: str = ""
    # It averages when the optimizer steps, not during backwards.
    is_at_step: bool = False


class ReducerReport:
    """Writes the evidence after the first two reduced backwards of each model."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        self._models: dict[int, dict[str, Any]] = {}
        # By the number of the model: the calls of each communicator, by its id.
        self._calls: dict[int, dict[int, int]] = {}
        # The numbers of models that were deleted and are still reported.
        self._deleted: set[int] = set()

    @_watching
    def falls_back(self, text: str) -> None:
        """Report TEXT, the reason why a model keeps Paddle's reducer."""
        self._proof.note(text)

    @_watching
    def single_rank(self) -> None:
        """Report that there is only one rank."""
        self._proof.graph = "dygraph"
        for name in _ALL:
            if name in self._spec.strategy:
                self._proof.knob(name, NO_EFFECT, reason="one rank: nothing to reduce")

    def forget(self, number: int) -> None:
        """Omit the model NUMBER, which the script has deleted, from the next report."""
        self._deleted.add(number)

    @_watching
    def reduced(self, reducer: Reducer, setup: ReducerSetup) -> None:
        """Count the work of REDUCER in the backward that has just ended."""
        deleted, self._deleted = self._deleted, set()
        for number in deleted:
            self._models.pop(number, None)
        built = reducer.bytes_as_built
        was_built = self._models.get(setup.number, {}).get("is_built", False)
        before = self._calls.get(setup.number, {})
        after = {id(communicator): communicator.calls for communicator in setup.communicators}
        self._calls[setup.number] = after
        # The second backward shows the steady state; counting more would only cost time.
        if reducer.backwards > _COUNTED_BACKWARDS and was_built is (built is not None):
            if deleted:
                self._report(setup)
            return
        calls = [now - before.get(key, 0) for key, now in after.items()]
        self._models[setup.number] = {
            "gradients": len(reducer.parameters),
            "allreduces_before": len(setup.paddles_bytes),
            "allreduces": sum(calls) if built is None else len(built),
            "bucket_bytes": built or [bucket.nbytes for bucket in reducer.buckets],
            "paddles_bytes": sorted(setup.paddles_bytes),
            "is_built": built is not None,
            "communicators": sum(1 for count in calls if count) if built is None else 1,
            # Paddle's reducer has none.
            "usage_allreduces": reducer.agreements if built is None else 0,
            "sparse_collectives": reducer.sparse_collectives,
            # An allreduce that is waited for at once overlaps with nothing.
            "early": reducer.early if setup.overlaps else 0,
            "moved": reducer.moved,
            "groups": [list(group) for group in setup.hierarchy.groups] if setup.hierarchy else [],
        }
        self._report(setup)

    def _report(self, setup: ReducerSetup) -> None:
        models = list(self._models.values())
        counts: dict[str, Any] = {
            name: sum(model[name] for model in models)
            for name in (
                *("gradients", "allreduces_before", "allreduces", "early", "moved"),
                *("usage_allreduces", "sparse_collectives"),
            )
        }
        counts["bucket_bytes"] = [size for model in models for size in model["bucket_bytes"]]
        counts["communicators"] = max(model["communicators"] for model in models)
        counts["groups"] = models[0]["groups"]
        self._proof.graph = "dygraph"
        self._proof.counts.update(counts)
        is_built = any(model["is_built"] for model in models)
        fused = (
            f"{plural(counts['gradients'], 'gradient')} in"
            f" {plural(counts['allreduces'], 'allreduce')}"
            f" (Paddle: {counts['allreduces_before']});"
            f" largest {max(counts['bucket_bytes']) / MEBIBYTE:.3g} MB"
        )
        if is_built:
            fused += "; as built: Paddle's own reducer sends them, which cannot be observed"
        if counts["usage_allreduces"]:
            extra = plural(counts["usage_allreduces"], "small allreduce")
            fused += f"; plus {extra} to learn which gradients other ranks have"
        if counts["sparse_collectives"]:
            extra = plural(counts["sparse_collectives"], "collective")
            fused += f"; plus {extra} for sparse gradients"
        if setup.is_at_step:
            fused += "; sent when the optimizer steps"
        are_paddles = all(
            model["paddles_bytes"] == sorted(model["bucket_bytes"]) for model in models
        )
        for name in FUSION:
            # Paddle's reducer counts no gradients.
            is_moot = are_paddles or (self._are_built() and name in COUNTS)
            self._report_field(name, fused, is_moot=is_moot)
        early = self._described_overlap(setup, counts)
        # It never waits, and a single allreduce has nothing to overlap with.
        is_moot = self._are_built() or counts["allreduces"] == 1
        overlaps = setup.is_at_step or (counts["early"] and not is_built)
        is_moot = is_moot or (setup.overlaps and not overlaps)
        self._report_field("sync_nccl_allreduce", early, is_moot=is_moot)
        in_turn = " in turn" if counts["communicators"] > 1 else ""
        used = plural(counts["communicators"], "communicator")
        is_moot = counts["communicators"] == 1
        self._report_field("nccl_comm_num", f"{used}{in_turn}; {early}", is_moot=is_moot)
        for name in _HIERARCHY:
            self._report_hierarchy(name, setup)
        if setup.compression is not None:
            self._report_compression(setup.compression)
        self._proof.write()

    def _are_built(self) -> bool:
        """Whether Paddle's reducer averages the gradients of every model."""
        return all(model["is_built"] for model in self._models.values())

    def _described_overlap(self, setup: ReducerSetup, counts: dict[str, Any]) -> str:
        if not (setup.overlaps or self._are_built()):
            return "each allreduce was waited for at once"
        if setup.is_at_step:
            return (
                "allreduces ran concurrently when the optimizer stepped, none of them during the"
                " backward pass"
            )
        if any(model["is_built"] for model in self._models.values()):
            return "Paddle's own reducer sends them during the backward pass, as it always does"
        early = (
            f"{counts['early']} of {plural(counts['allreduces'], 'allreduce')} went out before the"
            " last gradient was ready"
        )
        if counts["moved"]:
            early += f"; {counts['moved']} gradients were moved to the order of rank 0's backward"
        return early

    def _report_field(self, name: str, evidence: str, *, is_moot: bool = False) -> None:
        """Report the field NAME if it was requested; IS_MOOT: Paddle alone does the same."""
        requested = self._spec.get(name)
        if requested is None:
            return
        used = settings.effective(name)
        is_scripts = settings.script_wins(name)
        reason = self._spec.reasons.get(name, "")
        if name == "fuse_grad_size_in_MB" and used == "auto":
            # Each model has a limit of its own; report the largest.
            used, reason = describe_auto(
                max(sum(model["bucket_bytes"]) for model in self._models.values())
            )
        elif name in FUSION[1:] and not is_scripts and not fuses():
            self._proof.knob(
                name, NO_EFFECT, reason="fuse_all_reduce_ops is off", evidence=evidence
            )
            return
        if name == "nccl_comm_num" and self._proof.counts["communicators"] < int(used):
            allreduces, used = self._proof.counts["allreduces"], self._proof.counts["communicators"]
            are = "is" if allreduces == 1 else "are"
            reason = f"there {are} only {plural(allreduces, 'allreduce')} to share"
            if used == 1 and not is_scripts:
                self._proof.knob(name, NO_EFFECT, reason=reason, evidence=evidence)
                return
        status = SCRIPT if is_scripts else NO_DIFFERENCE if is_moot else EFFECTIVE
        self._proof.knob(name, status, in_effect=used, reason=reason, evidence=evidence)

    def _report_compression(self, used: Compression) -> None:
        for name in DTYPES:
            if not self._spec.get(name):
                continue
            if name != used.field:
                self._proof.knob(name, NO_EFFECT, reason=f"{used.field} is on, too")
            elif used.failure:
                self._proof.knob(name, REFUSED, reason=used.failure)
            else:
                evidence = f"sums are sent as {used.dtype}"
                if used.error is not None:
                    evidence += (
                        f"; the first gradients differ from those sent in float32 by"
                        f" at most {used.error:.1e} of the largest"
                    )
                self._report_field(name, evidence)

    def _report_hierarchy(self, name: str, setup: ReducerSetup) -> None:
        requested = self._spec.get(name)
        if requested is None:
            return
        is_switch = name == levels.FIELD
        if setup.hierarchy is not None:
            groups = ", ".join(str(list(group)) for group in setup.hierarchy.groups)
            evidence = f"groups {groups}; leaders {list(setup.hierarchy.leaders)}"
        elif is_switch and requested in (False, levels.AUTO):
            evidence = "every allreduce is among all ranks"
        elif not self._spec.get(levels.FIELD):
            self._proof.knob(name, NO_EFFECT, reason=f"{levels.FIELD} is not on")
            return
        else:
            self._proof.knob(name, NO_EFFECT, reason=self._why_one_level(setup))
            return
        if is_switch and settings.effective(name) == levels.AUTO:
            is_two, why = setup.hierarchy is not None, f"auto: {setup.why_levels}"
            status = EFFECTIVE if is_two else NO_DIFFERENCE
            self._proof.knob(name, status, in_effect=is_two, reason=why, evidence=evidence)
        else:
            self._report_field(name, evidence, is_moot=setup.hierarchy is None)

    def _why_one_level(self, setup: ReducerSetup) -> str:
        size = int(settings.effective(levels.SIZE) or self._spec.topology.ranks_per_node)
        return setup.why_levels or settings.one_level(size, setup.nranks)
