"""Where each rank is in fleet's hybrid topology: (dp 1, mp 0, pp 3)."""

from __future__ import annotations

import sys
from typing import Any

# How the axes of fleet's topology are called in `hybrid_configs`, and in what order they are said.
AXES = {"data": "dp", "model": "mp", "pipe": "pp", "sharding": "sharding", "sep": "sep"}


def groups() -> Any:
    """Return fleet's HybridCommunicateGroup; None if the script has not begun fleet."""
    # The package's name `fleet` is the object, not the module.
    package: Any = sys.modules.get("paddle.distributed.fleet")
    return getattr(getattr(package, "fleet", None), "_hcg", None)


def sizes() -> dict[str, int]:
    """Return the number of ranks along each axis; empty without fleet."""
    known = groups()
    found = {}
    for axis, name in AXES.items():
        ask = getattr(known, f"get_{axis}_parallel_world_size", None)
        if ask is not None:
            found[name] = int(ask())
    return found


def coordinates(rank: int) -> dict[str, int]:
    """Return where RANK is along each axis of several ranks; empty if there is the data axis only.

    Paddle names further axes where experts are spread out.
    """
    known = groups()
    if known is None:
        return {}
    topology = known.topology()
    names = topology.get_hybrid_group_names()
    places = topology.get_coord(rank)
    found = {
        AXES.get(name, name): int(place)
        for name, place in sorted(zip(names, places), key=lambda each: _order(each[0]))
        if topology.get_dim(name) > 1
    }
    return {} if set(found) == {"dp"} else found


def label(rank: int) -> str:
    """Name RANK and where it is: `rank 13 (dp 1, mp 1, pp 0)`."""
    places = ", ".join(f"{axis} {place}" for axis, place in coordinates(rank).items())
    return f"rank {rank} ({places})" if places else f"rank {rank}"


def _order(name: str) -> int:
    return list(AXES).index(name) if name in AXES else len(AXES)
