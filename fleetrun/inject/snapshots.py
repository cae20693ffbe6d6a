"""Snapshots of the parameters of this rank, which `fleetrun verify` compares with another run's.

`PATH/RANK.jsonl` has a line for each optimizer and update. A snapshot of a large model has the
checksum of each parameter, and the values of some of its elements.
"""

from __future__ import annotations

import array
import base64
import json
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from . import checksums, hybrid_models, rank_check, updates
from .replicas import Part, as_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from .evidence import Evidence

WHAT = "the snapshot of parameters"
# The kind of parameters that no other rank holds: experts, and parts of distributed tensors.
_OWN = -1
# The most values in a snapshot, and the fewest of one parameter.
_MOST_VALUES = 100_000
_FEWEST_VALUES = 64
# Units in the last place by which gradients are moved to see the effect of rounding.
_ULPS = 4


class SnapshotSettings(NamedTuple):
    """The request of `fleetrun verify`, as JSON in $FLEETRUN_VERIFY."""

    # The folder of the snapshots; the last update of this run, which gets a snapshot; and how many
    # of the first updates get one.
    path: str
    updates: int
    snapshots: int
    # Change gradients in their last bits.
    moves: bool = False


def requested() -> SnapshotSettings | None:
    """Return the request of `fleetrun verify`, or None."""
    text = os.environ.get("FLEETRUN_VERIFY", "")
    return SnapshotSettings(**json.loads(text)) if text else None


def install(request: SnapshotSettings, proof: Evidence) -> None:
    """Take the snapshots of REQUEST if this process trains its rank, as PROOF knows."""
    hybrid_models.watch()
    if request.moves:
        updates.before_update(_move_gradients, "the change of gradients in their last bits")
    snapshots = _Snapshots(request, proof.claim)
    updates.before_update(snapshots.before_update, WHAT)
    updates.on_update(snapshots.after_update, WHAT)


class _Snapshots:
    """Writes each optimizer's parameters before its next update, or at the end.

    Some ways of sharding have whole parameters only after the next forward.
    """

    def __init__(self, request: SnapshotSettings, claim: Callable[[], bool]) -> None:
        self._request = request
        self._claim = claim
        self._path = os.path.join(request.path, f"{os.environ.get('PADDLE_TRAINER_ID', '0')}.jsonl")
        # By the index of an optimizer or program: the update of the last snapshot.
        self._sources: list[Any] = []
        self._last: dict[int, int] = {}

    def before_update(self, optimizer: Any) -> None:
        """Write the parameters as they are before an update."""
        if updates.count() <= self._request.snapshots:
            self._take(optimizer, updates.count())
        else:
            self._place(optimizer)

    def after_update(self, source: Any, number: int) -> None:
        """Write all parameters after the last update, and those of a program after each."""
        is_program = hasattr(source, "global_block")
        if number >= self._request.updates:
            self._place(source)
            for known in self._sources:
                if is_program or not hybrid_models.is_late(updates.wrapper_of(known)):
                    self._take(known, number)
        elif is_program and number <= self._request.snapshots:
            self._take(source, number)

    def _place(self, source: Any) -> int:
        if source not in self._sources:
            self._sources.append(source)
        return self._sources.index(source)

    def _take(self, source: Any, number: int) -> None:
        place = self._place(source)
        if self._last.get(place) == number or not self._claim():
            return
        self._last[place] = number
        is_program = hasattr(source, "global_block")
        parts = rank_check.variables_of(source) if is_program else _held(source)
        values, sums = _read([part.value for part in parts.values()])
        record = {
            "update": number,
            "optimizer": place,
            "records": os.environ.get("FLEETRUN_RECORDS", ""),
            "ranks": int(os.environ.get("PADDLE_TRAINERS_NUM") or 1),
            "names": [*parts],
            "kinds": [part.kind for part in parts.values()],
            "sums": sums,
            "dtypes": [str(part.value.dtype).rpartition(".")[2] for part in parts.values()],
            "sizes": [size for size, _, _ in values],
            "largest": [largest for _, largest, _ in values],
            "values": [base64.b64encode(elements.tobytes()).decode() for _, _, elements in values],
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _held(optimizer: Any) -> dict[str, Part]:
    """Return by name the parameters that OPTIMIZER updates, with their kinds."""
    wrapper = updates.wrapper_of(optimizer)
    shared = {
        id(part.parameter): (name, part) for name, part in hybrid_models.parts_of(wrapper).items()
    }
    parameters = hybrid_models.whole_parameters(wrapper) or updates.parameters_of(optimizer)
    return dict(
        shared.get(id(parameter), (str(parameter.name), Part(parameter, _OWN)))
        for parameter in parameters
        if parameter.trainable
    )


def _read(values: list[Any]) -> tuple[list[tuple[int, float, Any]], list[int]]:
    """Return size, largest element and some elements of each of VALUES, and the checksums."""
    import numpy as np

    # Values of static programs are not eager tensors.
    shapes = [value.shape if hasattr(value, "flatten") else value.shape() for value in values]
    sizes = [math.prod(shape) for shape in shapes]
    share = min(1.0, _MOST_VALUES / max(1, sum(sizes)))
    rows, sums = [], []
    for value, size in zip(values, sizes):
        # One by one on the host: all of them may not fit.
        own = checksums.as_array(value)
        sums.append(checksums.of_array(own))
        own = as_float32(own.reshape(-1))
        count = min(size, max(_FEWEST_VALUES, int(size * share)))
        places = (np.arange(count, dtype="int64") * size) // max(1, count)
        largest = float(np.abs(own).max()) if size else 0.0
        rows.append((size, largest, array.array("d", own[places].astype("float64").tobytes())))
    return rows, sums


def _move_gradients(optimizer: Any) -> None:
    """Change each gradient by some units in its last place, as sums in another order would."""
    import numpy as np
    import paddle

    state = np.random.RandomState(updates.count() + 1)
    pattern = state.randint(-_ULPS, _ULPS + 1, 1 << 12)
    for parameter in updates.parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is None or gradient.is_selected_rows() or "float" not in str(gradient.dtype):
            continue
        factors = 1.0 + paddle.finfo(gradient.dtype).eps * np.resize(pattern, gradient.shape)
        with paddle.no_grad():
            moved = paddle.to_tensor(factors, place=gradient.place).astype(gradient.dtype)
            paddle.assign(gradient * moved, gradient)
