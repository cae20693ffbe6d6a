"""Exchange of small values between ranks through the job's TCP store.

Keys are used once: the store keeps every value until the job ends.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Any

from .import_hooks import after_import, in_place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


def job_store() -> Any:
    """Return the `core.TCPStore` that all ranks of the job share; rank 0 hosts it."""
    from paddle.base import core

    return core.create_or_get_global_tcp_store()


def when_connected(callback: Callable[[], None]) -> None:
    """Call CALLBACK as soon as the ranks of a dynamic graph are connected."""
    after_import("paddle.distributed.parallel", functools.partial(_await_ranks, callback))


def _await_ranks(callback: Callable[[], None], module: ModuleType) -> None:
    package: Any = sys.modules["paddle.distributed"]
    is_called = False

    def init_parallel_env(init: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_called
        group = init(*args, **kwargs)
        if not is_called and package.get_world_size() > 1:
            is_called = True
            callback()
        return group

    for owner in (package, module):
        in_place_of(owner, "init_parallel_env")(init_parallel_env)


def all_gather(key: str, value: Any, rank: int, ranks: Sequence[int]) -> list[Any]:
    """Return the JSON values that RANKS have set under KEY, in the order of RANKS.

    Waits for every rank. Raises what Paddle's store raises when it times out.
    """
    store = job_store()
    store.set(f"{key}/{rank}", json.dumps(value))
    values = [json.loads(bytes(store.get(f"{key}/{peer}"))) for peer in ranks]
    store.set(f"{key}/{rank}/done", "1")
    if rank == 0:
        # The store ends with rank 0, so that rank stays until all others have read.
        for peer in ranks:
            store.get(f"{key}/{peer}/done")
    return values
