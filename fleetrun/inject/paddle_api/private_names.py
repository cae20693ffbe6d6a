"""The private and undocumented names of Paddle that we use: where each is, and what it is for.

A test holds the table to what the modules of `inject` spell. A name belongs to one capability or
several: what we do only if all of its names are there. Whoever uses a name of no capability does
without it. `check` compares the table with the Paddle at hand.
"""

from __future__ import annotations

from typing import NamedTuple

# The versions that all tests run with. Others are used if they pass the checks.
TESTED = ("2.6.2", "3.3.1")

COUNTING = "counting of updates"
STRATEGY = "strategy in fleet"
GROUPS = "stores of groups"
BACKWARD = "watching of backwards"
REDUCER = "gradient reducer"
SPARSE = "sparse gradients"
MERGE = "gradient merge"
FUSED = "fused updates"
AMP = "counting of precisions"
STATIC = "passes over programs"
STATIC_CPU = "static programs on CPUs"
SERVERS = "counting of parameter servers"
CHECK = "comparison of ranks"
LOSSES = "losses of steps"
ARGUMENTS = "arguments of DataParallel"

# What happens without each capability, as a clause for the user.
FALLBACKS = {
    COUNTING: "updates are not counted, and nothing is known of what took effect",
    STRATEGY: "fleet gets the strategy of the script only",
    GROUPS: "all groups share Paddle's store",
    BACKWARD: "updates that no optimizer of Paddle's makes are not seen",
    REDUCER: "Paddle's own reducer averages the gradients",
    SPARSE: "Paddle's own reducer averages the gradients of models with sparse ones",
    MERGE: "each step updates the parameters",
    FUSED: "Paddle updates the parameters in its own way",
    AMP: "the precision of operators is not counted",
    STATIC: "static programs stay as Paddle writes them, and nothing is counted in them",
    STATIC_CPU: "static programs are connected by Paddle alone",
    SERVERS: "what is sent to parameter servers is not counted",
    CHECK: "the ranks are not compared",
    LOSSES: "the losses of steps are not recorded",
    ARGUMENTS: "DataParallel gets the arguments of the script only",
}
# A capability fails with those that it builds on.
BUILDS_ON = {
    BACKWARD: (COUNTING,),
    MERGE: (COUNTING, REDUCER),
    SPARSE: (REDUCER,),
    STATIC_CPU: (STATIC,),
    CHECK: (COUNTING,),
    FUSED: (COUNTING,),
}


class PrivateName(NamedTuple):
    """A name in a module of Paddle, by its attributes from there on."""

    module: str
    # `a|b`: either, as an attribute was renamed.
    path: str
    capabilities: tuple[str, ...]
    used_for: str
    # The first parameters of a function in Python; None: any.
    parameters: tuple[str, ...] | None = None
    # Attributes that the function sets or reads, and that we use.
    attributes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


_CORE, _FRAMEWORK = "paddle.base.core", "paddle.base.framework"
_DISTRIBUTED = "paddle.distributed"
_FLEET = f"{_DISTRIBUTED}.fleet"
_STRATEGY_FILE = f"{_FLEET}.base.distributed_strategy"
_META = f"{_FLEET}.meta_optimizers"
_BUFFERS = (REDUCER,)
_LOSS = ("self", "loss", "startup_program")

NAMES = (
    # Backward and gradients.
    PrivateName(
        _CORE, "eager.run_backward", (BACKWARD, REDUCER, MERGE, SPARSE), "every backward calls it"
    ),
    PrivateName(
        _CORE,
        "eager._add_backward_final_hook",
        (BACKWARD, REDUCER),
        "what Paddle does at the end of a backward is to wait until gradients are averaged",
    ),
    PrivateName(
        _CORE,
        "eager.Tensor._register_backward_hook",
        (REDUCER, MERGE),
        "tells that the gradient of a parameter was accumulated",
    ),
    PrivateName(
        _CORE, "eager.get_all_grads", (BACKWARD, REDUCER), "reads many gradients in one call"
    ),
    PrivateName(_CORE, "eager.set_master_grads", _BUFFERS, "makes gradients of one bucket float32"),
    PrivateName(
        _FRAMEWORK,
        "EagerParamBase.from_tensor",
        (REDUCER, MERGE, SPARSE),
        "makes the parameters of the self-tests",
    ),
    PrivateName(
        _FRAMEWORK, "EagerParamBase.__init__", (BACKWARD,), "makes each parameter", ("self",)
    ),
    PrivateName(
        _CORE, "eager.Tensor._grad_ivar", _BUFFERS, "reads the gradient of a frozen parameter"
    ),
    PrivateName(
        _CORE,
        "eager.Tensor._set_grad_ivar",
        _BUFFERS,
        "gives a parameter the gradient of other ranks",
    ),
    PrivateName(
        _CORE,
        "eager.Tensor._unset_fake_empty",
        _BUFFERS,
        "lets a backward add to a gradient that was cleared, in its memory",
    ),
    PrivateName(
        _CORE, "eager.Tensor._share_buffer_to", _BUFFERS, "makes a gradient a view of a buffer"
    ),
    PrivateName(
        _CORE, "DenseTensor|LoDTensor._slice", _BUFFERS, "makes a view of a part of a buffer"
    ),
    PrivateName(
        _CORE, "eager.Tensor.get_tensor", (REDUCER, SPARSE), "the dense tensor without autograd"
    ),
    PrivateName(
        _CORE, "DenseTensor|LoDTensor._set_dims", _BUFFERS, "gives a view the shape of its gradient"
    ),
    PrivateName(
        _CORE,
        "eager.Tensor.data_ptr",
        (BACKWARD, REDUCER, MERGE, CHECK),
        "tells whether a tensor was replaced",
    ),
    PrivateName(
        _CORE,
        "eager.Tensor.inplace_version",
        (BACKWARD, MERGE, CHECK),
        "tells whether a tensor was written to",
    ),
    PrivateName(
        _CORE, "eager.Tensor.is_contiguous", _BUFFERS, "tells a gradient with another layout"
    ),
    PrivateName(_CORE, "eager.Tensor.contiguous", _BUFFERS, "gives it row-major layout"),
    PrivateName(_CORE, "eager.Tensor.is_selected_rows", (SPARSE, MERGE, FUSED), "sparse or dense"),
    PrivateName(_CORE, "eager.Tensor.rows", (SPARSE,), "the rows of a sparse gradient"),
    PrivateName(
        _CORE, "eager.Tensor.get_selected_rows", (SPARSE, MERGE), "the values of a sparse gradient"
    ),
    PrivateName(_CORE, "SelectedRows.set_rows", (SPARSE,), "sets the rows of a sparse gradient"),
    PrivateName(
        _CORE, "SelectedRows.get_tensor", (SPARSE, MERGE), "the values of a sparse gradient"
    ),
    PrivateName(
        _CORE,
        "DenseTensor|LoDTensor._share_data_with",
        (SPARSE,),
        "sets the values of a sparse gradient",
    ),
    PrivateName(
        "paddle.nn.layer.common",
        "Embedding.__init__",
        _BUFFERS,
        "tells the parameters with sparse gradients",
        attributes=("_sparse",),
    ),
    PrivateName(
        _CORE,
        "eager.Tensor.grad",
        (REDUCER, MERGE, CHECK),
        "a gradient; what the script assigns to it is noticed",
    ),
    PrivateName(_CORE, "eager.Tensor.clear_gradient", (MERGE,), "does not discard what is merged"),
    PrivateName(
        "paddle.nn.layer.layers",
        "Layer._to_impl",
        _BUFFERS,
        "tells that a layer is cast",
        ("self",),
    ),
    PrivateName("paddle", "_C_ops.coalesce_tensor", _BUFFERS, "copies gradients into a buffer"),
    PrivateName(_CORE, "_get_registered_phi_kernels", _BUFFERS, "tells whether a device has that"),
    # Data parallel models and communicators.
    PrivateName(
        f"{_DISTRIBUTED}.parallel",
        "DataParallel.__init__",
        (REDUCER, CHECK, ARGUMENTS),
        "records the arguments; makes the reducer, by the attributes",
        (
            "self",
            "layers",
            "strategy",
            "comm_buffer_size",
            "last_comm_buffer_size",
            "find_unused_parameters",
            "group",
        ),
        (
            "comm_buffer_size",
            "last_comm_buffer_size",
            "find_unused_parameters",
            "grad_need_sync",
            "group",
            "init_reducer",
        ),
    ),
    PrivateName(
        f"{_DISTRIBUTED}.parallel",
        "DataParallel.init_reducer",
        _BUFFERS,
        "ours takes the place of Paddle's reducer here",
        ("self",),
        ("_reducer", "group_indices", "no_sync"),
    ),
    PrivateName(
        f"{_DISTRIBUTED}.parallel",
        "DataParallel.forward",
        (REDUCER, CHECK),
        "tells that a backward will come",
        ("self",),
        ("_reducer", "grad_need_sync", "prepare_for_backward"),
    ),
    PrivateName(_CORE, "eager_assign_group_by_size", _BUFFERS, "Paddle's buckets, to compare with"),
    PrivateName(
        f"{_DISTRIBUTED}.collective",
        "_new_process_group_impl",
        (REDUCER, GROUPS),
        "makes a communicator of each backend",
        ("backend", "store", "rank", "world_size", "group_name", "pg_options", "group_id"),
    ),
    PrivateName(f"{_DISTRIBUTED}.collective", "_get_global_env", _BUFFERS, "this rank's number"),
    PrivateName(f"{_DISTRIBUTED}.collective", "_default_store", _BUFFERS, "the job's store"),
    PrivateName(f"{_DISTRIBUTED}.collective", "_default_backend", _BUFFERS, "gloo, nccl, ..."),
    PrivateName(_CORE, "ReduceOp.SUM", _BUFFERS, "what the collectives of a ProcessGroup do"),
    PrivateName(_CORE, "ProcessGroup.all_reduce", _BUFFERS, "sums a bucket"),
    PrivateName(_CORE, "ProcessGroup.reduce", _BUFFERS, "the first level of a hierarchical sum"),
    PrivateName(_CORE, "ProcessGroup.broadcast", _BUFFERS, "the last level of it"),
    PrivateName(_CORE, "ProcessGroup.all_gather", (SPARSE, CHECK), "gathers rows and checksums"),
    PrivateName(
        f"{_DISTRIBUTED}.communication.group",
        "Group.process_group",
        _BUFFERS,
        "the communicator of a group",
    ),
    PrivateName(
        f"{_DISTRIBUTED}.communication.stream",
        "all_reduce",
        (MERGE,),
        "every allreduce of a script, or of Paddle's Python, calls it",
    ),
    PrivateName(_CORE, "create_or_get_global_tcp_store", (REDUCER, STATIC_CPU), "the job's store"),
    PrivateName(_CORE, "TCPStore", (REDUCER, GROUPS), "the store of one group"),
    # Optimizers.
    PrivateName(
        "paddle.optimizer.optimizer",
        "Optimizer.__init__",
        (COUNTING, MERGE, CHECK),
        "the parameters and the schedule of an optimizer",
        ("self", "learning_rate", "parameters"),
        ("_parameter_list", "_param_groups", "_learning_rate"),
    ),
    PrivateName(
        "paddle.optimizer.optimizer", "Optimizer.step", (COUNTING, MERGE), "an update", ("self",)
    ),
    PrivateName(
        "paddle.optimizer.optimizer",
        "Optimizer.minimize",
        (COUNTING, MERGE),
        "an update, too",
        _LOSS,
    ),
    PrivateName(
        "paddle.optimizer.optimizer",
        "Optimizer._apply_optimize",
        (COUNTING,),
        "an update, as sharding optimizers make it",
        _LOSS,
    ),
    PrivateName(
        f"{_DISTRIBUTED}.auto_parallel.api",
        "_ShardOptimizer",
        (),
        "is no optimizer in Paddle 2, but has one",
    ),
    PrivateName(
        "paddle.amp.grad_scaler",
        "AmpScaler._update",
        (),
        "tells whether an update was skipped, by the name of Paddle 3 or 2",
        ("self",),
        ("_cache_found_inf", "_cache_founf_inf"),
    ),
    PrivateName(
        "paddle.optimizer.optimizer",
        "Optimizer.clear_grad",
        (MERGE,),
        "does not discard what is merged",
        ("self",),
    ),
    PrivateName(
        "paddle.base.dygraph.base",
        "in_to_static_mode",
        (COUNTING,),
        "tells where `step` only writes a program",
        (),
    ),
    PrivateName(
        "paddle.optimizer.lr", "LRScheduler.step", (MERGE, STATIC), "is merged, too", ("self",)
    ),
    PrivateName(
        "paddle.amp.grad_scaler",
        "AmpScaler.minimize",
        (MERGE,),
        "an update",
        ("self", "optimizer"),
    ),
    PrivateName(
        "paddle.amp.grad_scaler",
        "AmpScaler._unscale",
        (MERGE,),
        "unscales merged gradients only",
        ("self", "optimizer"),
    ),
    PrivateName(
        "paddle.amp.grad_scaler", "GradScaler.step", (MERGE,), "an update", ("self", "optimizer")
    ),
    PrivateName(
        "paddle.amp.grad_scaler", "GradScaler.update", (MERGE,), "comes with an update", ("self",)
    ),
    PrivateName("paddle.amp.grad_scaler", "AmpScaler.scale", (AMP,), "a loss is scaled", ("self",)),
    PrivateName(_CORE, "get_low_precision_op_list", (AMP,), "Paddle's counts of operators"),
    PrivateName(
        "paddle.nn.utils", "clip_grad_norm_", (MERGE,), "clips merged gradients", ("parameters",)
    ),
    PrivateName(
        "paddle.nn.layer.layers",
        "Layer.clear_gradients",
        (MERGE,),
        "does not discard what is merged",
        ("self",),
    ),
    PrivateName(
        "paddle.io.reader", "DataLoader.__iter__", (MERGE,), "its end ends a round", ("self",)
    ),
    PrivateName(
        "paddle.optimizer.momentum",
        "Momentum._create_optimization_pass",
        (FUSED,),
        "is about to update",
        ("self", "parameters_and_grads"),
        ("_use_multi_tensor", "_param_dict"),
    ),
    PrivateName(
        "paddle.optimizer.adam",
        "Adam._create_optimization_pass",
        (FUSED,),
        "is about to update",
        ("self", "parameters_and_grads"),
        ("_use_multi_tensor", "_param_dict"),
    ),
    PrivateName(
        "paddle.optimizer.momentum",
        "Momentum._create_multi_tensor_dict",
        (FUSED,),
        "makes the tables of fused updates",
        ("self",),
    ),
    PrivateName(
        "paddle.optimizer.momentum",
        "Momentum._multi_tensor_init",
        (FUSED,),
        "fills the tables of fused updates",
        attributes=(
            "_velocity_dict",
            "_master_weight_dict",
            "_regularization_method_dict",
            "_regularization_coeff_dict",
        ),
    ),
    PrivateName(
        "paddle.optimizer.adam",
        "Adam._multi_tensor_init",
        (FUSED,),
        "fills the tables of fused updates",
        attributes=("_moment1_dict", "_moment2_dict", "_beta1_pow_acc_dict", "_beta2_pow_acc_dict"),
    ),
    PrivateName(
        "paddle.optimizer.adam",
        "Adam.__init__",
        (),
        "AMSGrad, which Paddle 3 has, is not fused",
        attributes=("_amsgrad", "_moment2_max_dict"),
    ),
    PrivateName(
        f"{_META}.dygraph_optimizer.hybrid_parallel_optimizer",
        "HybridParallelOptimizer.__init__",
        (MERGE,),
        "the script's optimizer inside fleet's",
        attributes=("_inner_opt",),
    ),
    PrivateName(
        "paddle.optimizer.momentum", "_C_ops.merged_momentum_", (FUSED,), "one call updates many"
    ),
    PrivateName("paddle.optimizer.momentum", "_C_ops.momentum_", (FUSED,), "updates one"),
    PrivateName("paddle.optimizer.adam", "_C_ops.merged_adam_", (FUSED,), "one call updates many"),
    PrivateName("paddle.optimizer.adam", "_C_ops.adam_", (FUSED,), "updates one"),
    PrivateName("paddle", "Tensor.backward", (LOSSES,), "begins at a loss", ("self",)),
    # Fleet and its strategy.
    PrivateName(
        _STRATEGY_FILE,
        "DistributedStrategy.__init__",
        (STRATEGY,),
        "a new strategy gets our values",
        ("self",),
        ("strategy",),
    ),
    PrivateName(
        _STRATEGY_FILE,
        "DistributedStrategy.__setattr__",
        (STRATEGY,),
        "records what the script sets",
        ("self",),
    ),
    PrivateName(
        _STRATEGY_FILE,
        "DistributedStrategy.load_from_prototxt",
        (STRATEGY,),
        "records what the script loads",
        ("self", "pb_file"),
    ),
    PrivateName(
        _STRATEGY_FILE,
        "DistributedStrategy.build_strategy",
        (STRATEGY,),
        "records what the script changes in it",
    ),
    PrivateName(
        _STRATEGY_FILE,
        "DistributedStrategy._fuse_grad_size_in_TFLOPS",
        (),
        "its documented name is without effect",
    ),
    PrivateName(
        _STRATEGY_FILE,
        "DistributedStrategy._calc_comm_same_stream",
        (),
        "its documented name is without effect",
    ),
    PrivateName(
        f"{_FLEET}.fleet",
        "Fleet.get_hybrid_communicate_group",
        (),
        "the sizes of the script's groups; the function itself raises where there are none",
        attributes=("_hcg",),
    ),
    PrivateName(
        _STRATEGY_FILE, "non_auto_func_called", (STRATEGY,), "true once anything was assigned"
    ),
    PrivateName(
        f"{_FLEET}.fleet",
        "Fleet.init",
        (STRATEGY,),
        "takes a strategy",
        ("self", "role_maker", "is_collective", "strategy"),
    ),
    PrivateName(
        f"{_FLEET}.fleet",
        "Fleet.distributed_optimizer",
        (STRATEGY,),
        "takes a strategy",
        ("self", "optimizer", "strategy"),
    ),
    PrivateName(
        f"{_FLEET}.optimizer",
        "_dygraph_distributed_optimizer",
        (STRATEGY,),
        "takes a strategy",
        ("optimizer", "strategy"),
    ),
    # Static programs.
    PrivateName(
        f"{_FLEET}.fleet",
        "Fleet._minimize_impl",
        (STATIC,),
        "has written a program when it returns",
        _LOSS,
        ("_role_maker",),
    ),
    PrivateName(
        f"{_META}.raw_program_optimizer",
        "RawProgramOptimizer.minimize_impl",
        (STATIC,),
        "would fuse allreduces",
        _LOSS,
        ("fuse_all_reduce_ops",),
    ),
    PrivateName(
        f"{_META}.raw_program_optimizer",
        "apply_build_strategy",
        (STATIC,),
        "runs Paddle's passes",
        ("main_program", "startup_program", "build_strategy", "pass_attrs"),
    ),
    PrivateName(
        "paddle.incubate.optimizer.gradient_merge",
        "GradientMergeOptimizer.backward",
        (STATIC,),
        "refuses the parameters that a loss is minimized for",
        ("self", "loss", "startup_program", "parameter_list", "no_grad_set", "callbacks"),
        ("inner_optimizer",),
    ),
    PrivateName(_CORE, "get_pass", (STATIC,), "tells whether this build has a pass"),
    PrivateName("paddle.static", "BuildStrategy._copy", (STATIC,), "a copy to switch passes off"),
    PrivateName(
        "paddle.base.executor",
        "_ExecutorCache._get_program_and_executor",
        (STATIC,),
        "gives the program that runs",
        ("self", "cached_data"),
    ),
    PrivateName(
        "paddle.base.executor",
        "Executor.run",
        (STATIC, SERVERS),
        "runs a program",
        ("self", "program"),
    ),
    PrivateName(
        "paddle.base.executor",
        "Executor.train_from_dataset",
        (SERVERS,),
        "runs a program many times",
        ("self", "program"),
    ),
    PrivateName(
        f"{_DISTRIBUTED}.communicator",
        "Communicator.start",
        (SERVERS,),
        "its settings are known then",
        ("self",),
    ),
    PrivateName(
        "paddle.base.compiler",
        "CompiledProgram.__init__",
        (STATIC,),
        "the program that was compiled",
        attributes=("_program",),
    ),
    PrivateName(_FRAMEWORK, "Variable", (STATIC,), "tells a variable of an older program"),
    PrivateName(
        "paddle.base.layer_helper", "LayerHelper", (STATIC,), "writes operators of older programs"
    ),
    PrivateName(_FRAMEWORK, "_dygraph_guard", (STATIC,), "programs are written outside the tracer"),
    PrivateName(
        _FRAMEWORK, "Block._find_var_recursive", (STATIC,), "finds a variable", ("self", "name")
    ),
    PrivateName(
        _FRAMEWORK,
        "Block._insert_op_without_sync",
        (STATIC,),
        "inserts an operator",
        ("self", "index"),
    ),
    PrivateName(
        _FRAMEWORK,
        "Block._remove_op",
        (STATIC,),
        "removes an operator",
        ("self", "index", "sync"),
    ),
    PrivateName(
        _FRAMEWORK,
        "Block._rename_var",
        (STATIC,),
        "renames a variable",
        ("self", "name", "new_name"),
    ),
    PrivateName(
        _FRAMEWORK, "Program._sync_with_cpp", (STATIC,), "ends a change of a program", ("self",)
    ),
    PrivateName(
        _FRAMEWORK,
        "Operator._block_attr_id",
        (STATIC,),
        "the block of a conditional operator",
        ("self", "name"),
    ),
    PrivateName(
        f"{_META}.common",
        "CollectiveHelper._init_communicator",
        (STATIC,),
        "connects the ranks of a ring",
        ("self", "program", "current_endpoint", "endpoints", "rank", "ring_id", "wait_port"),
    ),
    PrivateName(
        _CORE, "CommContextManager.create_gloo_comm_context", (STATIC_CPU,), "connects a ring"
    ),
    PrivateName(_CORE, "ProcessGroupGloo.create", (STATIC_CPU,), "connects a channel"),
    PrivateName(
        "paddle.static.nn.common", "PyFuncRegistry", (STATIC_CPU,), "a function as an operator"
    ),
    PrivateName("paddle.base.data_feeder", "convert_dtype", (STATIC_CPU,), "the name of a dtype"),
    PrivateName("paddle.base.dygraph", "guard", (STATIC_CPU,), "makes tensors beside a program"),
)
