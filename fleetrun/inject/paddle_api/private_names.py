"""The private and undocumented names of Paddle that fleetrun uses: where each is, and what for.

A test compares the table with what the modules of `inject` use. Each name belongs to one or more
capabilities, which need all of their names; code that uses a name of no capability copes without
it. `check` compares the table with the installed Paddle.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    COUNTING: "updates are not counted, so it is unknown what took effect",
    STRATEGY: "fleet gets only the script's strategy",
    GROUPS: "all groups share Paddle's store",
    BACKWARD: "updates by optimizers other than Paddle's are not detected",
    REDUCER: "Paddle's own reducer averages the gradients",
    SPARSE: "Paddle's own reducer averages the gradients of models with sparse ones",
    MERGE: "each step updates the parameters",
    FUSED: "Paddle updates the parameters in its own way",
    AMP: "the precision of operators is not counted",
    STATIC: "static programs stay as Paddle writes them, and nothing is counted in them",
    STATIC_CPU: "Paddle alone connects static programs",
    SERVERS: "what is sent to parameter servers is not counted",
    CHECK: "the ranks are not compared",
    LOSSES: "the losses of steps are not recorded",
    ARGUMENTS: "DataParallel gets only the script's arguments",
}
# A capability also fails with those that it builds on.
BUILDS_ON = {
    BACKWARD: (COUNTING,),
    MERGE: (COUNTING, REDUCER),
    SPARSE: (REDUCER,),
    STATIC_CPU: (STATIC,),
    CHECK: (COUNTING,),
    FUSED: (COUNTING,),
}
# A rank without one of these communicates differently from the others, which would wait for it.
COMMUNICATING = (
    *(STRATEGY, GROUPS, REDUCER, MERGE, ARGUMENTS),
    *(SPARSE, STATIC, STATIC_CPU, CHECK),
)


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


# Below each [module] its names, as `path(first parameters)  CAPABILITIES: what it is used for`; `-`
# is no capability, and `uses` lists attributes. Indented lines continue a row.
_TEXT = """
# Backward and gradients.
[paddle.base.core]
eager.run_backward  BACKWARD REDUCER MERGE SPARSE LOSSES: every backward calls it
eager._add_backward_final_hook  BACKWARD REDUCER: Paddle's hooks at the end of a backward wait
    until the gradients are averaged
eager.Tensor._register_backward_hook  REDUCER MERGE: shows that the gradient of a parameter was
    accumulated
eager.get_all_grads  BACKWARD REDUCER: reads many gradients in one call
eager.set_master_grads  REDUCER: makes gradients of one bucket float32
EagerReducer.prepare_for_backward  -: shows that Paddle's own reducer sums the gradients of a
    backward
[paddle.base.framework]
_dygraph_place_guard(place)  REDUCER CHECK: chooses where tensors are made
EagerParamBase.from_tensor  REDUCER MERGE SPARSE: makes the parameters of the self-tests
EagerParamBase.__init__(self)  BACKWARD: creates each parameter
EagerParamBase.__setattr__  REDUCER: shows that a parameter is frozen, or trained again
[paddle.base.core]
eager.Tensor._grad_ivar  REDUCER: reads the gradient of a frozen parameter
eager.Tensor._set_grad_ivar  REDUCER: gives a parameter the gradient of other ranks
eager.Tensor._unset_fake_empty  REDUCER: lets a backward add to a gradient that was cleared, in
    its memory
eager.Tensor._share_buffer_to  REDUCER: makes a gradient a view of a buffer
DenseTensor|LoDTensor._slice  REDUCER: makes a view of a part of a buffer
eager.Tensor.get_tensor  REDUCER SPARSE: the dense tensor without autograd
DenseTensor|LoDTensor._set_dims  REDUCER: gives a view the shape of its gradient
eager.Tensor.data_ptr  BACKWARD REDUCER MERGE CHECK: tells whether a tensor was replaced
eager.Tensor.inplace_version  BACKWARD MERGE CHECK: tells whether a tensor was written to
eager.Tensor.is_contiguous  REDUCER: recognizes a gradient with another layout
eager.Tensor.contiguous  REDUCER: gives it row-major layout
eager.Tensor.is_selected_rows  SPARSE MERGE FUSED: sparse or dense
eager.Tensor.rows  SPARSE: the rows of a sparse gradient
eager.Tensor.get_selected_rows  SPARSE MERGE: the values of a sparse gradient
SelectedRows.set_rows  SPARSE: sets the rows of a sparse gradient
SelectedRows.get_tensor  SPARSE MERGE: the values of a sparse gradient
DenseTensor|LoDTensor._share_data_with  SPARSE: sets the values of a sparse gradient
[paddle.nn.layer.common]
Embedding.__init__  REDUCER: finds the parameters with sparse gradients
    uses _sparse
[paddle.base.core]
eager.Tensor.grad  REDUCER MERGE CHECK: a gradient; assignments of the script are observed
eager.Tensor.clear_gradient  MERGE: keeps merged gradients
[paddle.nn.layer.layers]
Layer._to_impl(self)  REDUCER: shows that a layer is cast
[paddle]
_C_ops.coalesce_tensor  REDUCER: copies gradients into a buffer
[paddle.base.core]
_get_registered_phi_kernels  REDUCER: tells whether a device has `coalesce_tensor`
# Data parallel models and communicators.
[paddle.distributed.parallel]
DataParallel.__init__(self layers strategy comm_buffer_size last_comm_buffer_size
    find_unused_parameters group)  REDUCER CHECK ARGUMENTS: records the arguments; makes the
    reducer, by the attributes
    uses comm_buffer_size last_comm_buffer_size find_unused_parameters group init_reducer
DataParallel.init_reducer(self)  REDUCER: ours takes the place of Paddle's reducer here
    uses _reducer group_indices no_sync
DataParallel.no_sync  REDUCER: contains forwards that no synchronized backward follows
DataParallel.forward(self)  REDUCER CHECK: shows that a backward follows
    uses _reducer prepare_for_backward
[paddle.base.core]
eager_assign_group_by_size  REDUCER: Paddle's buckets, to compare with
[paddle.distributed.collective]
_new_process_group_impl(backend store rank world_size group_name pg_options group_id)  REDUCER
    GROUPS: makes a communicator of each backend
_get_global_env  REDUCER: this rank's number
_get_default_group  REDUCER: the group of all ranks
_default_store  REDUCER: the job's store
_default_backend  REDUCER: gloo, nccl, ...
[paddle.base.core]
ReduceOp.SUM  REDUCER: the operation of a ProcessGroup's collectives
ProcessGroup.all_reduce  REDUCER: sums a bucket
ProcessGroup.reduce  REDUCER: the first level of a hierarchical sum
ProcessGroup.broadcast  REDUCER: the last level of it
ProcessGroup.all_gather_into_tensor  SPARSE CHECK: gathers rows and checksums
[paddle.distributed.communication.group]
Group.process_group  REDUCER: the communicator of a group
[paddle.profiler.utils]
_has_optimizer_wrapped  -: keeps spans of optimizers out of a profile that begins within them
[paddle.distributed.communication.stream]
all_reduce  MERGE: every allreduce of a script, or of Paddle's Python, calls it
[paddle.base.core]
create_or_get_global_tcp_store  REDUCER STATIC_CPU: the job's store
TCPStore  REDUCER GROUPS: the store of one group
# Optimizers.
[paddle.optimizer.optimizer]
Optimizer.__init__(self learning_rate parameters)  COUNTING MERGE CHECK: the parameters and the
    schedule of an optimizer
    uses _parameter_list _param_groups _learning_rate
Optimizer.step(self)  COUNTING MERGE: an update
Optimizer.minimize(self loss startup_program)  COUNTING MERGE: also an update
Optimizer._apply_optimize(self loss startup_program)  COUNTING: the update of sharding
    optimizers
[paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2]
GroupShardedStage2._redefine_opt_step(self)  -: gives its optimizers, which contain others,
    another step
    uses _sharding_optimizers
[paddle.distributed.auto_parallel.api]
_ShardOptimizer  -: wraps an optimizer in Paddle 2, without being one
[paddle.amp.grad_scaler]
AmpScaler._update(self)  -: shows whether an update was skipped, by the name of Paddle 3 or 2
    uses _cache_found_inf _cache_founf_inf
[paddle.optimizer.optimizer]
Optimizer.clear_grad(self)  MERGE: keeps merged gradients
[paddle.base.dygraph.base]
in_to_static_mode()  COUNTING: shows where `step` only writes a program
[paddle.optimizer.lr]
LRScheduler.step(self)  MERGE STATIC: steps once for each merged update
[paddle.amp.grad_scaler]
AmpScaler.minimize(self optimizer)  MERGE: an update
AmpScaler._unscale(self optimizer)  MERGE: unscales merged gradients only
GradScaler.step(self optimizer)  MERGE: an update
GradScaler.update(self)  MERGE: follows an update
AmpScaler.scale(self)  AMP: a loss is scaled
[paddle.base.core]
get_low_precision_op_list  AMP: Paddle's counts of operators
eval_frame_skip_file_prefix  -: keeps paddle.jit.to_static from translating our functions
[paddle.nn.utils]
clip_grad_norm_(parameters)  MERGE: clips merged gradients
[paddle.nn.layer.layers]
Layer.clear_gradients(self)  MERGE: keeps merged gradients
[paddle.optimizer.momentum]
Momentum._create_optimization_pass(self parameters_and_grads)  FUSED: runs right before an update
    uses _use_multi_tensor _param_dict
[paddle.optimizer.adam]
Adam._create_optimization_pass(self parameters_and_grads)  FUSED: runs right before an update
    uses _use_multi_tensor _param_dict
[paddle.optimizer.momentum]
Momentum._create_multi_tensor_dict(self)  FUSED: makes the tables of fused updates
Momentum._multi_tensor_init  FUSED: fills the tables of fused updates
    uses _velocity_dict _master_weight_dict _regularization_method_dict _regularization_coeff_dict
[paddle.optimizer.adam]
Adam._multi_tensor_init  FUSED: fills the tables of fused updates
    uses _moment1_dict _moment2_dict _beta1_pow_acc_dict _beta2_pow_acc_dict
Adam.__init__  -: AMSGrad, which Paddle 3 has, is not fused
    uses _amsgrad _moment2_max_dict
[paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer]
HybridParallelOptimizer.__init__  MERGE: the script's optimizer inside fleet's
    uses _inner_opt
HybridParallelOptimizer._step(self parameters_list)  MERGE: a step of averaged gradients
[paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer]
DygraphShardingOptimizer.__init__  -: all parameters that sharding ranks update
    uses _origin_parameter_list _param2rank
DygraphShardingOptimizerV2  -: whether the next forward gathers
    uses _all_gather_overlap_forward
[paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2]
GroupShardedOptimizerStage2.__init__  -: the ranks that share the updates, and
    whether the next forward gathers
    uses _group _broadcast_overlap _optim
[paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3]
GroupShardedStage3._redefine_opt_step(self)  -: replaces the optimizer's step; the parameters
    that are split, and the ranks that hold the parts
    uses _group _optim _ori_parameter_list _unslice_params
GroupShardedStage3._redefine_opt_clear(self)  -: gives its optimizer another clear_grad
[paddle.distributed.fleet.utils.hybrid_parallel_util]
fused_allreduce_gradients_with_group(parameter_list group bucket_size scale)  -: averages
    gradients at a step
[paddle.distributed.fleet.utils.tensor_fusion_helper]
FusedCommBuffer.add_grad(self param)  -: runs before the gradients of a buffer are sent
    uses use_main_grad _release_grads _params
FusedCommBuffer._comm_grads(self)  -: sends a buffer
[paddle.base.core]
eager.Tensor._copy_gradient_from  -: makes a gradient a view of a buffer
eager.Tensor._local_value  -: this rank's part of a parameter on a process mesh
[paddle.incubate.asp.asp]
OptimizerWithSparsityGuarantee.__init__  -: the optimizer that it wraps
    uses _optimizer
[paddle.optimizer.momentum]
_C_ops.merged_momentum_  FUSED: one call updates many
_C_ops.momentum_  FUSED: updates one
[paddle.optimizer.adam]
_C_ops.merged_adam_  FUSED: one call updates many
_C_ops.adam_  FUSED: updates one
# Fleet and its strategy.
[paddle.distributed.fleet.base.distributed_strategy]
DistributedStrategy.__init__(self)  STRATEGY: a new strategy gets our values
    uses strategy
DistributedStrategy.__setattr__(self)  STRATEGY: records what the script sets
DistributedStrategy.load_from_prototxt(self pb_file)  STRATEGY: records what the script loads
DistributedStrategy.build_strategy  STRATEGY: records what the script changes in it
DistributedStrategy._fuse_grad_size_in_TFLOPS  -: its documented name has no effect
DistributedStrategy._calc_comm_same_stream  -: its documented name has no effect
[paddle.distributed.fleet.fleet]
Fleet.get_hybrid_communicate_group  -: the sizes of the script's groups; the function itself
    raises where there are none
    uses _hcg
[paddle.distributed.fleet.base.distributed_strategy]
non_auto_func_called  STRATEGY: true once anything was assigned
[paddle.distributed.fleet.fleet]
Fleet.init(self role_maker is_collective strategy)  STRATEGY: takes a strategy
Fleet.distributed_optimizer(self optimizer strategy)  STRATEGY: takes a strategy
[paddle.distributed.fleet.optimizer]
_dygraph_distributed_optimizer(optimizer strategy)  STRATEGY: takes a strategy, and keeps a copy
    uses _user_defined_strategy
# Static programs.
[paddle.distributed.fleet.fleet]
Fleet._minimize_impl(self loss startup_program)  STATIC: has written a program when it returns
    uses _role_maker
[paddle.distributed.fleet.meta_optimizers.raw_program_optimizer]
RawProgramOptimizer.minimize_impl(self loss startup_program)  STATIC: would fuse the allreduces
    uses fuse_all_reduce_ops
apply_build_strategy(main_program startup_program build_strategy pass_attrs)  STATIC: runs
    Paddle's passes
[paddle.incubate.optimizer.gradient_merge]
GradientMergeOptimizer.backward(self loss startup_program parameter_list no_grad_set callbacks)
    STATIC: refuses the parameters that a loss is minimized for
    uses inner_optimizer
[paddle.base.core]
get_pass  STATIC: tells whether this build has a pass
[paddle.static]
BuildStrategy._copy  STATIC: copied to switch passes off
[paddle.base.executor]
_ExecutorCache._get_program_and_executor(self cached_data)  STATIC: gives the program that runs
Executor.run(self program)  STATIC SERVERS: runs a program
Executor.train_from_dataset(self program)  SERVERS: runs a program many times
[paddle.distributed.communicator]
Communicator.start(self)  SERVERS: its settings are known when it starts
[paddle.base.compiler]
CompiledProgram.__init__  STATIC: the program that was compiled
    uses _program
[paddle.base.framework]
Variable  STATIC: recognizes a variable of an older program
[paddle.base.layer_helper]
LayerHelper  STATIC: writes operators of older programs
[paddle.base.framework]
_dygraph_guard  STATIC: programs are written outside the tracer
Block._find_var_recursive(self name)  STATIC: finds a variable
Block._insert_op_without_sync(self index)  STATIC: inserts an operator
Block._remove_op(self index sync)  STATIC: removes an operator
Block._rename_var(self name new_name)  STATIC: renames a variable
Program._sync_with_cpp(self)  STATIC: ends a change of a program
Operator._block_attr_id(self name)  STATIC: the block of a conditional operator
[paddle.distributed.fleet.meta_optimizers.common]
CollectiveHelper._init_communicator(self program current_endpoint endpoints rank ring_id
    wait_port)  STATIC: connects the ranks of a ring
[paddle.base.core]
CommContextManager.create_gloo_comm_context  STATIC_CPU: connects a ring
ProcessGroupGloo.create  STATIC_CPU: connects a channel
[paddle.static.nn.common]
PyFuncRegistry  STATIC_CPU: a function as an operator
[paddle.base.data_feeder]
convert_dtype  STATIC_CPU: the name of a dtype
[paddle.base.dygraph]
guard  STATIC_CPU: makes tensors beside a program
"""


_ROW = re.compile(r"([^\s(]+)(\([^)]*\))?\s+([A-Z_ ]+|-): (.*)")


def _parsed(text: str) -> Iterator[PrivateName]:
    """Yield the rows of TEXT."""
    module = ""
    for entry in re.split(r"\n(?! )", text.strip()):
        lines = entry.split("\n    ")
        row = _ROW.fullmatch(" ".join(line for line in lines if not line.startswith("uses ")))
        if row is None:
            module = module if entry.startswith("#") else entry.strip("[]")
            continue
        path, parameters, words, used_for = row.groups()
        yield PrivateName(
            module,
            path,
            tuple(globals()[word] for word in words.split() if word != "-"),
            used_for,
            None if parameters is None else tuple(parameters.strip("()").split()),
            tuple(used for line in lines if line.startswith("uses ") for used in line.split()[1:]),
        )


NAMES = tuple(_parsed(_TEXT))
