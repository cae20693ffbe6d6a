"""A TCP store for each gloo group while it connects, instead of one store for all of them.

Paddle's gloo stores the addresses of a group under the bare numbers of its ranks. In a shared store
a rank may read the address that a peer had in an earlier group: `Connection refused`, or a hang
(seen in Paddle 2.6.2 and 3.3.1, mostly with four ranks).

Gloo reads its store only while it connects. So the store ends then, with its thread and its
descriptors, and the next group uses the same port: the one that the launcher planned for the rank.
The first group, of all ranks, finds no other addresses in the shared store and keeps it. This needs
no strategy, so the module imports nothing that is slow.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from .import_hooks import after_import

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .evidence import Evidence
    from .spec import StrategySpec

# How long Paddle's store waits for a key, and a leader for its group, in seconds.
_TIMEOUT_S = 300
_POLL_S = 0.002
_MODULE = "paddle.distributed.collective"
# The stores of groups that did not connect completely.
_unfinished: list[Any] = []


def install(spec: StrategySpec, _proof: Evidence) -> None:
    """Give each gloo group that Paddle creates a store of its own."""
    if spec.topology.nranks > 1:
        after_import(_MODULE, _patch)


def watch(_paddle: Any) -> None:
    """Do the same without a strategy."""
    after_import(_MODULE, _patch)


@contextlib.contextmanager
def new_store(shared: Any, name: int | str, *, size: int, is_leader: bool) -> Iterator[Any]:
    """Yield a `core.TCPStore` in which the SIZE ranks of the group NAME can connect.

    The leader hosts it, and publishes its address in the store SHARED. Leave the context once
    connected; the store ends when all ranks have.
    """
    from paddle.base import core

    key = f"fleetrun/communicators/{name}"
    server = None
    if is_leader:
        with held_end() as (host, port):
            # It waits for one rank, itself. The address is published once it listens: a rank that
            # connects too early sleeps for seconds before it tries again.
            server = core.TCPStore(host, port, True, 1, _TIMEOUT_S)
        shared.set(key, f"{host}:{port}")
    host, _, port_text = bytes(shared.get(key)).decode().rpartition(":")
    yield core.TCPStore(host, int(port_text), False, 1, _TIMEOUT_S)
    connected = shared.add(f"{key}/connected", 1)
    if server is None:
        return
    deadline = time.monotonic() + _TIMEOUT_S
    while connected < size:
        if time.monotonic() > deadline:
            _unfinished.append(server)
            return
        time.sleep(_POLL_S)
        connected = shared.add(f"{key}/connected", 0)


@contextlib.contextmanager
def held_end() -> Iterator[tuple[str, int]]:
    """Yield the host and a port where this rank can listen: the planned port, unless it is in use.

    The port is held in this context, but a server with SO_REUSEADDR, such as Paddle's store, can
    listen on it. Raises OSError if there is no free port.
    """
    host, _, planned = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")
    # Bound and not listening: Paddle 3's store ends the process if it cannot bind.
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("", int(planned)))
        except OSError:
            holder.bind(("", 0))
        yield host, int(holder.getsockname()[1])


def _patch(collective: Any) -> None:
    import inspect

    new_group = collective._new_process_group_impl
    signature = inspect.signature(new_group)
    # The uses of each group id, which is free again when its group is destroyed.
    uses: Counter[int] = Counter()

    @functools.wraps(new_group)
    def _new_process_group_impl(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if arguments["backend"] == "gloo" and arguments["world_size"] > 1:
            number = arguments["group_id"]
            # All ranks of a group have the same counts.
            name = f"paddle/{number}/{uses[number]}"
            uses[number] += 1
            if name != "paddle/0/0":
                shared, is_leader = arguments["store"], arguments["rank"] == 0
                with new_store(
                    shared, name, size=arguments["world_size"], is_leader=is_leader
                ) as arguments["store"]:
                    return new_group(*bound.args, **bound.kwargs)
        return new_group(*bound.args, **bound.kwargs)

    collective._new_process_group_impl = _new_process_group_impl
    # This module imports the name.
    parallel: Any = sys.modules.get("paddle.distributed.parallel")
    if getattr(parallel, "_new_process_group_impl", None) is new_group:
        parallel._new_process_group_impl = _new_process_group_impl
