"""Has a word for everything that was asked for and that nobody else has spoken of.

Each reason was measured or read in Paddle 2.6.2 and 3.3.1; `tests/inject` trains to see it hold.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from . import distributed_strategy, parameter_servers, settings, updates
from .evidence import EFFECTIVE, NO_EFFECT, REFUSED, SCRIPT
from .import_hooks import after_import

if TYPE_CHECKING:
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

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
_ONLY_STATIC = "Paddle has it for static graphs only"


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Have the last word after the first update, and before the proof is written."""
    remaining = _RemainingFields(spec, proof)
    after_import("paddle.distributed.parallel", remaining.patch)
    updates.on_update(remaining.after_update)


class _RemainingFields:
    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        self._models = 0
        # What was counted of fields where the script's own value holds.
        self._counted: dict[str, str | None] = {}
        # The arguments that Paddle's own reducers were made with.
        self._arguments: dict[str, Any] = {}
        self._first_bucket = 0

    def patch(self, module: ModuleType) -> None:
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
        wished = self._spec.get(name)
        if wished is None:
            return
        if argument in arguments and arguments[argument] != wished:
            holds = settings.set_by_script(name, arguments[argument])
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
        spec = self._spec
        for section in (spec.strategy, spec.build_strategy, spec.execution_strategy):
            for name in section:
                self._say(name, section[name])
        # A field of details shares the fate of what it details.
        for name in spec.strategy:
            self._share(name)

    def _say(self, name: str, value: Any) -> None:
        proof = self._proof
        if settings.script_wins(name):
            self._counted[name] = said = proof.status(name)
            if said is None:
                proof.knob(name, SCRIPT)
            holds = settings.effective(name)
            proof.put(name, status=SCRIPT, in_effect=holds, reason="the script sets it itself")
        elif proof.status(name) is not None:
            return
        elif name in distributed_strategy.refused:
            proof.knob(name, REFUSED, reason=distributed_strategy.refused[name])
        elif proof.known(name, value).get("by_default"):
            said = proof.known(name, value)["reason"]
            proof.knob(name, EFFECTIVE, in_effect=value, evidence=said)
        elif proof.graph == "dygraph" and name in self._arguments:
            self._say_argument(name, value)
        elif not name.endswith("_configs"):
            proof.knob(name, NO_EFFECT, reason=self._reason(name))

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
            is_scripts = settings.script_wins(switch)
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
        """Say why NAME has no effect: what differs in this job, or what is known of it anyway."""
        of_this_job = self._obstacle(name)
        if of_this_job:
            return of_this_job
        known = self._proof.known(name, settings.effective(name))
        if "unseen" in known:
            return str(known["unseen"])
        if known.get("status") == NO_EFFECT:
            return str(known["reason"])
        if name in self._spec.build_strategy:
            return "it has changed nothing in this program"
        where = "dynamic" if self._proof.graph == "dygraph" else "static"
        return f"nothing in Paddle's {where} graphs was seen to follow it"

    def _obstacle(self, name: str) -> str:
        """Return what in this job or script keeps NAME from having an effect; empty if nothing."""
        is_dynamic = self._proof.graph == "dygraph"
        if name in distributed_strategy.misfits:
            return distributed_strategy.misfits[name]
        if name == "gradient_merge" and is_dynamic:
            return _NO_STEPS if self._spec.get(name) else _ONLY_STATIC
        if name not in _COMMUNICATION:
            return ""
        if self._spec.topology.nranks == 1:
            return "a single rank has nothing to reduce"
        if parameter_servers.are_used():
            return "with parameter servers, ranks do not reduce gradients among themselves"
        return "the script has no data-parallel model" if is_dynamic and not self._models else ""


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
