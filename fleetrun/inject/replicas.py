"""The ranks that hold copies of the same parameters, and where the copies differ.

`ModelRanks` (dynamic graphs) exchanges values by collectives of the model's group, `StaticRanks`
through the job's TCP store.
"""

from __future__ import annotations

import os
from typing import Any

from . import store


def world_size() -> int:
    """Return the number of ranks of the job, 1 if it is not known (yet)."""
    text = os.environ.get("PADDLE_TRAINERS_NUM", "")
    return int(text) if text.isdigit() else 1


class ModelRanks:
    """The ranks that share a data-parallel model in a dynamic graph."""

    def __init__(self, model: Any) -> None:
        import paddle

        self._paddle: Any = paddle
        self._group = getattr(model, "group", None)
        own = None if self._group is None else getattr(self._group, "ranks", None)
        self.ranks = list(own) if own else list(range(paddle.distributed.get_world_size()))

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the NUMBERS (int64) of every rank, in the order of `ranks`."""
        paddle = self._paddle
        with paddle.no_grad():
            own = paddle.to_tensor(numbers, dtype="int64")
            rows: list[Any] = []
            paddle.distributed.all_gather(rows, own, group=self._group)
            return [list(map(int, row.numpy())) for row in rows]

    def apart(self, array: Any, ulps: float) -> list[int]:
        """Return how many rows of each rank's ARRAY are not those of the first; see `_apart`."""
        paddle = self._paddle
        with paddle.no_grad():
            first = paddle.to_tensor(array)
            paddle.distributed.broadcast(first, src=self.ranks[0], group=self._group)
            own = _apart(array, first.numpy(), ulps)
        return [row[0] for row in self.gather([own])]


class StaticRanks:
    """All ranks of the job, which run the same static program."""

    # Several programs may be compared, each after its own first update: no key may be used twice.
    _instances = 0

    def __init__(self) -> None:
        StaticRanks._instances += 1
        self._key = f"fleetrun/check/{StaticRanks._instances}"
        self._gathers = 0
        self._rank = int(os.environ["PADDLE_TRAINER_ID"])
        self.ranks = list(range(world_size()))

    def gather(self, numbers: list[Any]) -> list[list[Any]]:
        """Return the NUMBERS of every rank, in the order of `ranks`."""
        self._gathers += 1
        key = f"{self._key}/{self._gathers}"
        rows: list[list[Any]] = store.all_gather(key, numbers, self._rank, self.ranks)
        return rows

    def apart(self, array: Any, ulps: float) -> list[int]:
        """Return how many rows of each rank's ARRAY are not those of rank 0; see `_apart`."""
        import numpy as np

        key = f"{self._key}/{self._gathers}/values"
        shared = store.job_store()
        if self._rank == 0:
            shared.set(key, array.tobytes())
        first = np.frombuffer(bytes(shared.get(key)), dtype=array.dtype).reshape(array.shape)
        return [row[0] for row in self.gather([_apart(array, first, ulps)])]


def _apart(own: Any, first: Any, ulps: float) -> int:
    """Return how many rows of OWN differ from those of FIRST by more than rounding.

    ULPS are the units in the last place of the largest value of FIRST that are rounding. OWN and
    FIRST are numpy arrays of one shape and dtype.

    >>> import numpy as np
    >>> first = np.array([1.0, np.nan, np.inf, 0.0], "float32")
    >>> _apart(first + np.float32(1e-6), first, 10), _apart(first[::-1], first, 10)
    (0, 4)
    """
    import numpy as np

    if own.tobytes() == first.tobytes():
        return 0
    if own.dtype.kind != "f":
        # bfloat16 comes as uint16: the upper half of a float32.
        own, first = (_as_float32(array) for array in (own, first))
        unit = 2.0**-8
    else:
        unit = float(np.finfo(own.dtype).eps)
    own, first = own.astype("float64"), first.astype("float64")
    largest = float(np.max(np.abs(first), where=np.isfinite(first), initial=0.0))
    with np.errstate(invalid="ignore"):
        is_near = np.abs(own - first) <= ulps * unit * largest
    is_same = (own == first) | (np.isnan(own) & np.isnan(first))
    apart = np.atleast_1d(~(is_near | is_same))
    return int(np.count_nonzero(apart.reshape(len(apart), -1).any(axis=1)))


def _as_float32(array: Any) -> Any:
    import numpy as np

    if array.dtype != np.uint16:
        return array
    return (array.astype("uint32") << 16).view("float32")
