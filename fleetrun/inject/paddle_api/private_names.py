"""The private and undocumented names of Paddle that fleetrun uses: where each is, and what for.

Each name belongs to one or more capabilities, which need all of their names; code that uses a name
of no capability copes without it. `paddle_api` looks the names up in the installed Paddle. A test
compares the table with what the modules of `inject` use.
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
    STATIC_CPU: (STATIC,),
    CHECK: (COUNTING,),
    FUSED: (COUNTING,),
}
# A rank without one of these communicates differently from the others, which would wait for it.
COMMUNICATING = (
    *(STRATEGY, GROUPS, REDUCER, MERGE, ARGUMENTS),
    *(STATIC, STATIC_CPU, CHECK),
)


class PrivateName(NamedTuple):
    """A name in a module of Paddle, by its attributes from there on."""

    module: str
    # `a|b`: either, as an attribute was renamed.
    path: str
    capabilities: tuple[str, ...]
    # The first parameters of a function in Python; None: any.
    parameters: tuple[str, ...] | None = None
    # Attributes that the function sets or reads, and that we use.
    attributes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


# Below each [module] its names, as `CAPABILITIES: path(first,parameters){attributes} ...`; `-` is
# no capability. Indented lines continue a row.
_TEXT = """
[paddle.base.core]
BACKWARD REDUCER MERGE LOSSES: eager.run_backward
BACKWARD REDUCER: eager._add_backward_final_hook eager.get_all_grads
REDUCER MERGE: eager.Tensor._register_backward_hook
REDUCER: eager.Tensor._grad_ivar eager.Tensor._set_grad_ivar eager.Tensor._unset_fake_empty
    eager.Tensor._share_buffer_to eager.Tensor.is_contiguous eager.Tensor.contiguous
    eager_assign_group_by_size EagerReducer EagerReducer.prepare_for_backward ReduceOp.SUM
    ProcessGroup.all_reduce ProcessGroup.reduce ProcessGroup.broadcast
-: eval_frame_skip_file_prefix eager.Tensor._copy_gradient_from
    eager.Tensor._local_value
BACKWARD REDUCER MERGE CHECK: eager.Tensor.data_ptr
BACKWARD MERGE CHECK: eager.Tensor.inplace_version
REDUCER MERGE FUSED: eager.Tensor.is_selected_rows
MERGE: eager.Tensor.get_selected_rows SelectedRows.get_tensor
REDUCER MERGE CHECK: eager.Tensor.grad
MERGE: eager.Tensor.clear_gradient
CHECK: ProcessGroup.all_gather_into_tensor
REDUCER STATIC_CPU: create_or_get_global_tcp_store
REDUCER GROUPS: TCPStore
AMP: get_low_precision_op_list
STATIC: get_pass
STATIC_CPU: CommContextManager.create_gloo_comm_context ProcessGroupGloo.create
[paddle.base.framework]
REDUCER CHECK: _dygraph_place_guard(place)
BACKWARD: EagerParamBase.__init__(self)
STATIC: Variable Block._find_var_recursive(self, name)
    Block._insert_op_without_sync(self, index) Block._remove_op(self, index, sync)
    Block._rename_var(self, name, new_name) Program._sync_with_cpp(self)
    Operator._block_attr_id(self, name)
[paddle.nn.layer.common]
REDUCER: Embedding.__init__{_sparse}
[paddle.nn.layer.layers]
[paddle.distributed.parallel]
REDUCER CHECK ARGUMENTS: DataParallel.__init__(self, layers, strategy, comm_buffer_size,
    last_comm_buffer_size, find_unused_parameters, group){comm_buffer_size, last_comm_buffer_size,
    find_unused_parameters, group, init_reducer}
REDUCER: DataParallel.init_reducer(self){_reducer, group_indices, no_sync} DataParallel.no_sync
REDUCER CHECK: DataParallel.forward(self){_reducer, prepare_for_backward}
[paddle.distributed.collective]
REDUCER GROUPS: _new_process_group_impl(backend, store, rank, world_size, group_name, pg_options,
    group_id)
REDUCER: _get_global_env _default_store _default_backend
[paddle.distributed.communication.group]
REDUCER: Group.process_group
[paddle.profiler.utils]
-: _has_optimizer_wrapped
[paddle.distributed.communication.stream]
MERGE: all_reduce
[paddle.optimizer.optimizer]
COUNTING MERGE CHECK: Optimizer.__init__(self, learning_rate, parameters){_parameter_list,
    _param_groups, _learning_rate}
COUNTING MERGE: Optimizer.step(self) Optimizer.minimize(self, loss, startup_program)
COUNTING: Optimizer._apply_optimize(self, loss, startup_program)
[paddle.distributed.auto_parallel.api]
-: _ShardOptimizer
[paddle.amp.grad_scaler]
-: AmpScaler._update(self){_cache_found_inf, _cache_founf_inf}
MERGE: AmpScaler.minimize(self, optimizer) AmpScaler._unscale(self, optimizer) GradScaler.step(self,
    optimizer) GradScaler.update(self)
AMP: AmpScaler.scale(self)
[paddle.base.dygraph.base]
COUNTING: in_to_static_mode()
[paddle.optimizer.lr]
MERGE STATIC: LRScheduler.step(self)
[paddle.nn.utils]
MERGE: clip_grad_norm_(parameters)
[paddle.optimizer.momentum]
FUSED: Momentum._create_optimization_pass(self, parameters_and_grads){_use_multi_tensor,
    _param_dict} Momentum._create_multi_tensor_dict(self)
    Momentum._multi_tensor_init{_velocity_dict, _master_weight_dict, _regularization_method_dict,
    _regularization_coeff_dict} _C_ops.merged_momentum_ _C_ops.momentum_
[paddle.optimizer.adam]
FUSED: Adam._create_optimization_pass(self, parameters_and_grads){_use_multi_tensor, _param_dict}
    Adam._multi_tensor_init{_moment1_dict, _moment2_dict, _beta1_pow_acc_dict, _beta2_pow_acc_dict}
    _C_ops.merged_adam_ _C_ops.adam_
-: Adam.__init__{_amsgrad, _moment2_max_dict}
[paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer]
MERGE: HybridParallelOptimizer.__init__{_inner_opt} HybridParallelOptimizer._step(self,
    parameters_list)
[paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer]
-: DygraphShardingOptimizer.__init__{_origin_parameter_list}
    DygraphShardingOptimizerV2{_all_gather_overlap_forward}
[paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2]
-: GroupShardedOptimizerStage2.__init__{_group, _broadcast_overlap, _optim}
[paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3]
-: GroupShardedStage3._redefine_opt_step(self){_group, _optim, _ori_parameter_list, _unslice_params}
[paddle.distributed.fleet.utils.hybrid_parallel_util]
-: fused_allreduce_gradients_with_group(parameter_list, group, bucket_size, scale)
[paddle.distributed.fleet.utils.tensor_fusion_helper]
-: FusedCommBuffer.add_grad(self, param){use_main_grad, _release_grads, _params}
    FusedCommBuffer._comm_grads(self)
[paddle.incubate.asp.asp]
-: OptimizerWithSparsityGuarantee.__init__{_optimizer}
[paddle.distributed.fleet.base.distributed_strategy]
STRATEGY: DistributedStrategy.__init__(self){strategy} DistributedStrategy.__setattr__(self)
    DistributedStrategy.load_from_prototxt(self, pb_file) DistributedStrategy.build_strategy
    non_auto_func_called
-: DistributedStrategy._fuse_grad_size_in_TFLOPS DistributedStrategy._calc_comm_same_stream
[paddle.distributed.fleet.fleet]
-: Fleet.get_hybrid_communicate_group{_hcg}
STRATEGY: Fleet.init(self, role_maker, is_collective, strategy) Fleet.distributed_optimizer(self,
    optimizer, strategy)
STATIC: Fleet._minimize_impl(self, loss, startup_program){_role_maker}
[paddle.distributed.fleet.optimizer]
STRATEGY: _dygraph_distributed_optimizer(optimizer, strategy){_user_defined_strategy}
[paddle.distributed.fleet.meta_optimizers.raw_program_optimizer]
STATIC: RawProgramOptimizer.minimize_impl(self, loss, startup_program){fuse_all_reduce_ops}
    apply_build_strategy(main_program, startup_program, build_strategy, pass_attrs)
[paddle.incubate.optimizer.gradient_merge]
STATIC: GradientMergeOptimizer.backward(self, loss, startup_program, parameter_list, no_grad_set,
    callbacks){inner_optimizer}
[paddle.static]
STATIC: BuildStrategy._copy
[paddle.base.executor]
STATIC: _ExecutorCache._get_program_and_executor(self, cached_data)
STATIC SERVERS: Executor.run(self, program)
SERVERS: Executor.train_from_dataset(self, program)
[paddle.distributed.communicator]
SERVERS: Communicator.start(self)
[paddle.base.compiler]
STATIC: CompiledProgram.__init__{_program}
[paddle.base.layer_helper]
STATIC: LayerHelper
[paddle.distributed.fleet.meta_optimizers.common]
STATIC: CollectiveHelper._init_communicator(self, program, current_endpoint, endpoints, rank,
    ring_id, wait_port)
[paddle.static.nn.common]
STATIC_CPU: PyFuncRegistry
[paddle.base.data_feeder]
STATIC_CPU: convert_dtype
[paddle.base.dygraph]
STATIC_CPU: guard
"""
_NAME = re.compile(r"([^\s({]+)(?:\(([^)]*)\))?(?:\{([^}]*)\})?")


def _parsed(text: str) -> Iterator[PrivateName]:
    """Yield the names of TEXT."""
    module = ""
    for row in re.split(r"\n(?! )", text.strip()):
        words, _, names = " ".join(row.split()).partition(": ")
        if not names:
            module = row.strip("[]")
            continue
        capabilities = tuple(globals()[word] for word in words.split() if word != "-")
        for path, parameters, attributes in _NAME.findall(names):
            yield PrivateName(
                *(module, path, capabilities),
                tuple(parameters.split(", ")) if parameters else None,
                tuple(filter(None, attributes.split(", "))),
            )


NAMES = tuple(_parsed(_TEXT))
