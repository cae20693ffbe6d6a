"""Exchange of small values between ranks through the job's TCP store.

Keys are used once: the store keeps every value until the job ends.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def job_store() -> Any:
    """Return the `core.TCPStore` that all ranks of the job share; rank 0 hosts it."""
    from paddle.base import core

    return core.create_or_get_global_tcp_store()


def all_gather(key: str, value: Any, rank: int, ranks: Sequence[int]) -> list[Any]:
    """Return the JSON values that RANKS have set under KEY, in the order of RANKS.

    Waits for every rank. Raises what Paddle's store raises when it times out.
    """
    store = job_store()
    store.set(f"{key}/{rank}", json.dumps(value))
    # The first one puts them together: a thousand ranks need not read a million values.
    if rank == ranks[0]:
        texts = [bytes(store.get(f"{key}/{peer}")).decode() for peer in ranks]
        store.set(key, f"[{', '.join(texts)}]")
    values: list[Any] = json.loads(bytes(store.get(key)))
    store.set(f"{key}/{rank}/done", "1")
    if rank == 0:
        # The store ends with rank 0, so that rank stays until all others have read.
        for peer in ranks:
            store.get(f"{key}/{peer}/done")
    return values
