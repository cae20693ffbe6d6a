"""Says of each field what our reducer really did, counted in a backward that it reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..buckets import MEBIBYTE, tell_auto
from ..evidence import EFFECTIVE, NO_EFFECT, SCRIPT, many

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..evidence import Evidence
    from ..wish import Wish
    from .communicators import Lane, Levels
    from .reducer import Reducer

_FUSION = (
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_MB",
    "fuse_grad_size_in_num",
    "fuse_grad_size_in_TFLOPS",
    "last_comm_group_size_MB",
)
_HIERARCHY = ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
_ALL = (*_FUSION, "nccl_comm_num", "sync_nccl_allreduce", *_HIERARCHY)


class Made(NamedTuple):
    """With what a reducer was made; NUMBER counts them in this process."""

    number: int
    lanes: Sequence[Lane]
    levels: Levels | None
    # How many buckets Paddle's own reducer would have had.
    paddles_buckets: int
    overlaps: bool
    nranks: int


class Report:
    """Speaks after the first reduced backwards of each model; and stays silent then."""

    def __init__(self, asked: Wish, proof: Evidence) -> None:
        self._asked = asked
        self._proof = proof
        self._models: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, list[int]] = {}

    def alone(self) -> None:
        """Say that there is only one rank."""
        self._proof.graph = "dygraph"
        for name in _ALL:
            if name in self._asked.strategy:
                self._proof.knob(name, NO_EFFECT, reason="one rank: nothing to reduce")

    def reduced(self, reducer: Reducer, made: Made) -> None:
        """Count what REDUCER did in the backward that has just ended."""
        # The second one shows the steady state; more of them would only cost time.
        if reducer.rounds > 2:  # noqa: PLR2004
            return
        before = self._calls.get(made.number, [0] * len(made.lanes))
        after = [lane.calls for lane in made.lanes]
        self._calls[made.number] = after
        calls = [now - then for now, then in zip(after, before)]
        self._models[made.number] = {
            "gradients": len(reducer.parameters),
            "allreduces_before": made.paddles_buckets,
            "allreduces": sum(calls),
            "bucket_bytes": [bucket.nbytes for bucket in reducer.buckets],
            "communicators": sum(1 for count in calls if count),
            "early": reducer.early,
            "moved": reducer.moved,
            "groups": [list(group) for group in made.levels.groups] if made.levels else [],
        }
        self._speak(made)

    def _speak(self, made: Made) -> None:
        models = list(self._models.values())
        counts: dict[str, Any] = {
            name: sum(model[name] for model in models)
            for name in ("gradients", "allreduces_before", "allreduces", "early", "moved")
        }
        counts["bucket_bytes"] = [size for model in models for size in model["bucket_bytes"]]
        counts["communicators"] = max(model["communicators"] for model in models)
        counts["groups"] = models[0]["groups"]
        self._proof.graph = "dygraph"
        self._proof.counts.update(counts)
        fused = (
            f"{many(counts['gradients'], 'gradient')} in"
            f" {many(counts['allreduces'], 'allreduce')}"
            f" (Paddle's own: {counts['allreduces_before']});"
            f" largest {max(counts['bucket_bytes']) / MEBIBYTE:.3g} MB"
        )
        for name in _FUSION:
            self._say(name, fused)
        early = (
            f"{counts['early']} of {many(counts['allreduces'], 'allreduce')} went out before the"
            " last gradient was there"
        )
        if counts["moved"]:
            early += f"; {counts['moved']} gradients are reduced in the order in which they came"
        if not made.overlaps:
            early = "each allreduce was waited for at once"
        self._say("sync_nccl_allreduce", early)
        turns = " in turn" if counts["communicators"] > 1 else ""
        used = many(counts["communicators"], "communicator")
        self._say("nccl_comm_num", f"{used}{turns}; {early}")
        for name in _HIERARCHY:
            self._say_groups(name, made)
        self._proof.write()

    def _say(self, name: str, evidence: str) -> None:
        asked = self._asked.get(name)
        if asked is None:
            return
        used = settings.effective(name)
        is_scripts = settings.is_scripts(name)
        reason = self._asked.reasons.get(name, "")
        if name == "fuse_grad_size_in_MB" and used == "auto":
            # Each model has its own; that of the largest is told.
            used, reason = tell_auto(
                max(sum(model["bucket_bytes"]) for model in self._models.values())
            )
        elif name in _FUSION[1:] and not is_scripts and not self._fuses():
            self._proof.knob(
                name, NO_EFFECT, reason="fuse_all_reduce_ops is off", evidence=evidence
            )
            return
        if name == "nccl_comm_num" and self._proof.counts["communicators"] < int(used):
            made, used = self._proof.counts["allreduces"], self._proof.counts["communicators"]
            are = "is" if made == 1 else "are"
            reason = f"there {are} only {many(made, 'allreduce')} to share"
            if used == 1 and not is_scripts:
                self._proof.knob(name, NO_EFFECT, reason=reason, evidence=evidence)
                return
        status = SCRIPT if is_scripts else EFFECTIVE
        self._proof.knob(name, status, in_effect=used, reason=reason, evidence=evidence)

    def _fuses(self) -> bool:
        return bool(settings.effective("fuse_all_reduce_ops", default=True))

    def _say_groups(self, name: str, made: Made) -> None:
        asked = self._asked.get(name)
        if asked is None:
            return
        if made.levels is None and name == "use_hierarchical_allreduce" and not asked:
            self._say(name, "every allreduce is among all ranks")
        elif made.levels is not None:
            groups = ", ".join(str(list(group)) for group in made.levels.groups)
            self._say(name, f"groups {groups}; leaders {list(made.levels.leaders)}")
        elif not self._asked.get("use_hierarchical_allreduce"):
            self._proof.knob(name, NO_EFFECT, reason="use_hierarchical_allreduce is not on")
        else:
            self._proof.knob(
                name,
                NO_EFFECT,
                reason=f"groups of one rank, or of all {made.nranks}, have no second level",
            )
