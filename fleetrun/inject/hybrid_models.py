"""What fleet's optimizers and group sharding update, and which ranks hold copies of it."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from . import topology, updates
from .import_hooks import after_import, watch_method
from .replicas import DISTRIBUTED, SLICED, GroupRanks, HybridRanks, Part

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_PARALLEL = "paddle.distributed.fleet.meta_parallel"
# By module: the classes of models that know names, shared weights and experts.
_MODELS = {
    f"{_PARALLEL}.meta_parallel_base": "MetaParallelBase",
    f"{_PARALLEL}.parallel_layers.pp_layers": "PipelineLayer",
    f"{_PARALLEL}.sharding.group_sharded_stage2": "GroupShardedStage2",
    f"{_PARALLEL}.sharding.group_sharded_stage3": "GroupShardedStage3",
    "paddle.incubate.distributed.models.moe.moe_layer": "MoELayer",
}
# What wrappers put before the names of a script's model.
_PREFIXES = ("_layers.", "_layer.")
# Attributes of parameters that each rank has its own of.
_EXPERTS = ("no_sync", "expert")
# Switches of sharding: parameters are sent during the next forward.
_LATE = ("_all_gather_overlap_forward", "_broadcast_overlap")
_models: weakref.WeakSet[Any] = weakref.WeakSet()


def watch() -> None:
    """Keep the models that fleet wraps."""
    for module, name in _MODELS.items():
        after_import(module, functools.partial(_patch, name))


def _patch(name: str, module: ModuleType) -> None:
    watch_method(getattr(module, name), "__init__", after=_models.add)


def ranks_of(wrapper: Any) -> GroupRanks | None:
    """Return the ranks that step WRAPPER, an optimizer, at the same time; None if not known."""
    known = topology.groups()
    group = getattr(_sliced(wrapper) or wrapper, "_group", None)
    if group is not None:
        is_fleets = known is not None and (
            list(known.get_sharding_parallel_group().ranks) == list(group.ranks)
        )
        return _hybrid(known) if is_fleets else GroupRanks(group)
    is_fleets = any(updates.own_attribute(each, "_hcg") for each in updates.chain(wrapper))
    return _hybrid(known) if is_fleets and known is not None else None


def is_late(wrapper: Any) -> bool:
    """Whether the parameters are not whole before the next forward of the model."""
    return any(getattr(wrapper, name, False) for name in _LATE)


def parts_of(wrapper: Any) -> dict[str, Part]:
    """Return by name what WRAPPER updates of which other ranks may hold copies."""
    stage3 = _sliced(wrapper)
    whole = {id(each) for each in stage3._unslice_params} if stage3 is not None else None
    experts = _experts()
    names = _names()
    parts = {}
    for each in whole_parameters(wrapper):
        is_expert = any(getattr(each, name, False) for name in _EXPERTS) or id(each) in experts
        if not each.trainable or is_expert or _own_group(each) is not None:
            continue
        kind = DISTRIBUTED if getattr(each, "is_distributed", False) else 0
        if whole is not None and id(each) not in whole:
            kind |= SLICED
        parts[names.get(id(each), each.name)] = Part(each, kind)
    # Those of one kind stand together, in the same order on all ranks that hold copies.
    return dict(sorted(parts.items(), key=lambda each: each[1].kind))


def whole_parameters(wrapper: Any) -> list[Any]:
    """Return all parameters that WRAPPER updates on any rank that shares out the work."""
    stage3 = _sliced(wrapper)
    if stage3 is not None:
        return updates.flat(stage3._ori_parameter_list)
    for each in updates.chain(wrapper):
        for name in ("_origin_parameter_list", "_parameter_list"):
            parameters = updates.own_attribute(each, name)
            if parameters:
                return updates.flat(parameters)
    return []


def shared_weights(
    wrapper: Any,
) -> list[tuple[Any, GroupRanks, Callable[[], dict[str, Part]]]]:
    """Return what some ranks alone share: by whom it is known, these ranks, and the weights.

    Stages of a pipeline share layers, and groups of their own parameters of a colour.
    """
    own = {id(each) for each in whole_parameters(wrapper)}
    called = _names()
    found = []
    for model in _models:
        for key, shared in sorted(getattr(model, "shared_comm", {}).items()):
            names = shared["weight_attr"]
            layer = shared["layer"]
            shared_by_name = {
                name: getattr(layer, name)
                for name in ([names] if isinstance(names, str) else names)
            }
            weights = {
                called.get(id(each), f"{key}.{name}"): Part(each)
                for name, each in shared_by_name.items()
            }
            if all(id(each.parameter) in own for each in weights.values()):
                found.append((layer, GroupRanks(shared["group"]), weights.copy))
    colored: dict[tuple[str, int], tuple[Any, dict[str, Part]]] = {}
    for each in whole_parameters(wrapper):
        group = _own_group(each)
        if each.trainable and group is not None and group.nranks > 1:
            key = (str(each.color.get("color")), int(group.id))
            name = called.get(id(each)) or each.name
            colored.setdefault(key, (group, {}))[1][name] = Part(each)
    for key in sorted(colored):
        group, weights = colored[key]
        found.append((group, GroupRanks(group), weights.copy))
    return found


def _sliced(wrapper: Any) -> Any:
    """Return the GroupShardedStage3 whose parameters WRAPPER updates; None if there is none."""
    return getattr(getattr(wrapper, "update_slice", None), "__self__", None)


@functools.lru_cache(maxsize=1)
def _hybrid(known: Any) -> HybridRanks:
    return HybridRanks(known)


def _names() -> dict[int, str]:
    """Return by id how the script's models call their parameters."""
    return {
        id(each): plain_name(name) for model in _models for name, each in model.named_parameters()
    }


def _experts() -> set[int]:
    """Return the ids of the parameters of experts, which ranks do not share."""
    return {
        id(each)
        for model in _models
        # Without a group all ranks have all experts.
        if hasattr(model, "experts") and getattr(model, "world_size", 1) > 1
        for layer in model.experts
        for each in layer.parameters()
    }


def _own_group(parameter: Any) -> Any:
    """Return the ranks that share out PARAMETER if it has a colour (experts); else None."""
    color = getattr(parameter, "color", None)
    return color.get("group") if isinstance(color, dict) else None


def plain_name(name: str) -> str:
    """Return how the script's own model calls what a wrapper calls NAME."""
    for prefix in _PREFIXES:
        name = name.rpartition(prefix)[2]
    return name
