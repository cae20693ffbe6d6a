"""The place of each rank in fleet's hybrid topology: (dp 1, mp 0, pp 3)."""

from __future__ import annotations

import os
import sys
from typing import Any

from . import border
from .import_hooks import after_import, watch_method
from .site import rank_records

_MODULE = "paddle.distributed.fleet.base.topology"
# The names of fleet's axes in `hybrid_configs`, in the order in which labels list them.
AXES = {"data": "dp", "model": "mp", "pipe": "pp", "sharding": "sharding", "sep": "sep"}


def watch(_paddle: Any) -> None:
    """Record and log this rank's place once fleet has its groups."""
    after_import(_MODULE, _patch)


def _patch(module: Any) -> None:
    # The class of layouts with experts does not call the other's `__init__`, and 2.6 has none.
    for name in ("HybridCommunicateGroup", "EPHybridCommunicateGroup"):
        if hasattr(module, name):
            watch_method(getattr(module, name), "__init__", after=record)


@border.watching("the record of the topology")
def record(fleet_groups: Any) -> None:
    """Record the axes of FLEET_GROUPS, slowest first."""
    topology = fleet_groups.topology()
    axes = dict(zip(_names(topology), map(topology.get_dim, topology.get_hybrid_group_names())))
    path = os.environ.get("FLEETRUN_RECORDS", "")
    if path:
        rank_records.append(path, rank_records.TOPOLOGY, {"axes": axes})
    rank = int(fleet_groups.get_global_rank())
    if _label(rank, fleet_groups) != f"rank {rank}":
        print(f"fleetrun: this is {_label(rank, fleet_groups)}", file=sys.stderr)


def groups() -> Any:
    """Return fleet's HybridCommunicateGroup; None without fleet and in static graphs."""
    # The package's name `fleet` is the object, not the module.
    package: Any = sys.modules.get("paddle.distributed.fleet")
    made = getattr(getattr(package, "fleet", None), "_hcg", None)
    return made if hasattr(made, "topology") else None


def used_setting(field: str, path: str) -> Any:
    """Return the setting PATH, as `mp_configs.sync_grad`, of FIELD in the strategy of fleet."""
    package: Any = sys.modules.get("paddle.distributed.fleet")
    strategy = getattr(getattr(package, "fleet", None), "_user_defined_strategy", None)
    value = getattr(getattr(strategy, "strategy", None), field, None)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def sizes() -> dict[str, int]:
    """Return the number of ranks along each axis; empty without fleet."""
    fleet_groups = groups()
    ranks_by_axis = {}
    for axis, name in AXES.items():
        get_size = getattr(fleet_groups, f"get_{axis}_parallel_world_size", None)
        if get_size is not None:
            ranks_by_axis[name] = int(get_size())
    return ranks_by_axis


def label(rank: int) -> str:
    """Return RANK with its coordinates: `rank 13 (dp 1, mp 1, pp 0)`."""
    fleet_groups = groups()
    return f"rank {rank}" if fleet_groups is None else _label(rank, fleet_groups)


def _label(rank: int, fleet_groups: Any) -> str:
    """Return RANK with its places on axes of several ranks, unless only the data axis has them."""
    topology = fleet_groups.topology()
    sizes = map(topology.get_dim, topology.get_hybrid_group_names())
    entries = zip(_names(topology), topology.get_coord(rank), sizes)
    places = {name: int(place) for name, place, size in entries if size > 1}
    order = [*AXES.values(), *sorted(places)]
    text = ", ".join(f"{name} {places[name]}" for name in sorted(places, key=order.index))
    return f"rank {rank} ({text})" if places.keys() - {"dp"} else f"rank {rank}"


def _names(topology: Any) -> list[str]:
    """Return the names of TOPOLOGY's axes in `hybrid_configs`, in its order.

    With expert parallelism, Paddle splits `sharding` in two: the ranks with copies of an expert,
    and the rest, which share the experts together with `mp`.
    """
    names: list[str] = topology.get_hybrid_group_names()
    own = {**AXES, "dense_sharding": "ep"} if topology.get_dim("model") == 1 else AXES
    return [own.get(name, name) for name in names]
