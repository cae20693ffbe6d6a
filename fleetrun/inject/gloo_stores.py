"""A TCP store for each gloo group, instead of one store for all of them.

Paddle's gloo stores the addresses of a group under the bare numbers of its ranks. In a shared
store a rank may read the address that a peer had in an earlier group: `Connection refused`, or
ranks that wait for each other for ever (seen in Paddle 2.6.2 and 3.3.1, mostly with four ranks).
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from .import_hooks import after_import

if TYPE_CHECKING:
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

# How long Paddle's store waits for a key, in seconds.
_TIMEOUT_S = 300
# A store must live as long as its group; Paddle keeps no reference to it.
_stores: list[Any] = []


def install(spec: StrategySpec, _proof: Evidence) -> None:
    """Give each gloo group that Paddle creates a store of its own."""
    if spec.topology.nranks > 1:
        after_import("paddle.distributed.collective", _patch)


def new_store(shared: Any, name: int | str, *, is_leader: bool) -> Any:
    """Return a new `core.TCPStore` for the group NAME.

    The leader hosts it and publishes its address in the store SHARED.
    """
    from paddle.base import core

    key = f"fleetrun/communicators/{name}"
    if is_leader:
        host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        # It waits for one rank, itself. Its address is published once it listens: a rank that
        # connects too early sleeps for seconds before it tries again.
        own = core.TCPStore(host, port, True, 1, _TIMEOUT_S)
        shared.set(key, f"{host}:{port}")
    else:
        host, _, port_text = bytes(shared.get(key)).decode().rpartition(":")
        own = core.TCPStore(host, int(port_text), False, 1, _TIMEOUT_S)
    _stores.append(own)
    return own


def _patch(module: ModuleType) -> None:
    import inspect

    collective: Any = module
    new_group = collective._new_process_group_impl
    signature = inspect.signature(new_group)
    # How often each group id was used: it is free again when its group is destroyed.
    uses: Counter[int] = Counter()

    @functools.wraps(new_group)
    def _new_process_group_impl(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["backend"] == "gloo" and given["world_size"] > 1:
            number = given["group_id"]
            # All ranks of a group count alike.
            name = f"paddle/{number}/{uses[number]}"
            uses[number] += 1
            given["store"] = new_store(given["store"], name, is_leader=given["rank"] == 0)
        return new_group(*bound.args, **bound.kwargs)

    collective._new_process_group_impl = _new_process_group_impl
    # It is a name of this module, too.
    parallel: Any = sys.modules.get("paddle.distributed.parallel")
    if getattr(parallel, "_new_process_group_impl", None) is new_group:
        parallel._new_process_group_impl = _new_process_group_impl
