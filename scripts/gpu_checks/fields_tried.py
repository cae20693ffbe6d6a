"""The fields of a strategy that are tried one by one, with what the job's own count must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fleetrun.strategy import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Trial(NamedTuple):
    """Settings tried in one launch; the first is the one that is looked at.

    `allreduces` and `groups` are what the job counts in a step with so many gradients; None: any,
    as in static graphs, whose sums run within Paddle's executor.
    """

    settings: tuple[str, ...]
    graph: str
    predicted: str
    allreduces: Callable[[int], int] | None = None
    groups: int | None = None
    # Whether the weights are those of plain training.
    is_same: bool = True

    @property
    def name(self) -> str:
        """The field."""
        return self.settings[0].partition("=")[0].partition(".")[0]


def _halves(gradients: int) -> int:
    return -(-gradients // 2)


PAIRS = "fuse_grad_size_in_num=2"

# Those of which the job's count is known, and the value of others that are not true or false.
VALUES = {
    "fuse_all_reduce_ops": ("fuse_all_reduce_ops=false",),
    "fuse_grad_size_in_MB": ("fuse_grad_size_in_MB=1",),
    "fuse_grad_size_in_num": (PAIRS,),
    "fuse_grad_size_in_TFLOPS": ("fuse_grad_size_in_TFLOPS=2",),
    "last_comm_group_size_MB": ("last_comm_group_size_MB=0.5",),
    "nccl_comm_num": ("nccl_comm_num=2", PAIRS),
    "gradient_merge": ("gradient_merge=true", "gradient_merge_configs.k_steps=2"),
    "recompute": ("recompute=true", "recompute_configs.checkpoints=relu_1.tmp_0"),
    "localsgd": ("localsgd=true", "localsgd_configs.k_steps=2"),
    "adaptive_localsgd": ("adaptive_localsgd=true", "adaptive_localsgd_configs.init_k_steps=2"),
    "sharding": ("sharding=true", "sharding_configs.sharding_degree=2"),
    "conv_workspace_size_limit": ("conv_workspace_size_limit=512",),
}
COUNTS: dict[str, Callable[[int], int]] = {
    "fuse_all_reduce_ops": lambda gradients: gradients,
    "fuse_grad_size_in_num": _halves,
    "fuse_grad_size_in_TFLOPS": _halves,
    "nccl_comm_num": _halves,
}
# Another optimizer, or another moment of it, gives other weights.
OTHER_WEIGHTS = frozenset(
    ["gradient_merge", "localsgd", "adaptive_localsgd", "lars", "lamb", "dgc", "amp", "sharding"]
)
# Two levels need more ranks than a trial has, and this one starts groups of its own.
ELSEWHERE = frozenset(("use_hierarchical_allreduce", "hybrid_configs"))


def version(paddle: str) -> str:
    """Return the Paddle of which verdicts are known that is nearest to PADDLE."""
    return min(fields.PADDLES, key=lambda known: known[0] != paddle[:1])


def trials(paddle: str, device: str) -> Iterator[Trial]:
    """Yield a trial for each field of which it is said that it works, or that nobody knows."""
    for graph in fields.GRAPHS:
        for field in fields.TABLE:
            if field.name in ELSEWHERE or (field.kind != "bool" and field.name not in VALUES):
                continue
            if field.section not in (fields.STRATEGY, fields.BUILD):
                continue
            settings = VALUES.get(field.name, (f"{field.name}=true",))
            is_off = settings[0].endswith("=false")
            outcome = fields.outcome(
                field, paddle=version(paddle), graph=graph, device=device, is_off=is_off
            )
            if outcome.status not in (fields.EFFECTIVE, fields.UNTESTED):
                continue
            yield Trial(
                settings,
                graph,
                outcome.status,
                COUNTS.get(field.name) if graph == "dygraph" else None,
                2 if (graph, field.name) == ("dygraph", "nccl_comm_num") else None,
                field.name not in OTHER_WEIGHTS,
            )
