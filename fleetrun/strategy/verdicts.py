"""What each knob comes to, by Paddle, kind of graph and device: told before a run; pure.

Measured, but for what the reasons say is not. The tests of the effects measure it again.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
from typing import NamedTuple

PADDLES = ("2.6.2", "3.3.1")
GRAPHS = ("dygraph", "static")
DEVICES = ("cpu", "gpu")

EFFECTIVE = "effective"
NO_EFFECT = "no effect"
REFUSED = "refused"
# Handed to Paddle as it is, and nobody has looked what becomes of it.
UNTESTED = "untested"


class Verdict(NamedTuple):
    """What becomes of a knob, and why."""

    status: str
    reason: str


class Row(NamedTuple):
    """One line of the table: an empty place stands for all; the first line that fits counts."""

    names: str
    status: str
    reason: str
    graph: str = ""
    paddle: str = ""
    device: str = ""


_OURS = "fleetrun sends the gradients itself"
_REWRITES = "fleetrun rewrites the program itself"
LEGACY_IR = (
    "Paddle 3.3.1 runs static strategies with its older representation of programs only: "
    "FLAGS_enable_pir_api=0, and networks that get by without paddle.matmul and its like."
)
_GRAPH = "not available in dygraph: it fuses operators of a static program"

TABLE: tuple[Row, ...] = (
    # Known to ruin a training.
    Row("fp16_allreduce", REFUSED, "true makes ranks diverge without an error"),
    Row("without_graph_optimization", REFUSED, "false makes ranks diverge without an error"),
    # What fleetrun makes real.
    Row(
        "fuse_all_reduce_ops fuse_grad_size_in_MB fuse_grad_size_in_num fuse_grad_size_in_TFLOPS "
        "last_comm_group_size_MB",
        EFFECTIVE,
        f"{_OURS}, in buckets of this size",
        "dygraph",
    ),
    Row("nccl_comm_num", EFFECTIVE, f"{_OURS}, over communicators in turn", "dygraph"),
    Row("sync_nccl_allreduce", EFFECTIVE, f"{_OURS}, and waits or does not", "dygraph"),
    Row(
        "use_hierarchical_allreduce hierarchical_allreduce_inter_nranks",
        EFFECTIVE,
        f"{_OURS}, in two levels",
        "dygraph",
    ),
    Row(
        "gradient_merge gradient_merge_configs",
        EFFECTIVE,
        "fleetrun merges; allreduces are sent at the update only",
        "dygraph",
    ),
    Row(
        "fuse_all_optimizer_ops",
        EFFECTIVE,
        "for Momentum and Adam, whose fused operators are used; no other optimizer has one",
        "dygraph",
    ),
    Row(
        "fuse_all_reduce_ops fuse_grad_size_in_MB fuse_grad_size_in_num fuse_grad_size_in_TFLOPS",
        EFFECTIVE,
        f"{_REWRITES}, in buckets by bytes and by count",
        "static",
    ),
    Row("nccl_comm_num", EFFECTIVE, f"{_REWRITES}, with one communicator each", "static"),
    Row(
        "use_hierarchical_allreduce hierarchical_allreduce_inter_nranks",
        EFFECTIVE,
        f"{_REWRITES}, in two levels",
        "static",
    ),
    Row(
        "gradient_merge gradient_merge_configs",
        EFFECTIVE,
        "Paddle merges, and fleetrun fuses the allreduces",
        "static",
    ),
    Row("fuse_elewise_add_act_ops", EFFECTIVE, "where a sum is next to an activation", "static"),
    Row(
        "fuse_all_optimizer_ops",
        EFFECTIVE,
        f"{_REWRITES}, for Momentum and Adam",
        "static",
    ),
    # Passed on to Paddle in dygraph.
    Row(
        "amp amp_configs",
        NO_EFFECT,
        "Paddle's auto_cast does nothing on the CPU",
        "dygraph",
        device="cpu",
    ),
    Row(
        "amp amp_configs",
        UNTESTED,
        "the script must call auto_cast; fleetrun counts the operators in half precision",
        "dygraph",
    ),
    Row(
        "sharding sharding_configs",
        NO_EFFECT,
        "in dygraph Paddle shards by hybrid_configs only",
        "dygraph",
    ),
    Row("recompute recompute_configs", NO_EFFECT, "data parallel does not read it", "dygraph"),
    Row("sync_batch_norm", NO_EFFECT, "layers stay as the script made them", "dygraph"),
    Row(
        "lars lars_configs lamb lamb_configs localsgd localsgd_configs",
        NO_EFFECT,
        "Paddle reads it for static programs only",
        "dygraph",
    ),
    Row(
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent",
        NO_EFFECT,
        "Paddle reads it for static programs only; the section flags has the same as FLAGS_*",
        "dygraph",
    ),
    Row("calc_comm_same_stream", NO_EFFECT, "data parallel does not read it", "dygraph"),
    Row("heter_ccl_mode", NO_EFFECT, "3.3.1 stops with an AttributeError", "dygraph", "3.3.1"),
    # And with a static program.
    Row("last_comm_group_size_MB", NO_EFFECT, "Paddle reads it in dygraph only", "static"),
    Row(
        "sync_nccl_allreduce calc_comm_same_stream",
        NO_EFFECT,
        "gloo on CPUs has no streams",
        "static",
        device="cpu",
    ),
    Row("sync_nccl_allreduce", EFFECTIVE, "sets Paddle's flag", "static", "2.6.2", "gpu"),
    Row("calc_comm_same_stream", EFFECTIVE, f"{_REWRITES}, for the one stream", "static"),
    Row(
        "fuse_bn_act_ops fuse_bn_add_act_ops",
        NO_EFFECT,
        "nothing changes with 32-bit numbers on CPUs",
        "static",
        device="cpu",
    ),
    Row(
        "fuse_bn_act_ops fuse_bn_add_act_ops",
        UNTESTED,
        "nothing changes with 32-bit NCHW; half precision and NHWC were not tried",
        "static",
    ),
    Row(
        "fuse_relu_depthwise_conv",
        UNTESTED,
        "only a model with depthwise convolutions can show it",
        "static",
    ),
    Row(
        "fuse_broadcast_ops enable_backward_optimizer_op_deps cache_runtime_context",
        NO_EFFECT,
        "the program stays as it is",
        "static",
    ),
    Row("enable_inplace", EFFECTIVE, "adds operators that share memory", "static", "2.6.2"),
    Row("enable_inplace", NO_EFFECT, "3.3.1 has no such pass any more", "static", "3.3.1"),
    Row(
        "enable_auto_fusion fuse_gemm_epilogue",
        NO_EFFECT,
        "a build for CPUs has no such pass",
        "static",
        device="cpu",
    ),
    Row("enable_auto_fusion", REFUSED, "Paddle stops with it", "static"),
    Row("fuse_gemm_epilogue", NO_EFFECT, "it does not match this Paddle's operators", "static"),
    Row(
        "enable_sequential_execution",
        NO_EFFECT,
        "accepted, and nothing changes",
        "static",
        "2.6.2",
    ),
    Row(
        "num_threads num_iteration_per_drop_scope num_iteration_per_run use_thread_barrier",
        NO_EFFECT,
        "accepted, and the program stays as it is",
        "static",
        "2.6.2",
    ),
    Row("sync_batch_norm", NO_EFFECT, "the field never reaches Paddle's pass", "static"),
    Row(
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent",
        NO_EFFECT,
        "a build for CPUs has no cuDNN",
        "static",
        device="cpu",
    ),
    Row(
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent",
        EFFECTIVE,
        "sets Paddle's flag",
        "static",
        "2.6.2",
    ),
    Row(
        "amp amp_configs",
        NO_EFFECT,
        "the loss is scaled, and all is computed in 32 bits",
        "static",
        device="cpu",
    ),
    Row("amp amp_configs", EFFECTIVE, "Paddle rewrites the program", "static", "2.6.2"),
    Row("amp amp_configs", UNTESTED, "nobody has seen it on a GPU", "static"),
    Row("recompute recompute_configs", EFFECTIVE, "from the checkpoints that it names", "static"),
    Row("sharding sharding_configs", REFUSED, "2.6.2 stops on CPUs", "static", "2.6.2", "cpu"),
    Row(
        "sharding sharding_configs",
        EFFECTIVE,
        "Paddle rewrites the program; on CPUs with all ranks in one group",
        "static",
    ),
    Row(
        "localsgd localsgd_configs",
        EFFECTIVE,
        "for Momentum and SGD; fleetrun leaves out the sums of gradients that Paddle keeps",
        "static",
    ),
    Row(
        "adaptive_localsgd adaptive_localsgd_configs",
        EFFECTIVE,
        "for Momentum and SGD; Paddle rewrites the program",
        "static",
    ),
    Row("a_sync a_sync_configs", NO_EFFECT, "it is for parameter servers", "static"),
    Row("dgc dgc_configs", REFUSED, "Paddle has it for GPUs only", "static", device="cpu"),
    Row("dgc dgc_configs", EFFECTIVE, "Paddle rewrites the program", "static", "2.6.2"),
    Row("lars lars_configs", EFFECTIVE, "in the place of Momentum", "static"),
    Row("lamb lamb_configs", EFFECTIVE, "in the place of Adam", "static"),
)


def verdict(name: str, *, section: str, only: str, paddle: str, graph: str, device: str) -> Verdict:
    """Say what becomes of the field NAME of SECTION, which may be there in ONLY one Paddle.

    >>> verdict("nccl_comm_num", section="strategy", only="", paddle="3.3.1", graph="dygraph",
    ...         device="cpu").status
    'effective'
    """
    if only and only != paddle:
        return Verdict(NO_EFFECT, f"Paddle {paddle} has no such field")
    for row in TABLE:
        if (
            name in row.names.split()
            and row.graph in ("", graph)
            and row.paddle in ("", paddle)
            and row.device in ("", device)
        ):
            return Verdict(row.status, row.reason)
    if graph == "dygraph" and section == "build_strategy":
        return Verdict(NO_EFFECT, _GRAPH)
    if graph == "dygraph" and section == "execution_strategy":
        return Verdict(NO_EFFECT, "dygraph has no executor")
    return Verdict(UNTESTED, "handed to Paddle as it is; nobody has measured it")
