"""Reports the requested fields that no other module has reported.

Most of them have no effect in this job. The launcher knows whether and why (`verdicts`), or it is
determined here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from . import (
    distributed_strategy,
    hybrid_settings,
    paddle_api,
    parameter_servers,
    process_meshes,
    settings,
    topology,
    updates,
)
from .buckets import FUSION
from .dygraph.compression import DTYPES
from .dygraph.step_sums import PADDLES_SUMS
from .evidence import EFFECTIVE, NO_DIFFERENCE, NO_EFFECT, NO_WORD, REFUSED, SCRIPT
from .import_hooks import after_import, in_place_of
from .paddle_api import private_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

# The arguments of DataParallel that set a field; fleet passes them on by itself.
_ARGUMENTS = {
    "find_unused_parameters": "find_unused_parameters",
    "last_comm_group_size_MB": "last_comm_buffer_size",
}
# The fields that only concern the allreduces of gradients.
_COMMUNICATION = (
    *FUSION,
    *DTYPES,
    "find_unused_parameters",
    "nccl_comm_num",
    "sync_nccl_allreduce",
    "use_hierarchical_allreduce",
    "hierarchical_allreduce_inter_nranks",
)
# The axes of fleet's topology along which gradients are summed.
_SUMMED = ("dp", "sharding", "sep")
# The capabilities that fields need; those of communication need the reducer.
_IN_DYNAMIC_GRAPHS = {
    "gradient_merge": private_names.MERGE,
    "fuse_all_optimizer_ops": private_names.FUSED,
}
# The `_configs` fields without a switch.
_WITHOUT_SWITCH = ("gradient_scale_configs", "hybrid_configs")
_NO_STEPS = "no steps were merged: gradient_merge_configs.k_steps sets how many make one update"
_WHAT = "the report of fields"
_ONLY_STATIC = "Paddle has it for static graphs only"


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Report after the first update, before the evidence is written."""
    remaining = _RemainingFields(spec, proof)
    if paddle_api.has(private_names.ARGUMENTS):
        after_import("paddle.distributed.parallel", remaining.patch)
    updates.on_update(remaining.after_update, _WHAT)


class _RemainingFields:
    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        self._models = 0
        # Whether Paddle looks for unused parameters of a model.
        self._finds_unused = False
        self._has_meshes = False
        # The counted status of fields whose script value is in effect.
        self._counted: dict[str, str | None] = {}

    def patch(self, module: ModuleType) -> None:
        """Patch DataParallel: arguments that the script leaves out get the strategy's values."""
        signature = inspect.signature(module.DataParallel.__init__)

        @in_place_of(module.DataParallel, "__init__")
        def __init__(init: Any, model: Any, *args: Any, **options: Any) -> None:
            bound = signature.bind(model, *args, **options)
            for name, argument in _ARGUMENTS.items():
                requested = self._spec.get(name)
                if requested is None:
                    continue
                given = bound.arguments.get(argument, requested)
                is_scripts = given != requested
                bound.arguments[argument] = (
                    settings.set_by_script(name, given) if is_scripts else settings.effective(name)
                )
            init(*bound.args, **bound.kwargs)
            self._models += 1
            self._finds_unused |= bool(getattr(model, "find_unused_parameters", False))

    def after_update(self, source: Any, number: int) -> None:
        """Report all remaining fields after the first update."""
        if number > 1:
            return
        self._has_meshes = process_meshes.are_used(source)
        for name, value in self._spec.fields().items():
            self._report(name, value)
        # A `_configs` field has the status of its switch.
        for name in self._spec.strategy:
            self._report_configs(name)

    def _report(self, name: str, value: Any) -> None:
        proof = self._proof
        known = proof.known(name, value)
        if settings.script_wins(name):
            self._counted[name] = status = proof.status(name)
            if status is None:
                proof.field(name, SCRIPT)
            does = settings.script_does(name)
            value = None if does else settings.effective(name)
            reason = does or "the script sets it itself"
            proof.put(name, status=SCRIPT, in_effect=value, reason=reason)
        elif proof.status(name) is not None:
            return
        # With other fields that Paddle refuses in some place, it has stopped before an update.
        elif known.get("status") == REFUSED and (name in DTYPES or self._spec.refusal(name, value)):
            proof.field(name, REFUSED, reason=known["reason"])
        elif known.get("status") == NO_DIFFERENCE:
            proof.field(name, NO_DIFFERENCE, in_effect=value, evidence=known["reason"])
        elif name == "find_unused_parameters" and self._finds_unused:
            proof.field(name, EFFECTIVE, in_effect=value, evidence="the reducer looks for them")
        elif not name.endswith("_configs"):
            self._report_unseen(name)

    def _report_unseen(self, name: str) -> None:
        """Report NAME, which nothing has counted: it has no effect, or the count has failed."""
        obstacle = self._obstacle_to(name)
        known = self._proof.known(name, settings.effective(name))
        if obstacle or known.get("status") == NO_EFFECT or not self._proof.failures:
            self._proof.field(name, NO_EFFECT, reason=obstacle or self._reason(name, known))
        else:
            self._proof.field(name, NO_WORD, reason="the check of its effect has failed")

    def _report_configs(self, name: str) -> None:
        if not name.endswith("_configs") or self._proof.status(name) is not None:
            return
        if name in _WITHOUT_SWITCH:
            self._report_without_switch(name)
            return
        switch = name[: -len("_configs")]
        status = self._counted.get(switch, self._proof.status(switch))
        if settings.script_does(switch):
            self._proof.field(name, SCRIPT, reason=f"as {switch}")
        elif not settings.is_on(switch):
            script_wins = settings.script_wins(switch)
            reason = f"the script switches {switch} off" if script_wins else f"{switch} is not on"
            self._proof.field(name, NO_EFFECT, reason=reason)
        elif status is None:
            # Only the script has enabled it, and its effect was not counted.
            known = self._proof.known(switch, settings.effective(switch))
            reason = self._obstacle_to(switch) or self._reason(switch, known)
            self._proof.field(name, NO_EFFECT, reason=reason)
        else:
            is_in_effect = status in {EFFECTIVE, NO_DIFFERENCE}
            effect = settings.effective(name) if is_in_effect else None
            why = {"evidence" if is_in_effect else "reason": f"as {switch}"}
            self._proof.field(name, status, in_effect=effect, **why)

    def _report_without_switch(self, name: str) -> None:
        is_dynamic = self._proof.graph == "dygraph"
        sizes = topology.sizes() if name == "hybrid_configs" and is_dynamic else {}
        degrees = {f"{axis}_degree": size for axis, size in sizes.items()}
        value = settings.effective(name)
        if degrees and all(value[key] in {degrees[key], -1} for key in degrees if key in value):
            self._report_nested(name, value, degrees)
        else:
            self._report_unseen(name)

    def _report_nested(self, name: str, value: Any, degrees: Mapping[str, int]) -> None:
        """Report the field NAME, whose VALUE is in effect except perhaps for settings in it."""
        message = getattr(topology.used_strategy(), name, None)
        misfits = distributed_strategy.misfits
        scripts, idle, in_effect = [], [], []
        for path, requested in self._spec.get(name).items():
            is_default = requested is False
            obstacle = misfits.get(f"{name}.{path}") or hybrid_settings.obstacle(
                path, degrees, is_default=is_default
            )
            if obstacle:
                idle.append(obstacle)
            elif path in degrees or hybrid_settings.used(message, path) == requested:
                in_effect.append(path)
            else:
                scripts.append(path)
        text = "fleet has " + ", ".join(
            [
                *(f"{key} {degree}" for key, degree in degrees.items()),
                *(
                    hybrid_settings.described(message, path)
                    for path in (*in_effect, *scripts)
                    if path not in degrees
                ),
            ]
        )
        text = "; ".join([text, *idle])
        if name in misfits:
            self._proof.field(name, NO_EFFECT, reason=misfits[name])
        elif idle and not in_effect and not scripts:
            self._proof.field(name, NO_EFFECT, reason="; ".join(idle))
        elif scripts:
            reason = f"the script sets {', '.join(scripts)} itself"
            self._proof.field(name, SCRIPT, in_effect=value, reason=reason, evidence=text)
        else:
            self._proof.field(name, EFFECTIVE, in_effect=value, evidence=text)

    def _obstacle_to(self, name: str) -> str:
        """Return what in this job or this Paddle prevents an effect of NAME; empty if nothing."""
        is_dynamic = self._proof.graph == "dygraph"
        missing = paddle_api.refusal(self._capability(name, is_dynamic=is_dynamic))
        if missing or name in distributed_strategy.misfits:
            return missing or distributed_strategy.misfits[name]
        if name == "gradient_merge" and is_dynamic:
            return _NO_STEPS if self._spec.get(name) else _ONLY_STATIC
        if name not in _COMMUNICATION:
            return ""
        if self._spec.topology.nranks == 1:
            return "a single rank has nothing to reduce"
        if parameter_servers.are_used():
            return "with parameter servers, ranks do not reduce gradients among themselves"
        return self._who_sends(is_dynamic=is_dynamic)

    def _reason(self, name: str, known: Mapping[str, Any]) -> str:
        """Return why NAME has no effect; KNOWN is the launcher's outcome for this Paddle."""
        if "unseen" in known:
            return str(known["unseen"])
        if known.get("status") == NO_EFFECT:
            return str(known["reason"])
        if name in self._spec.build_strategy:
            return "it changed nothing in this program"
        where = "dynamic" if self._proof.graph == "dygraph" else "static"
        return f"nothing in Paddle's {where} graphs is known to read it"

    def _who_sends(self, *, is_dynamic: bool) -> str:
        """Return why fleetrun does not send the gradients; empty if it does."""
        senders = [
            f"{sender} sends the gradients itself, {how}" for sender, how in PADDLES_SUMS.items()
        ]
        if senders or self._models or not is_dynamic:
            return next(iter(senders), "")
        shared_axes = {axis: size for axis, size in topology.sizes().items() if size > 1}
        if shared_axes and not {*shared_axes} & {*_SUMMED}:
            layout = " x ".join(f"{axis} {size}" for axis, size in shared_axes.items())
            return f"the layout ({layout}) sums no gradients among ranks"
        if self._has_meshes:
            return "the operators of parameters on process meshes sum the gradients themselves"
        return "the script has no data-parallel model"

    def _capability(self, name: str, *, is_dynamic: bool) -> str:
        """Return the capability of `paddle_api` that the field NAME needs."""
        if is_dynamic and name in _IN_DYNAMIC_GRAPHS:
            return _IN_DYNAMIC_GRAPHS[name]
        if name in _COMMUNICATION:
            return private_names.REDUCER if is_dynamic else private_names.STATIC
        if not is_dynamic and (name == "gradient_merge" or name in self._spec.build_strategy):
            return private_names.STATIC
        return private_names.STRATEGY
