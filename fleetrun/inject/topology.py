"""Where each rank is in fleet's hybrid topology: (dp 1, mp 0, pp 3)."""

from __future__ import annotations

import os
import sys
from typing import Any

from . import border
from .import_hooks import after_import, watch_method
from .site import rank_records

_MODULE = "paddle.distributed.fleet.base.topology"
# How the axes of fleet's topology are called in `hybrid_configs`, and in what order they are said.
AXES = {"data": "dp", "model": "mp", "pipe": "pp", "sharding": "sharding", "sep": "sep"}


def watch() -> None:
    """Tell the launcher, and the log, where this rank is once fleet has its groups."""
    after_import(
        _MODULE, lambda module: watch_method(module.HybridCommunicateGroup, "__init__", after=tell)
    )


@border.watching("the record of the topology")
def tell(known: Any) -> None:
    """Record the axes of fleet's groups KNOWN, slowest first."""
    topology = known.topology()
    names = topology.get_hybrid_group_names()
    axes = {AXES.get(name, name): int(topology.get_dim(name)) for name in names}
    path = os.environ.get("FLEETRUN_RECORDS", "")
    if path:
        rank_records.append(path, rank_records.TOPOLOGY, {"axes": axes})
    rank = int(known.get_global_rank())
    if _label(rank, known) != f"rank {rank}":
        print(f"fleetrun: this is {_label(rank, known)}", file=sys.stderr)


def groups() -> Any:
    """Return fleet's HybridCommunicateGroup; None if the script has not begun fleet."""
    # The package's name `fleet` is the object, not the module.
    package: Any = sys.modules.get("paddle.distributed.fleet")
    return getattr(getattr(package, "fleet", None), "_hcg", None)


def used_strategy() -> Any:
    """Return the message of the strategy that fleet uses; None without fleet."""
    package: Any = sys.modules.get("paddle.distributed.fleet")
    strategy = getattr(getattr(package, "fleet", None), "_user_defined_strategy", None)
    return getattr(strategy, "strategy", None)


def sizes() -> dict[str, int]:
    """Return the number of ranks along each axis; empty without fleet."""
    known = groups()
    found = {}
    for axis, name in AXES.items():
        ask = getattr(known, f"get_{axis}_parallel_world_size", None)
        if ask is not None:
            found[name] = int(ask())
    return found


def _coordinates(rank: int, known: Any) -> dict[str, int]:
    """Return where RANK is along each axis of several ranks; empty if there is the data axis only.

    Paddle names further axes where experts are spread out.
    """
    topology = known.topology()
    names = topology.get_hybrid_group_names()
    places = topology.get_coord(rank)
    found = {
        AXES.get(name) or name: int(place)
        for name, place in sorted(zip(names, places), key=lambda each: _order(each[0]))
        if topology.get_dim(name) > 1
    }
    return {} if set(found) == {"dp"} else found


def label(rank: int) -> str:
    """Name RANK and where it is: `rank 13 (dp 1, mp 1, pp 0)`."""
    known = groups()
    return f"rank {rank}" if known is None else _label(rank, known)


def _label(rank: int, known: Any) -> str:
    places = ", ".join(f"{axis} {place}" for axis, place in _coordinates(rank, known).items())
    return f"rank {rank} ({places})" if places else f"rank {rank}"


def _order(name: str) -> int:
    return list(AXES).index(name) if name in AXES else len(AXES)
