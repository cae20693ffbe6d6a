"""What each knob comes to, by Paddle, kind of graph and device: told before a run; pure.

`tests/train/test_verdicts.py` measures what is said of CPUs again, with each Paddle and graph. What
is said of GPUs was read in the programs of a GPU build, or holds wherever it holds on CPUs.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.strategy import fields
from fleetrun.strategy.fields import Field

PADDLES = ("2.6.2", "3.3.1")
GRAPHS = ("dygraph", "static")
DEVICES = ("cpu", "gpu")

EFFECTIVE = "effective"
NO_EFFECT = "no effect"
REFUSED = "refused"
# Only a GPU can tell, and none has been asked yet.
UNTESTED = "untested"


class FieldOutcome(NamedTuple):
    """What becomes of a knob, and why."""

    status: str
    reason: str


class VerdictRow(NamedTuple):
    """One line of the table: an empty place stands for all; the first line that fits counts.

    `unseen` is the reason where a run does not show what the line says.
    `by_default` is true where the field asks for what is so without it.
    """

    names: str
    status: str
    reason: str
    graph: str = ""
    paddle: str = ""
    device: str = ""
    unseen: str = ""
    by_default: bool = False


# What all that is said of GPUs comes with.
GPUS = "No GPU was asked: what is said of them was read in the programs of Paddle's GPU build."

_OURS = "fleetrun sends the gradients itself"
_REWRITES = "fleetrun rewrites the program itself"
LEGACY_IR = (
    "Paddle 3.3.1 runs static strategies with its older representation of programs only: "
    "FLAGS_enable_pir_api=0, and networks that get by without paddle.matmul and its like."
)
_AUTO_CAST = "in dygraph fleet makes a GradScaler at most; the script must call auto_cast"
_STOPS = "true makes Paddle stop while it rewrites the program"
_ONLY_A_GPU = "only a GPU can tell: "
_SERVERS = "only training with parameter servers reads it"
_SHARDED = "Paddle reads it for sharded static programs only"
_MAKES = "data parallel makes nothing of it"
# Whatever it is set to.
_WAITING_ON_GPUS = (
    VerdictRow("sync_nccl_allreduce", EFFECTIVE, "sets Paddle's flag", "static", "2.6.2", "gpu"),
    VerdictRow(
        "sync_nccl_allreduce",
        UNTESTED,
        f"{_ONLY_A_GPU}its flag is a GPU's",
        "static",
        "3.3.1",
        "gpu",
    ),
)

TABLE: tuple[VerdictRow, ...] = (
    VerdictRow(
        "without_graph_optimization", NO_EFFECT, "dygraph has no graph to optimize", "dygraph"
    ),
    VerdictRow("without_graph_optimization", EFFECTIVE, "on, as without it", by_default=True),
    VerdictRow("qat_configs", NO_EFFECT, "qat is refused"),
    # What fleetrun makes real.
    VerdictRow(
        "fuse_all_reduce_ops fuse_grad_size_in_MB fuse_grad_size_in_num fuse_grad_size_in_TFLOPS "
        "last_comm_group_size_MB",
        EFFECTIVE,
        f"{_OURS}, in buckets of this size",
        "dygraph",
    ),
    VerdictRow("nccl_comm_num", EFFECTIVE, f"{_OURS}, over communicators in turn", "dygraph"),
    VerdictRow("sync_nccl_allreduce", EFFECTIVE, f"{_OURS}, and waits or does not", "dygraph"),
    VerdictRow(
        "use_hierarchical_allreduce hierarchical_allreduce_inter_nranks",
        EFFECTIVE,
        f"{_OURS}, in two levels",
        "dygraph",
    ),
    VerdictRow(
        "fp16_allreduce",
        REFUSED,
        "its gloo sums float16 to infinity: see bf16_allreduce",
        "dygraph",
        "3.3.1",
        "cpu",
    ),
    VerdictRow(
        "fp16_allreduce bf16_allreduce",
        UNTESTED,
        f"{_ONLY_A_GPU}NCCL is self-tested at the start",
        "dygraph",
        device="gpu",
    ),
    VerdictRow("fp16_allreduce bf16_allreduce", EFFECTIVE, f"{_OURS}, in 16 bits", "dygraph"),
    VerdictRow(
        "fp16_allreduce bf16_allreduce",
        REFUSED,
        "in static graphs Paddle's own sends no gradients at all, and ranks diverge",
        "static",
    ),
    VerdictRow(
        "gradient_merge gradient_merge_configs",
        EFFECTIVE,
        "fleetrun merges; allreduces are sent at the update only",
        "dygraph",
    ),
    VerdictRow(
        "fuse_all_optimizer_ops",
        EFFECTIVE,
        "for Momentum and Adam, whose fused operators are used; no other optimizer has one",
        "dygraph",
    ),
    VerdictRow(
        "fuse_all_reduce_ops fuse_grad_size_in_MB fuse_grad_size_in_num fuse_grad_size_in_TFLOPS",
        EFFECTIVE,
        f"{_REWRITES}, in buckets by bytes and by count",
        "static",
    ),
    VerdictRow(
        "nccl_comm_num",
        NO_EFFECT,
        "Paddle 3 runs all rings of an older static program over the first communicator",
        "static",
        "3.3.1",
        "gpu",
    ),
    VerdictRow("nccl_comm_num", EFFECTIVE, f"{_REWRITES}, with one communicator each", "static"),
    VerdictRow(
        "use_hierarchical_allreduce hierarchical_allreduce_inter_nranks",
        REFUSED,
        "Paddle 3 runs all rings of an older static program over the first communicator: groups "
        "would wait for each other for ever",
        "static",
        "3.3.1",
        "gpu",
    ),
    VerdictRow(
        "use_hierarchical_allreduce hierarchical_allreduce_inter_nranks",
        UNTESTED,
        f"{_ONLY_A_GPU}{_REWRITES}, in two levels on the computation's stream",
        "static",
        "2.6.2",
        "gpu",
    ),
    VerdictRow(
        "use_hierarchical_allreduce hierarchical_allreduce_inter_nranks",
        EFFECTIVE,
        f"{_REWRITES}, in two levels",
        "static",
    ),
    VerdictRow(
        "gradient_merge gradient_merge_configs",
        EFFECTIVE,
        "Paddle merges, and fleetrun fuses the allreduces",
        "static",
    ),
    VerdictRow(
        "fuse_elewise_add_act_ops",
        EFFECTIVE,
        "where a sum is next to an activation; not with a bias of convolutions, read wrongly",
        "static",
    ),
    VerdictRow(
        "fuse_all_optimizer_ops",
        EFFECTIVE,
        f"{_REWRITES}, for Momentum and Adam",
        "static",
    ),
    # Passed on to Paddle in dygraph.
    VerdictRow("find_unused_parameters", EFFECTIVE, "handed to DataParallel", "dygraph"),
    VerdictRow(
        "hybrid_configs",
        EFFECTIVE,
        "fleet.init makes groups of ranks by it",
        "dygraph",
        unseen="the script has not made these groups by fleet.init",
    ),
    VerdictRow(
        "amp amp_configs",
        NO_EFFECT,
        "Paddle's auto_cast does nothing on the CPU",
        "dygraph",
        device="cpu",
        unseen=_AUTO_CAST,
    ),
    VerdictRow(
        "amp amp_configs",
        UNTESTED,
        f"{_ONLY_A_GPU}the script must call auto_cast, and operators in 16 bits are counted",
        "dygraph",
        unseen=_AUTO_CAST,
    ),
    VerdictRow(
        "sharding sharding_configs",
        NO_EFFECT,
        "in dygraph Paddle shards by hybrid_configs or group_sharded_parallel",
        "dygraph",
    ),
    VerdictRow(
        "recompute recompute_configs",
        NO_EFFECT,
        "in dygraph the script must call paddle.distributed.fleet.recompute",
        "dygraph",
    ),
    VerdictRow(
        "sync_batch_norm",
        NO_EFFECT,
        "in dygraph the script must call SyncBatchNorm.convert_sync_batchnorm",
        "dygraph",
    ),
    VerdictRow(
        "lamb lamb_configs",
        NO_EFFECT,
        "in dygraph the script must make a paddle.optimizer.Lamb",
        "dygraph",
    ),
    VerdictRow("gradient_scale_configs", NO_EFFECT, _SHARDED, "dygraph"),
    VerdictRow(
        "lars lars_configs localsgd localsgd_configs adaptive_localsgd "
        "adaptive_localsgd_configs dgc dgc_configs fuse_grad_merge",
        NO_EFFECT,
        "Paddle reads it for static programs only",
        "dygraph",
    ),
    VerdictRow(
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent",
        NO_EFFECT,
        "Paddle reads it for static programs only; the section flags has the same as FLAGS_*",
        "dygraph",
    ),
    VerdictRow("calc_comm_same_stream", NO_EFFECT, "data parallel does not read it", "dygraph"),
    VerdictRow(
        "heter_ccl_mode",
        REFUSED,
        "true makes fleet stop with an AttributeError",
        "dygraph",
        "3.3.1",
    ),
    # Read by neither kind of graph.
    VerdictRow("heter_ccl_mode split_data adam_d2sum elastic", NO_EFFECT, _MAKES),
    VerdictRow("a_sync a_sync_configs is_fl_ps_mode with_coordinator", NO_EFFECT, _SERVERS),
    VerdictRow(
        "pipeline pipeline_configs tensor_parallel tensor_parallel_configs",
        NO_EFFECT,
        "in dygraph Paddle reads hybrid_configs",
        "dygraph",
    ),
    VerdictRow(
        "auto semi_auto auto_search",
        NO_EFFECT,
        "Paddle reads it for static programs only",
        "dygraph",
    ),
    # And with a static program.
    VerdictRow(
        "find_unused_parameters", NO_EFFECT, "a program has the gradients that it has", "static"
    ),
    VerdictRow("hybrid_configs", NO_EFFECT, "Paddle reads it in dygraph only", "static"),
    VerdictRow(
        "pipeline_configs tensor_parallel_configs", NO_EFFECT, f"{_MAKES} by itself", "static"
    ),
    VerdictRow("gradient_scale_configs", NO_EFFECT, _SHARDED, "static"),
    VerdictRow("fuse_grad_merge", NO_EFFECT, "no part of the program follows it", "static"),
    VerdictRow(
        "pipeline",
        REFUSED,
        "Paddle stops unless the program says the device of each operator",
        "static",
    ),
    VerdictRow(
        "tensor_parallel",
        REFUSED,
        "over gloo, all ranks of static programs are in one group",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "tensor_parallel",
        UNTESTED,
        f"{_ONLY_A_GPU}groups of ranks need its communicators",
        "static",
    ),
    VerdictRow("auto semi_auto auto_search", REFUSED, _STOPS, "static"),
    VerdictRow("last_comm_group_size_MB", NO_EFFECT, "Paddle reads it in dygraph only", "static"),
    VerdictRow(
        "sync_nccl_allreduce",
        EFFECTIVE,
        "gloo is waited for, over several communicators by fleetrun",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "calc_comm_same_stream", NO_EFFECT, "gloo on CPUs has no streams", "static", device="cpu"
    ),
    *_WAITING_ON_GPUS,
    VerdictRow("calc_comm_same_stream", EFFECTIVE, f"{_REWRITES}, for the one stream", "static"),
    VerdictRow(
        "fuse_bn_act_ops fuse_bn_add_act_ops",
        NO_EFFECT,
        "nothing changes with 32-bit numbers on CPUs",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "fuse_bn_act_ops fuse_bn_add_act_ops",
        UNTESTED,
        f"{_ONLY_A_GPU}nothing changes with 32-bit NCHW, half precision and NHWC run there",
        "static",
    ),
    VerdictRow(
        "fuse_relu_depthwise_conv",
        NO_EFFECT,
        "nothing changes on CPUs, with depthwise convolutions either",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "fuse_relu_depthwise_conv",
        UNTESTED,
        f"{_ONLY_A_GPU}it is for kernels without cuDNN",
        "static",
    ),
    VerdictRow(
        "fuse_broadcast_ops enable_backward_optimizer_op_deps cache_runtime_context "
        "reduce_strategy debug_graphviz_path",
        NO_EFFECT,
        "the program stays as it is",
        "static",
    ),
    VerdictRow("enable_inplace", EFFECTIVE, "adds operators that share memory", "static", "2.6.2"),
    VerdictRow("enable_inplace", NO_EFFECT, "3.3.1 has no such pass any more", "static", "3.3.1"),
    VerdictRow(
        "enable_addto fused_attention fused_feedforward allow_cuda_graph_capture",
        NO_EFFECT,
        "nothing changes on CPUs",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "enable_addto fused_attention fused_feedforward allow_cuda_graph_capture",
        UNTESTED,
        f"{_ONLY_A_GPU}it is for kernels of a GPU",
        "static",
    ),
    VerdictRow(
        "fuse_dot_product_attention fuse_resunit",
        REFUSED,
        "Paddle stops: its builds for CPUs lack the pass, or cuDNN's frontend",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "fuse_dot_product_attention fuse_resunit",
        UNTESTED,
        f"{_ONLY_A_GPU}it needs cuDNN's frontend",
        "static",
    ),
    VerdictRow(
        "enable_auto_fusion fuse_gemm_epilogue",
        NO_EFFECT,
        "Paddle has it for GPUs only",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "enable_auto_fusion", REFUSED, "Paddle stops: its pass lacks an attribute", "static"
    ),
    VerdictRow(
        "fuse_gemm_epilogue", NO_EFFECT, "it does not match this Paddle's operators", "static"
    ),
    VerdictRow(
        "enable_sequential_execution fix_op_run_order",
        NO_EFFECT,
        "accepted, and nothing changes",
        "static",
        "2.6.2",
    ),
    VerdictRow(
        "num_threads num_iteration_per_drop_scope num_iteration_per_run use_thread_barrier",
        NO_EFFECT,
        "accepted, and the program stays as it is",
        "static",
        "2.6.2",
    ),
    VerdictRow("sync_batch_norm", NO_EFFECT, "the field never reaches Paddle's pass", "static"),
    VerdictRow(
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent",
        NO_EFFECT,
        "a build for CPUs has no cuDNN",
        "static",
        device="cpu",
    ),
    VerdictRow(
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent",
        EFFECTIVE,
        "sets Paddle's flag",
        "static",
        "2.6.2",
    ),
    VerdictRow(
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent",
        UNTESTED,
        f"{_ONLY_A_GPU}its flags are a GPU's",
        "static",
        "3.3.1",
    ),
    VerdictRow(
        "amp amp_configs",
        NO_EFFECT,
        "the loss is scaled, and all is computed in 32 bits",
        "static",
        device="cpu",
    ),
    VerdictRow("amp amp_configs", EFFECTIVE, "Paddle rewrites the program", "static", "2.6.2"),
    VerdictRow("amp amp_configs", UNTESTED, f"{_ONLY_A_GPU}what is computed in 16 bits", "static"),
    VerdictRow(
        "recompute recompute_configs", EFFECTIVE, "from the checkpoints that it names", "static"
    ),
    VerdictRow(
        "sharding sharding_configs",
        REFUSED,
        "Paddle 2.6.2 shards static programs on GPUs only",
        "static",
        "2.6.2",
        "cpu",
    ),
    VerdictRow(
        "sharding sharding_configs",
        EFFECTIVE,
        "Paddle rewrites the program; on CPUs with all ranks in one group",
        "static",
    ),
    VerdictRow(
        "localsgd localsgd_configs",
        EFFECTIVE,
        "for Momentum and SGD; fleetrun leaves out the sums of gradients that Paddle keeps",
        "static",
    ),
    VerdictRow(
        "adaptive_localsgd adaptive_localsgd_configs",
        EFFECTIVE,
        "for Momentum and SGD; Paddle rewrites the program",
        "static",
    ),
    VerdictRow("dgc dgc_configs", REFUSED, "Paddle has it for GPUs only", "static", device="cpu"),
    VerdictRow("dgc dgc_configs", EFFECTIVE, "Paddle rewrites the program", "static", "2.6.2"),
    VerdictRow("dgc dgc_configs", UNTESTED, f"{_ONLY_A_GPU}CPUs refuse it", "static", "3.3.1"),
    VerdictRow("lars lars_configs", EFFECTIVE, "in the place of Momentum", "static"),
    VerdictRow("lamb lamb_configs", EFFECTIVE, "in the place of Adam", "static"),
)

# What fits no line above, by its section.
SECTIONS: Mapping[str, tuple[VerdictRow, ...]] = {
    fields.BUILD: (
        VerdictRow(
            "",
            NO_EFFECT,
            "not available in dygraph: it fuses operators of a static program",
            "dygraph",
        ),
    ),
    fields.EXECUTION: (VerdictRow("", NO_EFFECT, "dygraph has no executor", "dygraph"),),
}

# The same for `false`; what is not here is off then, as it is by itself.
OFF: tuple[VerdictRow, ...] = (
    VerdictRow("fuse_all_reduce_ops", EFFECTIVE, f"{_OURS}, one by one", "dygraph"),
    VerdictRow(
        "fuse_all_reduce_ops", EFFECTIVE, f"{_REWRITES}, with one allreduce for each", "static"
    ),
    VerdictRow("sync_nccl_allreduce", EFFECTIVE, f"{_OURS}, and goes on meanwhile", "dygraph"),
    VerdictRow(
        "sync_nccl_allreduce",
        NO_EFFECT,
        "Paddle's operators wait for gloo, unless nccl_comm_num is above 1",
        "static",
        device="cpu",
    ),
    *_WAITING_ON_GPUS,
)


# What is off by itself is off.
_OFF_BY_DEFAULT = VerdictRow("", EFFECTIVE, "off, as without it", by_default=True)


def rows(field: Field, *, is_off: bool = False) -> tuple[VerdictRow, ...]:
    """Return what is known of FIELD, IS_OFF: of its being false; the first line that fits counts.

    >>> [row.status for row in rows(fields.find("strategy", "asp"))]
    ['refused']
    """
    if field.refused is not None and field.refused[0] is not is_off:
        return (VerdictRow(field.name, REFUSED, field.refused[1]),)
    found = [
        VerdictRow(field.name, NO_EFFECT, f"Paddle {paddle} has no such field", paddle=paddle)
        for paddle in PADDLES
        if field.only not in ("", paddle)
    ]
    table = OFF if is_off else TABLE
    found += [row for row in table if field.name in row.names.split()]
    found += (_OFF_BY_DEFAULT,) if is_off else SECTIONS.get(field.section, ())
    return tuple(found)


def verdict(
    field: Field, *, paddle: str, graph: str, device: str, is_off: bool = False
) -> FieldOutcome:
    """Return what becomes of FIELD in one place; IS_OFF: when it is false.

    >>> field = fields.find("strategy", "nccl_comm_num")
    >>> verdict(field, paddle="3.3.1", graph="dygraph", device="cpu").status
    'effective'
    """
    for row in rows(field, is_off=is_off):
        places = ((row.graph, graph), (row.paddle, paddle), (row.device, device))
        if all(there in ("", here) for there, here in places):
            return FieldOutcome(row.status, row.reason)
    raise KeyError(field.name)
