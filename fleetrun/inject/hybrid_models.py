"""The parameters that fleet's optimizers and group sharding update, and the ranks with copies."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from . import topology, updates
from .import_hooks import after_import, watch_method
from .replicas import DISTRIBUTED, SLICED, ComparedRanks, Part, world_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_PARALLEL = "paddle.distributed.fleet.meta_parallel"
# By module: the model classes that have names, shared weights and experts.
_MODELS = {
    f"{_PARALLEL}.meta_parallel_base": "MetaParallelBase",
    f"{_PARALLEL}.parallel_layers.pp_layers": "PipelineLayer",
    f"{_PARALLEL}.sharding.group_sharded_stage2": "GroupShardedStage2",
    f"{_PARALLEL}.sharding.group_sharded_stage3": "GroupShardedStage3",
    "paddle.incubate.distributed.models.moe.moe_layer": "MoELayer",
}
# By axis of fleet's topology: the kinds that it splits. Other axes, such as `pipe`, split all.
_SPLITS = {
    "data": 0,
    "sep": 0,
    "sharding": SLICED,
    "moe_sharding": SLICED,
    "dense_sharding": SLICED,
    "model": DISTRIBUTED,
}
# The prefixes that wrappers add to the names of a script's model.
_PREFIXES = ("_layers.", "_layer.")
# Attributes of parameters that belong to one rank.
_EXPERTS = ("no_sync", "expert")
# Options of sharding that send parameters during the next forward.
_LATE = ("_all_gather_overlap_forward", "_broadcast_overlap")
_models: weakref.WeakSet[Any] = weakref.WeakSet()


def watch() -> None:
    """Record the models that fleet wraps."""
    for module, name in _MODELS.items():
        after_import(module, functools.partial(_patch, name))


def _patch(name: str, module: ModuleType) -> None:
    watch_method(getattr(module, name), "__init__", after=_models.add)


def is_late(wrapper: Any) -> bool:
    """Whether the parameters are only whole after the next forward of the model."""
    return any(getattr(wrapper, name, False) for name in _LATE)


def copies(wrapper: Any) -> Iterator[tuple[ComparedRanks, dict[str, Part]]]:
    """Yield the ranks that hold copies of parameters that WRAPPER updates, and these by name.

    In the same order on all ranks; nothing if WRAPPER is no optimizer of fleet's or of sharding.
    """
    fleet_groups = topology.groups()
    group = getattr(_sliced(wrapper) or wrapper, "_group", None)
    is_fleets = any(
        updates.own_attribute(optimizer, "_hcg") for optimizer in updates.chain(wrapper)
    )
    if group is not None:
        sharding = None if fleet_groups is None else fleet_groups.get_sharding_parallel_group()
        is_fleets = sharding is not None and list(sharding.ranks) == list(group.ranks)
    if is_fleets and fleet_groups is not None:
        ranks_of = functools.partial(_peers, fleet_groups)
    elif group is not None:
        ranks_of = functools.partial(_unsplit, group)
    else:
        return
    parts = parts_of(wrapper)
    for kind in range(4):
        own = {name: part for name, part in parts.items() if part.kind == kind}
        ranks = ranks_of(kind)
        if len(ranks) > 1:
            # Also if there are none of this kind: the other ranks would wait.
            yield ComparedRanks(ranks), own


def _unsplit(group: Any, kind: int) -> list[int]:
    return [] if kind & SLICED else list(group.ranks)


def _peers(fleet_groups: Any, kind: int) -> list[int]:
    """Return the ranks with this rank's coordinates along the axes that split KIND."""
    axes = fleet_groups.topology()
    names = axes.get_hybrid_group_names()
    splitting = [
        index for index, name in enumerate(names) if name not in _SPLITS or kind & _SPLITS[name]
    ]
    own = axes.get_coord(fleet_groups.get_global_rank())
    return [
        rank
        for rank in range(world_size())
        if all(axes.get_coord(rank)[index] == own[index] for index in splitting)
    ]


def parts_of(wrapper: Any) -> dict[str, Part]:
    """Return by name the parameters that WRAPPER updates and that other ranks may hold."""
    stage3 = _sliced(wrapper)
    whole = {id(parameter) for parameter in stage3._unslice_params} if stage3 is not None else None
    experts = _experts()
    names = _names()
    parts = {}
    for parameter in whole_parameters(wrapper):
        color = getattr(parameter, "color", None)
        is_expert = (
            any(getattr(parameter, name, False) for name in _EXPERTS)
            or id(parameter) in experts
            # Shared by a group of its own.
            or (isinstance(color, dict) and color.get("group") is not None)
        )
        if not parameter.trainable or is_expert:
            continue
        kind = DISTRIBUTED if getattr(parameter, "is_distributed", False) else 0
        if whole is not None and id(parameter) not in whole:
            kind |= SLICED
        parts[names.get(id(parameter), parameter.name)] = Part(parameter, kind)
    return parts


def whole_parameters(wrapper: Any) -> list[Any]:
    """Return all parameters that WRAPPER updates, on any rank that it is sharded over."""
    stage3 = _sliced(wrapper)
    if stage3 is not None:
        return updates.flat(stage3._ori_parameter_list)
    for optimizer in updates.chain(wrapper):
        for name in ("_origin_parameter_list", "_parameter_list"):
            parameters = updates.own_attribute(optimizer, name)
            if parameters:
                return updates.flat(parameters)
    return []


def _sliced(wrapper: Any) -> Any:
    """Return the GroupShardedStage3 whose parameters WRAPPER updates, or None."""
    return getattr(getattr(wrapper, "update_slice", None), "__self__", None)


def _names() -> dict[int, str]:
    """Return the names of parameters in the script's models, by id."""
    names: dict[int, str] = {}
    for model in _models:
        for name, parameter in model.named_parameters():
            # The longest is that in the outermost model, on all ranks.
            names[id(parameter)] = max(plain_name(name), names.get(id(parameter), ""), key=len)
    return names


def _experts() -> set[int]:
    """Return the ids of the parameters of experts, of which other ranks have no copies."""
    return {
        id(parameter)
        for model in _models
        # Without a group all ranks have all experts.
        if hasattr(model, "experts") and getattr(model, "world_size", 1) > 1
        for layer in model.experts
        for parameter in layer.parameters()
    }


def plain_name(name: str) -> str:
    """Return the name in the script's own model of what a wrapper calls NAME."""
    for prefix in _PREFIXES:
        name = name.rpartition(prefix)[2]
    return name
