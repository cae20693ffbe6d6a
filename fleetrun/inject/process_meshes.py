"""Which ranks hold copies of what auto parallel updates: parameters on process meshes."""

from __future__ import annotations

import os
import weakref
from typing import Any

from . import updates
from .replicas import Part, StaticRanks, is_on_mesh

# By optimizer, mesh and the axes of it along which parameters are cut up: who compares.
_known: weakref.WeakKeyDictionary[Any, dict[str, StaticRanks]] = weakref.WeakKeyDictionary()


def are_used(optimizer: Any) -> bool:
    """Whether OPTIMIZER updates parameters on process meshes."""
    return any(map(is_on_mesh, updates.parameters_of(optimizer)))


def copies(optimizer: Any) -> dict[StaticRanks, dict[str, Part]]:
    """Return what OPTIMIZER updates of which other ranks hold copies, by these ranks.

    In an order that is the same on all ranks.
    """
    parts: dict[str, dict[str, Part]] = {}
    known = _known.setdefault(optimizer, {})
    for each in updates.parameters_of(optimizer):
        if not (each.trainable and is_on_mesh(each)):
            continue
        key, ranks = _peers(each)
        if len(ranks) > 1:
            known.setdefault(key, StaticRanks(ranks, f"{len(_known)}/{key}/{ranks[0]}"))
            parts.setdefault(key, {})[each.name] = Part(each)
    return {known[key]: parts[key] for key in sorted(parts)}


def _peers(parameter: Any) -> tuple[str, list[int]]:
    """Return the mesh and the axes that cut PARAMETER up, and the ranks with our part of it."""
    import numpy as np

    mesh = parameter.process_mesh
    ranks = np.array(mesh.process_ids).reshape(mesh.shape)
    cut = [axis for axis, each in enumerate(parameter.placements) if not each.is_replicated()]
    places = np.argwhere(ranks == int(os.environ["PADDLE_TRAINER_ID"]))
    own = [
        place if axis in cut else slice(None)
        for place in places
        for axis, place in enumerate(place)
    ]
    peers = ranks[tuple(own)].ravel() if own else ()
    return f"{mesh.process_ids}{mesh.shape}{cut}", sorted(map(int, peers))
