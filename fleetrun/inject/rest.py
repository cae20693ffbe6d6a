"""Has a word for everything that was asked for and that nobody else has spoken of.

Each reason was measured or read in Paddle 2.6.2 and 3.3.1; `tests/inject` trains to see it hold.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from . import servers, settings, strategies, updates
from .evidence import EFFECTIVE, NO_EFFECT, REFUSED, SCRIPT
from .imports import after_import

if TYPE_CHECKING:
    from types import ModuleType

    from .evidence import Evidence
    from .wish import Wish

# The arguments of DataParallel that are fields of the strategy; fleet passes them on itself.
_ARGUMENTS = {
    "find_unused_parameters": "find_unused_parameters",
    "last_comm_group_size_MB": "last_comm_buffer_size",
}
# What is only about allreduces.
_COMMUNICATION = (
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_MB",
    "fuse_grad_size_in_num",
    "fuse_grad_size_in_TFLOPS",
    "last_comm_group_size_MB",
    "find_unused_parameters",
    "nccl_comm_num",
    "sync_nccl_allreduce",
    "use_hierarchical_allreduce",
    "hierarchical_allreduce_inter_nranks",
)
# By it Paddle adds the allreduces to static programs; its other value is refused.
_REWRITES = "without_graph_optimization"
_NOT_HERE = "Paddle has it for static graphs only"
_SHARDED = "Paddle reads it for sharded static graphs only"
_BY_FLAG = "Paddle sets it for static graphs only; FLAGS_{name} in the section `flags` works here"
_DYGRAPH = {
    "amp": "in dynamic graphs fleet makes a GradScaler at most; the script must call auto_cast",
    "recompute": "in dynamic graphs the script must call paddle.distributed.fleet.recompute",
    "sync_batch_norm": (
        "in dynamic graphs the script must call SyncBatchNorm.convert_sync_batchnorm"
    ),
    "sharding": "in dynamic graphs Paddle shards by hybrid_configs or group_sharded_parallel",
    "lars": _NOT_HERE,
    "lamb": "in dynamic graphs the script must make a paddle.optimizer.Lamb",
    "localsgd": _NOT_HERE,
    "adaptive_localsgd": _NOT_HERE,
    "dgc": _NOT_HERE,
    "hybrid_configs": "the script has not made these groups by fleet.init",
    "a_sync": "only training with parameter servers is asynchronous",
    "fp16_allreduce": _NOT_HERE,
    "without_graph_optimization": "there is no graph to optimize in dynamic graphs",
    "fuse_grad_merge": _NOT_HERE,
    "calc_comm_same_stream": _NOT_HERE,
    "gradient_scale_configs": _SHARDED,
    "cudnn_exhaustive_search": _BY_FLAG,
    "conv_workspace_size_limit": _BY_FLAG,
    "cudnn_batchnorm_spatial_persistent": _BY_FLAG,
}
_STATIC = {
    "sync_batch_norm": "Paddle never hands it to the pass that would do it",
    "find_unused_parameters": "a static graph has the gradients that it has",
    "last_comm_group_size_MB": "Paddle reads it in dynamic graphs only",
    "nccl_comm_num": "Paddle sets FLAGS_nccl_nrings by it, and uses one ring",
    "use_hierarchical_allreduce": "Paddle reads it, and uses one ring",
    "hierarchical_allreduce_inter_nranks": "Paddle reads it, and uses one ring",
    "fuse_grad_size_in_MB": "Paddle fuses static graphs by fuse_grad_size_in_num",
    "fuse_grad_size_in_TFLOPS": "no part of Paddle reads it",
    "cudnn_exhaustive_search": "it is for the kernels of a GPU",
    "conv_workspace_size_limit": "it is for the kernels of a GPU",
    "cudnn_batchnorm_spatial_persistent": "it is for the kernels of a GPU",
    "dgc": "Paddle has it for GPUs only",
    "calc_comm_same_stream": "only a GPU has streams, and nobody has counted what it saves there",
    "gradient_scale_configs": _SHARDED,
    "hybrid_configs": "Paddle reads it in dynamic graphs only",
    "a_sync": "only training with parameter servers is asynchronous",
    "fuse_grad_merge": "Paddle has no pass that reads it",
}
# Fields of details that no switch turns on, and how fleet's topology tells the degrees of one.
_SWITCHLESS = ("gradient_scale_configs", "hybrid_configs")
_DEGREES = {
    "dp_degree": "data",
    "mp_degree": "model",
    "pp_degree": "pipe",
    "sharding_degree": "sharding",
    "sep_degree": "sep",
}
_NO_STEPS = "one step is no merging: gradient_merge_configs.k_steps says how many are one update"
_BUILD = "not available in dygraph: there is no graph to fuse in"
_THREADS = "a dynamic graph has no executor with threads"


def install(asked: Wish, proof: Evidence) -> None:
    """Have the last word after the first update, and before the proof is written."""
    rest = _Rest(asked, proof)
    after_import("paddle.distributed.parallel", rest.enter)
    updates.on_update(rest.after_update)


class _Rest:
    def __init__(self, asked: Wish, proof: Evidence) -> None:
        self._asked = asked
        self._proof = proof
        self._models = 0
        # What was counted of fields where the script's own value holds.
        self._counted: dict[str, str | None] = {}
        # The arguments that Paddle's own reducers were made with.
        self._arguments: dict[str, Any] = {}
        self._first_bucket = 0

    def enter(self, module: ModuleType) -> None:
        """Pass on what DataParallel has an argument for, where the script has not said it."""
        import inspect

        kind: Any = module.DataParallel
        begin = kind.__init__
        signature = inspect.signature(begin)

        @functools.wraps(begin)
        def __init__(model: Any, *args: Any, **options: Any) -> None:
            bound = signature.bind(model, *args, **options)
            for name, argument in _ARGUMENTS.items():
                self._pass_on(name, argument, bound.arguments)
            begin(*bound.args, **bound.kwargs)
            self._models += 1
            self._look(model)

        kind.__init__ = __init__

    def _pass_on(self, name: str, argument: str, arguments: dict[str, Any]) -> None:
        wished = self._asked.get(name)
        if wished is None:
            return
        if argument in arguments and arguments[argument] != wished:
            holds = settings.script_says(name, arguments[argument])
        else:
            holds = settings.effective(name)
        arguments[argument] = holds

    def _look(self, model: Any) -> None:
        """See what Paddle's reducer of MODEL was made with, if it has made one."""
        groups = getattr(model, "group_indices", None)
        if getattr(model, "_reducer", None) is None or not groups:
            return
        parameters = [each for each in model.parameters() if each.trainable]
        self._arguments["find_unused_parameters"] = model.find_unused_parameters
        sizes = [parameters[i].size * parameters[i].element_size() for i in groups[0]]
        self._first_bucket = sum(sizes)
        self._arguments["last_comm_group_size_MB"] = sum(sizes) / 2**20

    def after_update(self, _source: Any, number: int) -> None:
        """Sweep after the first update."""
        if number != 1:
            return
        asked = self._asked
        for section in (asked.strategy, asked.build_strategy, asked.execution_strategy):
            for name in section:
                self._say(name, section[name])
        # A field of details shares the fate of what it details.
        for name in asked.strategy:
            self._share(name)

    def _say(self, name: str, value: Any) -> None:
        proof = self._proof
        if settings.is_scripts(name):
            self._counted[name] = said = proof.status(name)
            if said is None:
                proof.knob(name, SCRIPT)
            holds = settings.effective(name)
            proof.put(name, status=SCRIPT, in_effect=holds, reason="the script sets it itself")
        elif proof.status(name) is not None:
            return
        elif name in strategies.refused:
            proof.knob(name, REFUSED, reason=strategies.refused[name])
        elif value is False:
            # What is nowhere switched on is off; but not what Paddle has on by itself.
            self._say_off(name)
        elif name == _REWRITES and proof.graph == "static":
            proof.knob(name, EFFECTIVE, in_effect=value, evidence="on, as without it")
        elif proof.graph == "dygraph" and name in self._arguments:
            self._say_argument(name, value)
        elif not name.endswith("_configs"):
            proof.knob(name, NO_EFFECT, reason=self._reason(name))

    def _say_off(self, name: str) -> None:
        if name in settings.ON_BY_DEFAULT:
            self._proof.knob(name, NO_EFFECT, reason=self._reason(name))
        else:
            self._proof.knob(name, EFFECTIVE, in_effect=False, evidence="off, as without it")

    def _say_argument(self, name: str, value: Any) -> None:
        if name == "last_comm_group_size_MB":
            text = f"the bucket that goes out last has {self._first_bucket} bytes"
        else:
            text = "the reducer looks for them"
        self._proof.knob(name, EFFECTIVE, in_effect=value, evidence=text)

    def _share(self, name: str) -> None:
        if not name.endswith("_configs") or self._proof.status(name) is not None:
            return
        if name in _SWITCHLESS:
            self._say_switchless(name)
            return
        switch = name[: -len("_configs")]
        status = self._counted.get(switch, self._proof.status(switch))
        if not settings.is_on(switch):
            is_scripts = settings.is_scripts(switch)
            reason = f"the script switches {switch} off" if is_scripts else f"{switch} is not on"
            self._proof.knob(name, NO_EFFECT, reason=reason)
        elif status is None:
            # Only the script has switched it on, and nobody has counted it.
            self._proof.knob(name, NO_EFFECT, reason=self._reason(switch))
        else:
            effect = settings.effective(name) if status == EFFECTIVE else None
            reason = "" if status == EFFECTIVE else f"as {switch}"
            text = f"as {switch}" if status == EFFECTIVE else ""
            self._proof.knob(name, status, in_effect=effect, reason=reason, evidence=text)

    def _say_switchless(self, name: str) -> None:
        is_dynamic = self._proof.graph == "dygraph"
        degrees = _degrees() if name == "hybrid_configs" and is_dynamic else {}
        wished = settings.effective(name)
        if degrees and all(wished[key] in {degrees[key], -1} for key in degrees if key in wished):
            text = ", ".join(f"{key} {degree}" for key, degree in degrees.items())
            self._proof.knob(name, EFFECTIVE, in_effect=wished, evidence=f"fleet has {text}")
        else:
            self._proof.knob(name, NO_EFFECT, reason=self._reason(name))

    def _reason(self, name: str) -> str:
        asked, is_dynamic = self._asked, self._proof.graph == "dygraph"
        table = dict(_DYGRAPH if is_dynamic else _STATIC)
        if name in _COMMUNICATION and is_dynamic and not self._models:
            table[name] = "the script has no data-parallel model"
        if name in _COMMUNICATION and servers.are_used():
            table[name] = "with parameter servers, ranks do not reduce gradients among themselves"
        if name in _COMMUNICATION and asked.topology.nranks == 1:
            table[name] = "a single rank has nothing to reduce"
        if name in asked.build_strategy:
            table[name] = _BUILD if is_dynamic else "it has changed nothing in this program"
        if name in asked.execution_strategy:
            table[name] = _THREADS if is_dynamic else "Paddle's executor does not read it any more"
        table.update(strategies.misfits)
        where = "dynamic" if is_dynamic else "static"
        if name == "gradient_merge" and is_dynamic:
            table[name] = _NO_STEPS if asked.get(name) else _NOT_HERE
        unknown = f"nothing in Paddle's {where} graphs was seen to follow it"
        return table.get(name, unknown).replace("{name}", name)


def _degrees() -> dict[str, int]:
    """Return how many ranks fleet has along each of its axes; nothing where it has none."""
    # The package's name `fleet` is the object, not the module.
    package: Any = sys.modules.get("paddle.distributed.fleet")
    topology = getattr(getattr(package, "fleet", None), "_hcg", None)
    found = {}
    for key, axis in _DEGREES.items():
        ask = getattr(topology, f"get_{axis}_parallel_world_size", None)
        if ask is not None:
            found[key] = int(ask())
    return found
