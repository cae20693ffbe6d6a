"""The one table of every knob a strategy may turn: type, unit, range, default and meaning.

Names, types and defaults were read from `fleet.DistributedStrategy` of Paddle 2.6.2 and 3.3.1.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Iterable
from typing import NamedTuple

from fleetrun import conversion
from fleetrun.model import KnobValue

STRATEGY = "strategy"
BUILD = "build_strategy"
EXECUTION = "execution_strategy"
FLAGS, NCCL, ENV = "flags", "nccl", "env"

FIELD_SECTIONS = (STRATEGY, BUILD, EXECUTION)
VARIABLE_SECTIONS = (FLAGS, NCCL, ENV)
SECTIONS = (*FIELD_SECTIONS, *VARIABLE_SECTIONS)
# What the names of a section's variables begin with.
PREFIXES = {FLAGS: "FLAGS_", NCCL: "NCCL_", ENV: ""}

AUTO = "auto"
PLAN = "plan"
# Updates after which buckets have been planned, at most: a test holds it to the planner.
PLAN_UPDATES = 50
_LARGEST_INT = 2**31 - 1
# What each item of a list is.
_ITEMS = {"ints": "int", "floats": "float", "texts": "text"}


class Field(NamedTuple):
    """One knob: a row of the table.

    `kind` is one of bool, int, float, choice, text, ints, floats, texts, configs (with `keys`).
    `auto` and `plan` say what these words stand for; without it a word is not allowed.
    `refused` is the value that is never passed on, and why.
    `only` is the one Paddle that knows the field, where the others do not; `is_own`: none does,
    as fleetrun alone puts it into effect.
    """

    name: str
    section: str
    kind: str
    doc: str
    default: KnobValue = False
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    words: tuple[str, ...] = ()
    auto: str = ""
    plan: str = ""
    aliases: tuple[str, ...] = ()
    keys: "tuple[Field, ...]" = ()
    refused: "tuple[KnobValue, str] | None" = None
    only: str = ""
    is_own: bool = False


def _on(name: str, doc: str, *, default: bool = False, **more: object) -> Field:
    return Field(name, STRATEGY, "bool", doc, default=default)._replace(**more)  # type: ignore[arg-type]


def _build(name: str, doc: str, *, default: bool = False, only: str = "") -> Field:
    return Field(name, BUILD, "bool", doc, default=default, only=only)


def _whole(
    name: str, doc: str, default: int, unit: str = "", *, minimum: float | None = 1
) -> Field:
    return Field(name, STRATEGY, "int", doc, default=default, unit=unit, minimum=minimum)


def _real(name: str, doc: str, default: float, *, minimum: float | None = 0) -> Field:
    return Field(name, STRATEGY, "float", doc, default=default, minimum=minimum)


def _text(name: str, doc: str, default: str = "") -> Field:
    return Field(name, STRATEGY, "text", doc, default=default)


def _list(name: str, kind: str, doc: str) -> Field:
    return Field(name, STRATEGY, kind, doc, default=())


def _configs(name: str, doc: str, *keys: Field) -> Field:
    return Field(name, STRATEGY, "configs", doc, default="", keys=keys)


_NO_WEIGHT_DECAY = _list(
    "exclude_from_weight_decay", "texts", "Parameters whose names hold one of these are left alone."
)

# Seen in static graphs of both Paddles.
_SENDS_NOTHING: tuple[KnobValue, str] = (
    True,
    "with it Paddle sends no gradients at all, and ranks diverge without an error",
)

TABLE: tuple[Field, ...] = (
    # Communication.
    _on(
        "fuse_all_reduce_ops",
        "Send many gradients in one allreduce instead of one each.",
        default=True,
    ),
    Field(
        "fuse_grad_size_in_MB",
        STRATEGY,
        "int",
        "Most bytes of gradients in one allreduce.",
        default=32,
        unit="MB",
        minimum=1,
        maximum=65536,
        auto="a tenth of the bytes of all gradients, at least 1 MB",
        plan="what ends the step soonest, from times that the first steps measure; else as auto",
    ),
    _whole("fuse_grad_size_in_num", "Most gradients in one allreduce.", 8, "gradients"),
    Field(
        "fuse_grad_size_in_TFLOPS",
        STRATEGY,
        "float",
        "Most layers (gradients) in one allreduce, whatever its name says.",
        default=50.0,
        unit="gradients",
        minimum=1,
        aliases=("_fuse_grad_size_in_TFLOPS",),
    ),
    Field(
        "last_comm_group_size_MB",
        STRATEGY,
        "float",
        "Most bytes in the allreduce that goes out last, for which backward must wait.",
        default=1.0,
        unit="MB",
        minimum=0,
    ),
    Field(
        "nccl_comm_num",
        STRATEGY,
        "int",
        "Communicators that allreduces take in turn, so that several run at once.",
        default=1,
        unit="communicators",
        minimum=1,
        maximum=16,
        auto="1 on one host, 2 on several",
    ),
    _on(
        "sync_nccl_allreduce",
        "Wait for each allreduce before the next one is sent.",
        default=True,
    ),
    _on(
        "use_hierarchical_allreduce",
        "Reduce within each group, allreduce among the groups' leaders, and broadcast.",
        auto="on where that is measured to be faster, with several hosts of several ranks",
    ),
    Field(
        "hierarchical_allreduce_inter_nranks",
        STRATEGY,
        "int",
        "Ranks of one group of the hierarchical allreduce, usually the devices of a host.",
        default=1,
        unit="ranks",
        minimum=1,
        auto="the ranks of each host",
    ),
    _on(
        "calc_comm_same_stream",
        "Compute and communicate in one stream.",
        aliases=("_calc_comm_same_stream",),
    ),
    _on("fp16_allreduce", "Send gradients as float16, in dygraph; Paddle's own sends nothing."),
    _on(
        "bf16_allreduce",
        "Send gradients as bfloat16, in dygraph: the range of float32 with fewer digits.",
        is_own=True,
    ),
    _on("find_unused_parameters", "Look for parameters that a step does not use."),
    _on(
        "without_graph_optimization",
        "Leave Paddle's graph executor out, and rewrite the program for communication.",
        default=True,
        refused=(False, _SENDS_NOTHING[1]),
    ),
    _on("heter_ccl_mode", "Communicate between clusters of different devices."),
    _on("split_data", "Give each rank its part of the data.", default=True),
    # Gradient merge.
    _on("gradient_merge", "Add gradients up over several steps before one update."),
    _configs(
        "gradient_merge_configs",
        "How gradients are merged.",
        _whole("k_steps", "Steps whose gradients make one update.", 1, "steps"),
        _on("avg", "Divide the sum by k_steps.", default=True),
    ),
    _on("fuse_grad_merge", "Merge gradients in fused memory."),
    _configs(
        "gradient_scale_configs",
        "How the loss's gradient is scaled.",
        Field(
            "scale_strategy",
            STRATEGY,
            "choice",
            "What gradients of the ranks become.",
            default="avg",
            words=("avg", "sum", "customized"),
        ),
        _on("scale_gradient", "Scale gradients instead of the loss."),
    ),
    # Mixed precision, and memory for time.
    _on("amp", "Compute with 16-bit numbers where it is safe."),
    _configs(
        "amp_configs",
        "How 16-bit numbers are used.",
        _real("init_loss_scaling", "First factor of the loss.", 32768.0),
        _whole("incr_every_n_steps", "Good steps before the factor grows.", 1000, "steps"),
        _whole("decr_every_n_nan_or_inf", "Bad steps before the factor shrinks.", 2, "steps"),
        _real("incr_ratio", "What the factor grows by.", 2.0),
        _real("decr_ratio", "What the factor shrinks by.", 0.8),
        _on("use_dynamic_loss_scaling", "Let the factor change.", default=True),
        _list("custom_white_list", "texts", "Operators that always use 16 bits."),
        _list("custom_black_list", "texts", "Operators that never do."),
        _list("custom_black_varnames", "texts", "Variables that never do."),
        _on("use_pure_fp16", "Use 16-bit floats everywhere (O2)."),
        _on("use_fp16_guard", "Only where the program asks for it (O2).", default=True),
        _on("use_optimizer_fp16", "In the optimizer, too."),
        _on("use_pure_bf16", "Use bfloat16 everywhere (O2)."),
    ),
    _on("recompute", "Forget activations and compute them again in backward."),
    _configs(
        "recompute_configs",
        "What is kept.",
        _list("checkpoints", "texts", "Names of the activations that are kept."),
        _on("enable_offload", "Keep them in the host's memory."),
        _list("checkpoint_shape", "ints", "Their shape, which offloading needs."),
        _on("enable_tuning", "Let Paddle choose."),
    ),
    # Optimizers.
    _on("lars", "Scale each layer's learning rate (LARS), for Momentum and large batches."),
    _configs(
        "lars_configs",
        "How LARS scales.",
        _real("lars_coeff", "Trust in each layer's own rate.", 0.001),
        _real("lars_weight_decay", "Weight decay.", 0.0005),
        _real("epsilon", "Added to a divisor that may be 0.", 0.0),
        _NO_WEIGHT_DECAY,
    ),
    _on("lamb", "Scale each layer's learning rate (LAMB), for Adam and large batches."),
    _configs(
        "lamb_configs",
        "How LAMB scales.",
        _real("lamb_weight_decay", "Weight decay.", 0.01),
        _NO_WEIGHT_DECAY,
    ),
    _on("localsgd", "Let ranks train alone for some steps, then average their parameters."),
    _configs(
        "localsgd_configs",
        "When parameters are averaged.",
        _whole("k_steps", "Steps between two averages.", 1, "steps"),
        _whole("begin_step", "The first step that is not averaged.", 1, "steps"),
    ),
    _on("adaptive_localsgd", "The same, with a number of steps that adapts itself."),
    _configs(
        "adaptive_localsgd_configs",
        "When parameters are averaged at first.",
        _whole("init_k_steps", "Steps between the first two averages.", 1, "steps"),
        _whole("begin_step", "The first step that is not averaged.", 1, "steps"),
    ),
    _on("dgc", "Send only the largest gradients (DGC), for Momentum on GPUs."),
    _configs(
        "dgc_configs",
        "How many gradients are sent.",
        _whole("rampup_begin_step", "The first step that sends less.", 0, "steps", minimum=0),
        _whole("rampup_step", "Steps until the last of `sparsity`.", 1, "steps"),
        _list(
            "sparsity", "floats", "Shares of the gradients that are not sent, one after another."
        ),
    ),
    _on("adam_d2sum", "Adam with the sum of squares of all ranks."),
    # Normalisation and kernels.
    _on("sync_batch_norm", "Normalise over the batches of all ranks."),
    _on("cudnn_exhaustive_search", "Try all of cuDNN's convolutions and keep the fastest."),
    Field(
        "conv_workspace_size_limit",
        STRATEGY,
        "int",
        "Memory that one convolution may use to be faster.",
        default=512,
        unit="MB",
        minimum=0,
        aliases=("cudnn_conv_workspace_size_limit",),
    ),
    _on("cudnn_batchnorm_spatial_persistent", "cuDNN's faster batch normalisation."),
    # Models over several devices.
    _on("sharding", "Share optimizer states, gradients or parameters out over the ranks."),
    _configs(
        "sharding_configs",
        "How they are shared out.",
        Field(
            "sharding_segment_strategy",
            STRATEGY,
            "choice",
            "What cuts the program into segments.",
            default="segment_broadcast_MB",
            words=("segment_broadcast_MB", "segment_anchors"),
        ),
        _real("segment_broadcast_MB", "Size of a segment's parameters in MB.", 32.0),
        _list("segment_anchors", "texts", "Variables at which segments end."),
        _whole("sharding_degree", "Ranks that share one copy.", 8, "ranks"),
        _whole("mp_degree", "Ranks of model parallelism.", 1, "ranks"),
        _whole("dp_degree", "Ranks of data parallelism.", 1, "ranks"),
        _whole("pp_degree", "Ranks of pipeline parallelism.", 1, "ranks"),
        _on("hybrid_dp", "Data parallelism between the groups that share."),
        _whole("gradient_merge_acc_step", "Steps whose gradients are merged.", 1, "steps"),
        _on("optimize_offload", "Keep optimizer states in the host's memory."),
        _on("optimize_cast", "Cast in the optimizer."),
        _on("pp_allreduce_in_optimize", "Send a pipeline's gradients in the optimizer."),
        _on("_dp_as_optimizer_sharding", "Share optimizer states over data-parallel ranks."),
        _whole("stage", "1: optimizer states, 2: and gradients, 3: and parameters.", 1),
        _on("enable_tuning", "Let Paddle choose."),
        _on("use_calc_stream", "Communicate in the stream that computes."),
    ),
    _on("pipeline", "Cut the model into stages on several devices."),
    _configs(
        "pipeline_configs",
        "How batches go through the stages.",
        _whole("micro_batch_size", "Samples in one micro-batch.", 1, "samples"),
        _whole("accumulate_steps", "Micro-batches of one step.", 1),
        Field(
            "schedule_mode",
            STRATEGY,
            "choice",
            "Order of forward and backward.",
            default="1F1B",
            words=("1F1B", "F-then-B"),
        ),
        _on("p2p_cache_shape", "Send shapes only once.", default=True),
        _on("enable_partial_send_recv", "Send parts of activations.", default=True),
    ),
    _on("tensor_parallel", "Cut layers over several devices."),
    _configs(
        "tensor_parallel_configs",
        "How layers are cut.",
        _whole("tensor_parallel_degree", "Ranks of one layer.", 1, "ranks"),
        _whole("tensor_init_seed", "Seed of the parameters; -1: any.", -1, minimum=-1),
    ),
    _configs(
        "hybrid_configs",
        "Ranks of each kind of parallelism.",
        _whole("dp_degree", "Data parallelism; -1: what the others leave.", -1, minimum=-1),
        _whole("mp_degree", "Model parallelism.", 1, "ranks"),
        _whole("pp_degree", "Pipeline parallelism.", 1, "ranks"),
        _whole("sharding_degree", "Sharding.", 1, "ranks"),
        _whole("sep_degree", "Sequences.", 1, "ranks"),
    ),
    # Parameter servers.
    _on("a_sync", "Let trainers go on without waiting for the parameter servers.", default=True),
    _configs(
        "a_sync_configs",
        "How trainers and servers keep in touch.",
        _whole("k_steps", "Steps between two exchanges; -1: as a_sync has it.", -1, minimum=-1),
        _whole("max_merge_var_num", "Gradients that are merged before they are sent.", 1),
        _whole("send_queue_size", "Gradients that wait to be sent.", 16),
        _on("independent_recv_thread", "Receive in a thread of its own."),
        _whole("min_send_grad_num_before_recv", "Gradients sent before anything is received.", 1),
        _whole("thread_pool_size", "Threads that send and receive.", 1, "threads"),
        _whole("send_wait_times", "Turns to wait for more to send.", 1),
        _on("runtime_split_send_recv", "Cut sending up while running."),
        _on("launch_barrier", "Wait for everybody before the first step.", default=True),
        Field(
            "heter_worker_device_guard",
            STRATEGY,
            "choice",
            "Where heterogeneous trainers compute.",
            default="cpu",
            words=("cpu", "gpu", "xpu"),
        ),
        _whole("lr_decay_steps", "Steps between two changes of the learning rate.", 10, "steps"),
        _whole("use_ps_gpu", "1: keep tables on GPUs.", 0, minimum=0),
    ),
    _on("is_fl_ps_mode", "Federated training."),
    _on(
        "with_coordinator", "A coordinator of federated training.", aliases=("is_with_coordinator",)
    ),
    # What Paddle keeps for its own use.
    _on("elastic", "Go on when hosts come and go; fleetrun has its own."),
    _on("auto", "Let Paddle choose a strategy."),
    _on("semi_auto", "Cut the model up as its annotations say."),
    _on("auto_search", "Look for a way to cut the model up."),
    _on("asp", "Train with half of the weights at 0 (2:4 sparsity).", refused=_SENDS_NOTHING),
    _on("qat", "Train for a quantized model.", refused=_SENDS_NOTHING),
    _configs(
        "qat_configs",
        "How it is quantized.",
        _on("channel_wise_abs_max", "One scale for each channel.", default=True),
        _whole("weight_bits", "Bits of a weight.", 8, "bits"),
        _whole("activation_bits", "Bits of an activation.", 8, "bits"),
        _list("not_quant_pattern", "texts", "Layers that are left alone."),
        _text("algo", "Paddle's name of the algorithm."),
    ),
    # The graph of a static program.
    _build("fuse_elewise_add_act_ops", "Add and activate in one operator."),
    _build("fuse_all_optimizer_ops", "Update all parameters in one operator (Momentum, Adam)."),
    _build("fuse_bn_act_ops", "Batch normalisation and activation in one operator."),
    _build(
        "fuse_bn_add_act_ops",
        "Batch normalisation, sum and activation in one operator.",
        default=True,
    ),
    _build("fuse_relu_depthwise_conv", "ReLU and depthwise convolution in one operator."),
    _build("fuse_broadcast_ops", "Broadcast many parameters at once."),
    _build("fuse_gemm_epilogue", "Matrix product, bias and activation in one operator."),
    _build("fused_attention", "Attention in one operator."),
    _build("fused_feedforward", "A feed-forward block in one operator."),
    _build(
        "fuse_dot_product_attention", "Dot products of attention in one operator.", only="3.3.1"
    ),
    _build("fuse_resunit", "A residual unit in one operator.", only="3.3.1"),
    _build("enable_inplace", "Let operators write over what they read."),
    _build("enable_addto", "Add gradients up in place."),
    _build(
        "enable_backward_optimizer_op_deps",
        "Update when all of backward is done.",
        default=True,
    )._replace(aliases=("bwd_opt_deps",)),
    _build("enable_auto_fusion", "Generate fused operators."),
    _build("enable_sequential_execution", "Run operators in the program's order.", only="2.6.2"),
    _build("fix_op_run_order", "Run operators in the same order each step.", only="2.6.2"),
    _build("cache_runtime_context", "Keep each operator's context."),
    _build("allow_cuda_graph_capture", "Let the graph be captured."),
    Field(
        "reduce_strategy",
        BUILD,
        "int",
        "0: allreduce gradients, 1: reduce each on one rank.",
        default=0,
        minimum=0,
        maximum=1,
    ),
    Field("debug_graphviz_path", BUILD, "text", "File that the graph is drawn into.", default=""),
    # How a static program is run.
    Field(
        "num_threads",
        EXECUTION,
        "int",
        "Threads that run operators.",
        default=1,
        unit="threads",
        minimum=1,
        auto="1 on one host, nccl_comm_num + 1 on several",
        aliases=("thread_num",),
        only="2.6.2",
    ),
    Field(
        "num_iteration_per_drop_scope",
        EXECUTION,
        "int",
        "Steps between two clean-ups of temporary variables.",
        default=10,
        unit="steps",
        minimum=1,
        only="2.6.2",
    ),
    Field(
        "num_iteration_per_run",
        EXECUTION,
        "int",
        "Steps of one call of the executor.",
        default=1,
        unit="steps",
        minimum=1,
        only="2.6.2",
    ),
    Field(
        "use_thread_barrier",
        EXECUTION,
        "bool",
        "Let the threads of parameter servers wait for each other.",
        only="2.6.2",
    ),
)


def by_name(section: str, table: Iterable[Field] = TABLE) -> dict[str, Field]:
    """Map what may be written under SECTION to its field; `strategy` takes those of the others.

    >>> by_name("strategy")["thread_num"].section
    'execution_strategy'
    """
    return {
        spelling: field
        for field in table
        if section in (field.section, STRATEGY)
        for spelling in (field.name, *field.aliases)
    }


def find(section: str, name: str) -> Field:
    """Return the field NAME of SECTION, dotted for a key of its configs.

    >>> find("strategy", "gradient_merge_configs.k_steps").unit
    'steps'
    """
    first, _, key = name.partition(".")
    field = next(one for one in TABLE if one.section == section and one.name == first)
    return next(one for one in field.keys if one.name == key) if key else field


def wanted(field: Field) -> str:
    """Return what FIELD takes, for an error message.

    >>> wanted(find("strategy", "fuse_grad_size_in_MB"))
    'give a whole number of MB from 1 to 65536, auto or plan'
    """
    match field.kind:
        case "bool":
            said = "give true or false"
        case "int" | "float":
            said = "give " + conversion.number_in_words(
                is_whole=field.kind == "int",
                minimum=field.minimum,
                maximum=field.maximum,
                unit=field.unit,
            )
        case "choice":
            said = f"give one of {', '.join(field.words)}"
        case "ints" | "floats":
            said = "give a list of " + ("whole numbers" if field.kind == "ints" else "numbers")
        case "texts":
            said = "give a list of words"
        case "configs":
            said = f"give a mapping with {', '.join(key.name for key in field.keys)}"
        case _:
            said = "give a word"
    words = special_values(field)
    return said if not words else f"{said}, {'or auto' if len(words) == 1 else 'auto or plan'}"


def special_values(field: Field) -> tuple[str, ...]:
    """Return the words that stand for a value of FIELD that is found out later.

    >>> special_values(find("strategy", "nccl_comm_num"))
    ('auto',)
    """
    known = ((AUTO, field.auto), (PLAN, field.plan))
    return tuple(word for word, meaning in known if meaning)


def convert(field: Field, value: object) -> KnobValue:
    """Return VALUE as FIELD's type if nothing is lost by it; ValueError with what is wanted.

    >>> convert(find("strategy", "fuse_grad_size_in_MB"), 16.0)
    16
    >>> convert(find("strategy", "gradient_merge"), 1)
    True
    """
    if isinstance(value, str) and value in special_values(field):
        return value
    items = _ITEMS.get(field.kind)
    given = list(value) if items and isinstance(value, list | tuple) else [value]
    found = [_single(field, items or field.kind, each) for each in given]
    known = tuple(each for each in found if each is not None)
    if len(known) < len(found):
        raise ValueError(wanted(field))
    return known if items else known[0]


def _single(field: Field, kind: str, value: object) -> bool | int | float | str | None:
    """Return VALUE as KIND within FIELD's bounds; None if it is none."""
    match kind:
        case "bool":
            return conversion.boolean(value)
        case "int" | "float":
            maximum = _LARGEST_INT if field.maximum is None else field.maximum
            return conversion.number(
                value, is_whole=kind == "int", minimum=field.minimum, maximum=maximum
            )
        case "choice":
            return value if isinstance(value, str) and value in field.words else None
        case "text":
            is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
            return str(value) if is_plain else None
        case _:
            return None
