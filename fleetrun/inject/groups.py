"""Keeps the groups of gloo apart, which Paddle connects through one store.

Fleet makes one group after the other of the same ranks. Each puts the ranks' addresses under their
bare numbers, so a rank may find the address that another had in the group before: `Connection
refused`, or ranks that wait for ever (seen in Paddle 2.6.2 and 3.3.1, most often with four ranks).
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

from .dygraph import communicators
from .imports import after_import

if TYPE_CHECKING:
    from types import ModuleType

    from .evidence import Evidence
    from .wish import Wish


def install(asked: Wish, proof: Evidence) -> None:  # noqa: ARG001 - every part's signature
    """Give each group that Paddle connects over gloo a store of its own."""
    if asked.topology.nranks > 1:
        after_import("paddle.distributed.collective", _separate)


def _separate(module: ModuleType) -> None:
    import inspect

    paddles: Any = module
    connect = paddles._new_process_group_impl
    # A group that was destroyed may be made again, and its number with it.
    made: Counter[int] = Counter()

    signature = inspect.signature(connect)

    @functools.wraps(connect)
    def _new_process_group_impl(*words: Any, **named: Any) -> Any:
        bound = signature.bind(*words, **named)
        bound.apply_defaults()
        asked = bound.arguments
        if asked["backend"] == "gloo" and asked["world_size"] > 1:
            number = asked["group_id"]
            # All ranks of a group count alike.
            name = f"paddle/{number}/{made[number]}"
            made[number] += 1
            is_leader = asked["rank"] == 0
            asked["store"] = communicators.own_store(asked["store"], name, is_leader=is_leader)
        return connect(*bound.args, **bound.kwargs)

    paddles._new_process_group_impl = _new_process_group_impl
