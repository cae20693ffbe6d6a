"""Snapshots of the parameters of this rank, which `fleetrun verify` compares with another run's.

In `PATH/RANK.jsonl` there is a line for each optimizer and update. Of large models a snapshot has
the checksum of each parameter, and the values of some of its elements.
"""

from __future__ import annotations

import array
import base64
import functools
import gc
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from . import checksums, hybrid_models, rank_check, updates
from .import_hooks import after_import
from .replicas import Part, as_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from .evidence import Evidence

WHAT = "the snapshot of parameters"
# The kind of what no other rank holds: experts, and parts of distributed tensors.
_OWN = -1
# The values of all parameters in a snapshot, and of one parameter at least.
_MOST_VALUES = 100_000
_FEWEST_VALUES = 64
# Units in the last place by which gradients are moved to see what rounding comes to.
_ULPS = 4


class SnapshotSettings(NamedTuple):
    """What `fleetrun verify` asks for, as JSON in $FLEETRUN_VERIFY."""

    # The folder of the snapshots, the last update of this run, and that of the first ones that
    # have snapshots; the last one has one, too.
    path: str
    updates: int
    snapshots: int
    # Gradients of so many steps of the script are added up, as by hand, and averaged.
    merge: int = 1
    averages: bool = True
    # Move gradients in their last places.
    moves: bool = False


def asked() -> SnapshotSettings | None:
    """Return what `fleetrun verify` asks for; None if this is no run of it."""
    text = os.environ.get("FLEETRUN_VERIFY", "")
    return SnapshotSettings(**json.loads(text)) if text else None


def install(wanted: SnapshotSettings, proof: Evidence) -> None:
    """Take snapshots as WANTED says, if this process trains its rank, of which PROOF knows."""
    hybrid_models.watch()
    if wanted.merge > 1:
        _MergeByHand(wanted).install()
    if wanted.moves:
        updates.before_update(_move_gradients, "moving gradients")
    snapshots = _Snapshots(wanted, proof.claim)
    updates.before_update(snapshots.before_update, WHAT)
    updates.on_update(snapshots.after_update, WHAT)


class _Snapshots:
    """Writes what each optimizer has made of its parameters: before its next update, or at the end.

    Some ways of sharding have whole parameters after the next forward only.
    """

    def __init__(self, wanted: SnapshotSettings, claim: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._claim = claim
        self._path = os.path.join(wanted.path, f"{os.environ.get('PADDLE_TRAINER_ID', '0')}.jsonl")
        # By the place in which optimizers and programs came: the update of the last snapshot.
        self._sources: dict[int, Any] = {}
        self._last: dict[int, int] = {}
        self._names: dict[int, str] = {}

    def before_update(self, optimizer: Any) -> None:
        """Write the parameters as they are before an update."""
        if updates.count() <= self._wanted.snapshots:
            self._take(optimizer, updates.count())
        else:
            self._place(optimizer)

    def after_update(self, source: Any, number: int) -> None:
        """Write all parameters after the last update; those of a program after each."""
        is_program = hasattr(source, "global_block")
        if number >= self._wanted.updates:
            self._place(source)
            for each in self._sources.values():
                if is_program or not hybrid_models.is_late(updates.wrapper_of(each)):
                    self._take(each, number)
        elif is_program and number <= self._wanted.snapshots:
            self._take(source, number)

    def _place(self, source: Any) -> int:
        place = next((key for key, known in self._sources.items() if known is source), None)
        if place is None:
            place = len(self._sources)
            self._sources[place] = source
        return place

    def _take(self, source: Any, number: int) -> None:
        place = self._place(source)
        if self._last.get(place) == number or not self._claim():
            return
        self._last[place] = number
        if hasattr(source, "global_block"):
            parts = rank_check.variables_of(source)
        else:
            # Layers may be added later.
            if place not in self._names:
                self._names |= _names()
                self._names[place] = ""
            parts = self._held(source)
        values, sums = _read([part.value for part in parts.values()])
        record = {
            "update": number,
            "optimizer": place,
            "records": os.environ.get("FLEETRUN_RECORDS", ""),
            "names": [*parts],
            "kinds": [part.kind for part in parts.values()],
            "sums": sums,
            "dtypes": [str(part.value.dtype).rpartition(".")[2] for part in parts.values()],
            "sizes": [size for size, _, _ in values],
            "largest": [largest for _, largest, _ in values],
            "values": [base64.b64encode(some.tobytes()).decode() for _, _, some in values],
            "device_bytes": _device_bytes(),
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _held(self, optimizer: Any) -> dict[str, Part]:
        """Return by name what OPTIMIZER updates, with its kind."""
        wrapper = updates.wrapper_of(optimizer)
        shared = {id(part.parameter): part for part in hybrid_models.parts_of(wrapper).values()}
        found: dict[str, Part] = {}
        for each in hybrid_models.whole_parameters(wrapper) or updates.parameters_of(optimizer):
            if not each.trainable:
                continue
            part = shared.get(id(each), Part(each, _OWN))
            name = self._names.get(id(each)) or each.name
            found[name if name not in found else each.name] = part
        return found


def _names() -> dict[int, str]:
    """Return by id how models call their parameters: the largest that has one."""
    import paddle

    base: Any = paddle.nn.Layer
    found: dict[int, str] = {}
    layers = [each for each in gc.get_objects() if issubclass(type(each), base)]
    named = [[*each.named_parameters()] for each in layers if hasattr(each, "training")]
    for parameters in sorted(named, key=len):
        for name, each in parameters:
            found[id(each)] = hybrid_models.plain_name(name)
    return found


def _read(values: list[Any]) -> tuple[list[tuple[int, float, Any]], list[int]]:
    """Return of each of VALUES the size, the largest element and some elements; and checksums."""
    import numpy as np

    # Of static programs they are no eager tensors.
    arrays = [None if hasattr(each, "flatten") else np.array(each) for each in values]
    if any(each is not None for each in arrays):
        sums = [checksums.of_array(each) for each in arrays]
    else:
        sums = checksums.of_tensors(values)
    sizes = [
        int(np.prod(own.shape if own is not None else value.shape))
        for own, value in zip(arrays, values)
    ]
    share = min(1.0, _MOST_VALUES / max(1, sum(sizes)))
    found = []
    for own, value, size in zip(arrays, values, sizes):
        count = min(size, max(_FEWEST_VALUES, int(size * share)))
        places = (np.arange(count, dtype="int64") * size) // max(1, count)
        found.append((size, *_elements(own, value, places)))
    return found, sums


def _elements(own: Any, value: Any, places: Any) -> tuple[float, Any]:
    """Return the largest element of a parameter, and those at PLACES, as an array of doubles."""
    import numpy as np
    import paddle

    if own is None:
        with paddle.no_grad():
            flat = value.detach().flatten()
            if "float" in str(flat.dtype):
                flat = flat.astype("float64" if "64" in str(flat.dtype) else "float32")
            largest = float(flat.abs().max()) if flat.shape[0] else 0.0
            if len(places) < flat.shape[0]:
                flat = paddle.gather(flat, paddle.to_tensor(places))
            own = flat.numpy()
    else:
        own = as_float32(own.reshape(-1))
        largest = float(np.abs(own).max()) if own.size else 0.0
        own = own[places]
    return largest, array.array("d", own.astype("float64").tobytes())


def _device_bytes() -> int | None:
    """Return the most memory of its GPU that Paddle held in this process; None on a CPU."""
    import paddle

    if not paddle.device.is_compiled_with_cuda() or not paddle.device.cuda.device_count():
        return None
    return int(paddle.device.cuda.max_memory_allocated())


def _move_gradients(optimizer: Any) -> None:
    """Change each gradient by some units in its last place, as sums in another order might."""
    import numpy as np
    import paddle

    state = np.random.RandomState(updates.count() + 1)
    pattern = state.randint(-_ULPS, _ULPS + 1, 1 << 12)
    own = updates.parameters_of(optimizer)
    for each in own:
        gradient = each.grad
        if gradient is None or gradient.is_selected_rows() or "float" not in str(gradient.dtype):
            continue
        unit = 2.0**-7 if "bfloat16" in str(gradient.dtype) else 2.0**-10
        if "16" not in str(gradient.dtype):
            unit = 2.0**-52 if "64" in str(gradient.dtype) else 2.0**-23
        factors = 1.0 + unit * np.resize(pattern, gradient.shape)
        with paddle.no_grad():
            paddle.assign(gradient * paddle.to_tensor(factors).astype(gradient.dtype), gradient)


class _MergeByHand:
    """Lets an optimizer step every K-th time, with gradients that plain Paddle has added up."""

    def __init__(self, wanted: SnapshotSettings) -> None:
        self._steps = wanted.merge
        self._averages = wanted.averages
        self._counts: dict[int, int] = {}
        # Parameters whose gradients are being added up, by id.
        self._kept: set[int] = set()
        self._is_updating = False

    def install(self) -> None:
        """Let updates ask us, and keep the gradients that the script clears between them."""
        import paddle

        updates.ask_before(self._is_due)
        updates.on_update(self._end_update, WHAT)
        after_import(f"{updates.DYGRAPH}.dygraph_sharding_optimizer", self._sharing)
        after_import("paddle.distributed.fleet.utils.hybrid_parallel_util", self._summing)
        updates.wrap_subclasses(paddle.optimizer.lr.LRScheduler, self._scheduling)
        for name in ("clear_gradient", "clear_grad"):
            setattr(paddle.Tensor, name, self._unless_kept(getattr(paddle.Tensor, name)))

    def _unless_kept(self, clear: Callable[..., Any]) -> Callable[..., Any]:
        def clear_gradient(tensor: Any, *args: Any, **options: Any) -> Any:
            return None if id(tensor) in self._kept else clear(tensor, *args, **options)

        return clear_gradient

    def _sharing(self, module: Any) -> None:
        for name in ("DygraphShardingOptimizer", "DygraphShardingOptimizerV2"):
            kind = getattr(module, name, None)
            if kind is not None:
                kind.reduce_gradients = self._once(kind.reduce_gradients)

    def _summing(self, module: Any) -> None:
        name = "fused_allreduce_gradients_with_group"
        setattr(module, name, self._once(getattr(module, name)))

    def _once(self, average: Callable[..., None]) -> Callable[..., None]:
        """Call AVERAGE for whole sums only: Trainers do so themselves before each step."""

        @functools.wraps(average)
        def averaged(*args: Any, **options: Any) -> None:
            steps = max(self._counts.values(), default=0)
            if self._is_updating or not (steps + 1) % self._steps:
                average(*args, **options)

        return averaged

    def _scheduling(self, kind: Any) -> None:
        """Let a scheduler that is stepped with each optimizer step advance with updates only."""
        if "step" not in vars(kind):
            return
        step = kind.step
        seen: dict[int, int] = {}

        @functools.wraps(step)
        def scheduled(scheduler: Any, *args: Any, **options: Any) -> None:
            steps = max(self._counts.values(), default=0)
            together = steps - seen.get(id(scheduler), 0) == 1
            seen[id(scheduler)] = steps
            if not (together and steps % self._steps):
                step(scheduler, *args, **options)

        kind.step = scheduled

    def _end_update(self, _source: Any, _number: int) -> None:
        self._is_updating = False

    def _is_due(self, stepped: Any) -> bool:
        """Whether the optimizer STEPPED, perhaps a wrapper, is to update now."""
        import paddle

        own = hybrid_models.whole_parameters(stepped) or updates.parameters_of(stepped)
        ids = {id(each) for each in own}
        count = self._counts[id(stepped)] = self._counts.get(id(stepped), 0) + 1
        if count % self._steps:
            self._kept |= ids
            return False
        self._kept -= ids
        self._is_updating = True
        for each in own if self._averages else ():
            if each.grad is not None:
                with paddle.no_grad():
                    paddle.assign(each.grad / self._steps, each.grad)
        return True
