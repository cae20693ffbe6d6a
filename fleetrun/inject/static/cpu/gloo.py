"""Makes gloo communicators for static programs of ranks that train on CPUs.

Paddle refuses static data parallelism there: it has the kernels, but its builds for CPUs create no
communicator, and those for GPUs create NCCL's, which CPUs cannot use.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import types
from typing import TYPE_CHECKING, Any

from ... import store_wait
from ...evidence import device_kind
from ...import_hooks import in_place_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...evidence import Evidence

# They synchronise GPU streams; a CPU has none.
STREAMS = ("c_sync_calc_stream", "c_sync_comm_stream")
_POLL_S = 0.05
# Paddle keeps these as long as they are referenced.
_open: dict[int, Any] = {}


def is_used() -> bool:
    """Whether ranks of this process were connected here."""
    return bool(_open)


def connect(module: Any, proof: Evidence) -> None:
    """Replace Paddle's communicators by gloo's for ranks that train on the CPU."""

    @in_place_of(module.CollectiveHelper, "_init_communicator")
    def _init_communicator(  # noqa: PLR0917 - Paddle's
        paddles: Any,
        self: Any,
        program: Any,
        current_endpoint: str | None,
        endpoints: Sequence[str] | None,
        rank: int,
        ring_id: int,
        *more: Any,
        **named: Any,
    ) -> None:
        if device_kind() != "cpu":
            paddles(self, program, current_endpoint, endpoints, rank, ring_id, *more, **named)
            return
        # Without an endpoint the call is a mere barrier, and connecting gloo is one, too.
        if current_endpoint is None or endpoints is None or ring_id in _open:
            return
        proof.note(
            "Paddle refuses static data parallel on CPUs: fleetrun connected the ranks over gloo."
        )
        world = os.environ.get("PADDLE_TRAINERS_NUM", "")
        if str(len(endpoints)) != world:
            raise RuntimeError(
                f"fleetrun connects static programs on CPUs among all {world} ranks only, not in "
                f"groups of {len(endpoints)}: Paddle's kernels there share one communicator."
            )
        _open[ring_id] = _communicator(ring_id, rank, list(endpoints))


def _communicator(ring: int, rank: int, endpoints: list[str]) -> Any:
    from paddle.base import core

    paddle: Any = sys.modules["paddle"]
    if paddle.__version__.startswith("2.") and not _open:
        # Paddle 2's kernels reduce over one global gloo, whatever the ring.
        if rank:
            # Paddle would print each attempt.
            host, _, port = endpoints[0].rpartition(":")
            store_wait.wait(host, int(port))
        with _short_polls():
            paddle.distributed.gloo_init_parallel_env(rank, len(endpoints), endpoints[0])
    store = core.create_or_get_global_tcp_store()
    core.CommContextManager.create_gloo_comm_context(store, str(ring), rank, len(endpoints))
    return store


@contextlib.contextmanager
def _short_polls() -> Iterator[None]:
    """Let Paddle 2 poll more often than every three seconds for what takes milliseconds."""
    names = ("parallel_with_gloo", "fleet.base.private_helper_function")
    modules = [importlib.import_module(f"paddle.distributed.{name}") for name in names]
    # The server process is forked meanwhile, and inherits this.
    fast = types.SimpleNamespace(sleep=lambda _seconds: time.sleep(_POLL_S))
    for module in modules:
        setattr(module, "time", fast)  # noqa: B010 - for mypy
    try:
        yield
    finally:
        for module in modules:
            setattr(module, "time", time)  # noqa: B010
