"""Finds the ranks that hold copies of parameters on process meshes (auto parallel)."""

from __future__ import annotations

import os
from typing import Any

from . import updates
from .replicas import ComparedRanks, Part, is_on_mesh


def are_used(optimizer: Any) -> bool:
    """Whether OPTIMIZER updates parameters on process meshes."""
    return any(map(is_on_mesh, updates.parameters_of(optimizer)))


def copies(optimizer: Any) -> list[tuple[ComparedRanks, dict[str, Part]]]:
    """Return the parts that OPTIMIZER updates and other ranks hold, each with these ranks.

    In the same order on all ranks.
    """
    by_key: dict[str, tuple[ComparedRanks, dict[str, Part]]] = {}
    for parameter in updates.parameters_of(optimizer):
        if parameter.trainable and is_on_mesh(parameter):
            key, ranks = _peers(parameter)
            if len(ranks) > 1:
                _, parts = by_key.setdefault(key, (ComparedRanks(ranks), {}))
                parts[parameter.name] = Part(parameter)
    return [by_key[key] for key in sorted(by_key)]


def _peers(parameter: Any) -> tuple[str, list[int]]:
    """Return the mesh and the axes that split PARAMETER, and the ranks that hold our part of it."""
    import numpy as np

    mesh = parameter.process_mesh
    ranks = np.array(mesh.process_ids).reshape(mesh.shape)
    cut = [axis for axis, split in enumerate(parameter.placements) if not split.is_replicated()]
    places = np.argwhere(ranks == int(os.environ["PADDLE_TRAINER_ID"]))
    own = [
        place if axis in cut else slice(None)
        for place in places
        for axis, place in enumerate(place)
    ]
    peers = ranks[tuple(own)].ravel() if own else ()
    return f"{mesh.process_ids}{mesh.shape}{cut}", sorted(map(int, peers))
