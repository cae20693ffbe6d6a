"""The private and undocumented names of Paddle that each capability of fleetrun needs.

`paddle_api` looks them up in the installed Paddle. A capability is written as the clause for the
user that says what happens without it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# The versions that all tests run with. Others are used if they have the names.
TESTED = ("2.6.2", "3.3.1")

COUNTING = "updates are not counted, so it is unknown what took effect"
STRATEGY = "fleet gets only the script's strategy"
GROUPS = "all groups share Paddle's store"
REDUCER = "Paddle's own reducer averages the gradients"
MERGE = "each step updates the parameters"
FUSED = "Paddle updates the parameters in its own way"
STATIC = "static programs stay as Paddle writes them, and nothing is counted in them"
STATIC_CPU = "Paddle alone connects static programs"
SERVERS = "what is sent to parameter servers is not counted"
CHECK = "the ranks are not compared"
LOSSES = "the losses of steps are not recorded"

# A capability also fails with those that it builds on.
BUILDS_ON = {
    MERGE: (COUNTING, REDUCER),
    STATIC_CPU: (STATIC,),
    CHECK: (COUNTING,),
    FUSED: (COUNTING,),
}
# A rank without one of these communicates differently from the others, which would wait for it.
COMMUNICATING = (STRATEGY, GROUPS, REDUCER, MERGE, STATIC, STATIC_CPU, CHECK)


class PrivateName(NamedTuple):
    """A name in a module of Paddle, by its attributes from there on, and what needs it."""

    module: str
    path: str
    capabilities: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


# Below each [module] its names, as `CAPABILITIES: path ...`. Indented lines continue a row.
_TEXT = """
[paddle.base.core]
REDUCER MERGE LOSSES: eager.run_backward
REDUCER: eager._add_backward_final_hook
REDUCER CHECK: eager.get_all_grads eager.Tensor._grad_ivar
REDUCER MERGE: eager.Tensor._register_backward_hook eager.Tensor._register_grad_hook
REDUCER: eager.Tensor._set_grad_ivar eager.Tensor._unset_fake_empty
    eager.Tensor._share_buffer_to eager.Tensor.is_contiguous eager.Tensor.contiguous
    eager_assign_group_by_size EagerReducer EagerReducer.prepare_for_backward ReduceOp.SUM
    ProcessGroup.all_reduce ProcessGroup.reduce ProcessGroup.broadcast
MERGE: eager.Tensor.data_ptr eager.Tensor.inplace_version
REDUCER MERGE FUSED CHECK: eager.Tensor.is_selected_rows
REDUCER MERGE: eager.Tensor.grad
MERGE: eager.Tensor.clear_gradient eager.Tensor._bump_inplace_version
REDUCER STATIC_CPU CHECK: create_or_get_global_tcp_store
REDUCER GROUPS: TCPStore
STATIC: get_pass
STATIC_CPU: CommContextManager.create_gloo_comm_context ProcessGroupGloo.create
[paddle.base.framework]
REDUCER CHECK: _dygraph_place_guard
STATIC: Variable Block._find_var_recursive Block._insert_op_without_sync Block._remove_op
    Block._rename_var Program._sync_with_cpp Operator._block_attr_id
[paddle.distributed.parallel]
REDUCER: DataParallel.init_reducer DataParallel.forward
[paddle.distributed.collective]
REDUCER GROUPS: _new_process_group_impl
REDUCER: _get_global_env _default_store _default_backend
[paddle.distributed.communication.group]
REDUCER: Group.process_group
[paddle.optimizer.optimizer]
COUNTING: Optimizer._apply_optimize
[paddle.amp.grad_scaler]
MERGE: AmpScaler._unscale
[paddle.base.dygraph.base]
COUNTING: in_to_static_mode
[paddle.optimizer.momentum]
FUSED: Momentum._create_optimization_pass Momentum._create_multi_tensor_dict
    Momentum._multi_tensor_init _C_ops.merged_momentum_
[paddle.optimizer.adam]
FUSED: Adam._create_optimization_pass Adam._multi_tensor_init _C_ops.merged_adam_
[paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer]
MERGE: HybridParallelOptimizer._step
[paddle.distributed.fleet.base.distributed_strategy]
STRATEGY: DistributedStrategy.build_strategy non_auto_func_called
[paddle.distributed.fleet.fleet]
STATIC: Fleet._minimize_impl
[paddle.distributed.fleet.optimizer]
STRATEGY: _dygraph_distributed_optimizer
[paddle.distributed.fleet.meta_optimizers.raw_program_optimizer]
STATIC: RawProgramOptimizer.minimize_impl apply_build_strategy
[paddle.static]
STATIC: BuildStrategy._copy
[paddle.base.executor]
STATIC: _ExecutorCache._get_program_and_executor
SERVERS: Executor.train_from_dataset
[paddle.distributed.communicator]
SERVERS: Communicator.start
[paddle.base.layer_helper]
STATIC: LayerHelper
[paddle.distributed.fleet.meta_optimizers.common]
STATIC: CollectiveHelper._init_communicator
[paddle.static.nn.common]
STATIC_CPU: PyFuncRegistry
[paddle.base.data_feeder]
STATIC_CPU: convert_dtype
[paddle.base.dygraph]
STATIC_CPU: guard
"""


def _parsed(text: str) -> Iterator[PrivateName]:
    """Yield the names of TEXT."""
    module = ""
    for row in re.split(r"\n(?! )", text.strip()):
        words, _, paths = row.partition(": ")
        if not paths:
            module = row.strip("[]")
        for path in paths.split():
            yield PrivateName(module, path, tuple(globals()[word] for word in words.split()))


NAMES = tuple(_parsed(_TEXT))
