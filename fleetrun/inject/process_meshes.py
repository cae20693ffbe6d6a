"""Finds the ranks that hold copies of parameters on process meshes (auto parallel)."""

from __future__ import annotations

import os
import weakref
from typing import Any

from . import updates
from .replicas import Part, StaticRanks, is_on_mesh

# By optimizer, and by mesh and the axes that split the parameters: the ranks that compare.
_known: weakref.WeakKeyDictionary[Any, dict[str, StaticRanks]] = weakref.WeakKeyDictionary()


def are_used(optimizer: Any) -> bool:
    """Whether OPTIMIZER updates parameters on process meshes."""
    return any(map(is_on_mesh, updates.parameters_of(optimizer)))


def copies(optimizer: Any) -> dict[StaticRanks, dict[str, Part]]:
    """Return the parts that OPTIMIZER updates and other ranks hold, by these ranks.

    In the same order on all ranks.
    """
    parts: dict[str, dict[str, Part]] = {}
    known = _known.setdefault(optimizer, {})
    for parameter in updates.parameters_of(optimizer):
        if not (parameter.trainable and is_on_mesh(parameter)):
            continue
        key, ranks = _peers(parameter)
        if len(ranks) > 1:
            known.setdefault(key, StaticRanks(ranks, f"{len(_known)}/{key}/{ranks[0]}"))
            parts.setdefault(key, {})[parameter.name] = Part(parameter)
    return {known[key]: parts[key] for key in sorted(parts)}


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
