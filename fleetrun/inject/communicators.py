"""Communicators of our own for the allreduces of buckets, which overlap with the backward.

A `Communicator` sums tensors over all ranks in the order of its calls. Paddle keeps each gloo
ProcessGroup until the process ends, so communicators are kept, too, and all models share them.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import flight_recorder
from .allreduce_stages import DeviceStages, ThreadStages, flat, hierarchical, run, stop_at_exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .allreduce_stages import Stage, Work

# Ids of our communicators. Paddle counts its own up from 0.
_FIRST_ID = 1 << 20
# The groups that this process has created per set of ranks; all ranks have the same counts.
_created: Counter[tuple[int, ...]] = Counter()
# The communicators by the ranks and the size of groups (0: one level).
_communicators: dict[tuple[tuple[int, ...], int], list[Communicator]] = {}


class Hierarchy(NamedTuple):
    """The groups of a hierarchical allreduce: the ranks of each group, and the groups' leaders."""

    groups: tuple[tuple[int, ...], ...]
    leaders: tuple[int, ...]


def split_ranks(ranks: Sequence[int], size: int) -> Hierarchy:
    """Split RANKS into groups of SIZE; the last group has the remainder.

    >>> split_ranks(range(5), 2)
    Hierarchy(groups=((0, 1), (2, 3), (4,)), leaders=(0, 2, 4))
    """
    groups = tuple(tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))
    return Hierarchy(groups, tuple(group[0] for group in groups))


def _collective() -> Any:
    return sys.modules["paddle.distributed.collective"]


def global_rank() -> int:
    """Return the rank of this process among all ranks of the job."""
    return int(_collective()._get_global_env().rank)


def is_synchronous() -> bool:
    """Whether the backend's collectives block until they are done, as gloo's always do."""
    return bool(_collective()._default_backend == "gloo")


def new_group(ranks: Sequence[int]) -> Any:
    """Return a new ProcessGroup of RANKS; None if this rank is alone or not in it.

    A collective call: all RANKS must make it. `dist.new_group` will not do: it counts its ids on
    member ranks only, so disjoint groups would use the same keys in the store.
    """
    rank = global_rank()
    if len(ranks) <= 1 or rank not in ranks:
        return None
    collective = _collective()
    store = collective._default_store
    # There may be thousands of ranks.
    digest = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    key = f"fleetrun/{digest}/{_created[tuple(ranks)]}"
    _created[tuple(ranks)] += 1
    if rank == ranks[0]:
        # Unique in the whole job.
        store.set(key, str(_FIRST_ID + store.add("fleetrun/communicators/count", 1)))
    number = int(bytes(store.get(key)))
    # For gloo, `gloo_stores` has patched this function.
    group = collective._new_process_group_impl(
        collective._default_backend,
        store=store,
        rank=ranks.index(rank),
        world_size=len(ranks),
        group_name=f"fleetrun_{number}",
        pg_options=None,
        group_id=number,
    )
    flight_recorder.add_group(group, ranks)
    return group


class Communicator:
    """Sums tensors over all ranks, one after the other, by GROUPS.

    GROUPS are the ProcessGroup of all ranks, or the three of two levels; see `hierarchical`.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._stages: Sequence[Stage] = hierarchical(*groups) if len(groups) > 1 else flat(*groups)
        # Runs the stages beside the computation, once that was asked for.
        self._beside: ThreadStages | DeviceStages | None = None
        # The allreduces of buckets so far.
        self.calls = 0

    def all_reduce(self, tensor: Any, *, overlaps: bool) -> Work | None:
        """Begin to sum TENSOR in place over the ranks; return None if the sum is complete.

        OVERLAPS: beside the computation.
        """
        self.calls += 1
        if not overlaps:
            run(self._stages, tensor)
            return None
        if self._beside is None:
            self._beside = self._new_stages()
        return self._beside.submit(tensor)

    def _new_stages(self) -> ThreadStages | DeviceStages:
        if is_synchronous():
            threads = ThreadStages(self._stages)
            stop_at_exit(threads)
            return threads
        device: Any = sys.modules["paddle"].device
        return DeviceStages(self._stages, device.Stream, device.stream_guard)

    def sum_integers(self, numbers: Sequence[int], place: Any) -> list[int]:
        """Return the sums of NUMBERS (int32) over the ranks; not counted in `calls`."""
        import paddle

        # The script may have chosen another device than PLACE.
        tensor = paddle.to_tensor(list(numbers), dtype="int32", place=place)
        run(self._stages, tensor)
        return [int(number) for number in tensor.numpy()]


def take(ranks: Sequence[int], size: int | None, number: int) -> list[Communicator]:
    """Return NUMBER communicators of RANKS, in groups of SIZE if that is given.

    A collective call: all RANKS must make it.
    """
    made = _communicators.setdefault((tuple(ranks), size or 0), [])
    while len(made) < number:
        made.append(Communicator(_groups(ranks, size) if size else [new_group(ranks)]))
    return made[:number]


def _groups(ranks: Sequence[int], size: int) -> list[Any]:
    """Return the ProcessGroups of two levels: of this rank's group, the leaders, and again."""
    hierarchy = split_ranks(ranks, size)
    reducing, broadcasting = (
        next((group for group in map(new_group, hierarchy.groups) if group), None) for _ in range(2)
    )
    return [reducing, new_group(hierarchy.leaders), broadcasting]
