"""Communicators of our own for the allreduces of buckets, which overlap with the backward.

A `Communicator` sums tensors over all ranks in the order of its calls.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import flight_recorder
from . import store as job_store
from .allreduce_stages import DeviceStages, ThreadStages, flat, hierarchical, run, stop_at_exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .allreduce_stages import Stage, Work

# Ids of our communicators. Paddle counts its own up from 0.
_FIRST_ID = 1 << 20
# The communicators that this process has created per set of ranks; all ranks have the same counts.
_made: Counter[tuple[int, ...]] = Counter()


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


def ranks_together(ranks: Sequence[int], unit: int) -> int:
    """Return the size of groups of RANKS that keeps ranks of the same unit together.

    A unit is UNIT consecutive ranks of the job. A model's RANKS may be some of the job's: every
    second one if two ranks share a model.

    >>> ranks_together([0, 1, 2, 3], 2), ranks_together([1, 3, 5, 7], 4), ranks_together([0, 4], 4)
    (2, 2, 1)
    """
    units = [len(list(same)) for _, same in itertools.groupby(ranks, lambda rank: rank // unit)]
    return functools.reduce(math.gcd, units)


def _collective() -> Any:
    from paddle.distributed import collective

    return collective


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
    is_leader = rank == ranks[0]
    key = f"fleetrun/{_digest(ranks)}/{_made[tuple(ranks)]}"
    _made[tuple(ranks)] += 1
    if is_leader:
        # Unique in the whole job.
        store.set(key, str(_FIRST_ID + store.add("fleetrun/communicators/count", 1)))
    number = int(bytes(store.get(key)))
    create = functools.partial(
        collective._new_process_group_impl,
        collective._default_backend,
        rank=ranks.index(rank),
        world_size=len(ranks),
        group_name=f"fleetrun_{number}",
        pg_options=None,
        group_id=number,
    )
    # For gloo, `gloo_stores` has patched this function.
    group = create(store=store)
    flight_recorder.add_group(group, ranks)
    return group


def _digest(ranks: Sequence[int]) -> str:
    """Return a short name for RANKS, of which there may be thousands."""
    import hashlib

    return hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]


class Communicator:
    """Sums tensors at PLACE over all ranks, one after the other, by GROUPS.

    GROUPS are the ProcessGroup of all ranks, or the three of two levels; see `hierarchical`. With
    OVERLAPS it sums while the computation goes on.
    """

    def __init__(self, groups: Sequence[Any], place: Any, *, overlaps: bool) -> None:
        self.groups = [group for group in groups if group is not None]
        self.place = place
        self._stages: Sequence[Stage] = (
            hierarchical(*groups) if len(groups) > 1 else flat(*self.groups)
        )
        # The allreduces of the model that holds it, and of all models before.
        self.calls = self._former_calls = 0
        # No model uses it.
        self.is_free = False
        # A backward has raised, so this rank may have begun more allreduces than the others.
        self.is_spoiled = False
        # Sums while the computation continues; None if sums block.
        self._beside: ThreadStages | DeviceStages | None = None
        self.take(overlaps=overlaps)

    @property
    def all_calls(self) -> int:
        """The number of allreduces of all models that have used it."""
        return self._former_calls + self.calls

    def take(self, *, overlaps: bool) -> None:
        """Assign it to a model."""
        self._former_calls, self.calls = self.all_calls, 0
        self.is_free = False
        if not overlaps:
            self._beside = None
        elif is_synchronous():
            self._beside = ThreadStages(self._stages)
            stop_at_exit(self._beside)
        else:
            self._beside = _device_stages(self._stages)

    def release(self) -> None:
        """Return it to the pool; its threads end after the submitted work."""
        if isinstance(self._beside, ThreadStages):
            self._beside.end()
        self._beside = None
        self.is_free = not self.is_spoiled

    def all_reduce(
        self, tensor: Any, *, is_only: bool = False, root: int | None = None
    ) -> Work | None:
        """Begin to sum TENSOR in place over the ranks; return None if the sum is complete.

        IS_ONLY: the backward has no other allreduce, so a thread would not help. With a ROOT (one
        level only) only the rank at that index gets the sum.
        """
        self.calls += 1
        if self._beside is None or (is_only and isinstance(self._beside, ThreadStages)):
            run(self._stages, tensor, root)
            return None
        return self._beside.submit(tensor, root)

    def zeros(self, nbytes: int) -> Any:
        """Return a tensor of NBYTES of zeros to sum."""
        import numpy as np
        import paddle

        return paddle.to_tensor(np.zeros(max(nbytes // 4, 1), "float32"), place=self.place)

    def sum_integers(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of NUMBERS (int32) over the ranks; not counted in `calls`."""
        import paddle

        # The script may have chosen another device.
        tensor = paddle.to_tensor(list(numbers), dtype="int32", place=self.place)
        sum_uncounted([self], [tensor])
        return [int(number) for number in tensor.numpy()]


def sum_uncounted(communicators: Sequence[Communicator], tensors: Sequence[Any]) -> None:
    """Sum TENSORS in place over COMMUNICATORS in turn, and wait for all; not counted in `calls`."""
    works = []
    for index, tensor in enumerate(tensors):
        communicator = communicators[index % len(communicators)]
        works.append(communicator.all_reduce(tensor))
        communicator.calls -= 1
    for work in works:
        if work is not None:
            work.wait()


def _device_stages(stages: Sequence[Stage]) -> DeviceStages:
    import paddle

    return DeviceStages(stages, paddle.device.Stream, paddle.device.stream_guard)


class Pool:
    """The communicators of all models, in the order of creation.

    Paddle keeps every ProcessGroup of gloo until the process ends. So a new model reuses those of
    deleted models.
    """

    def __init__(self) -> None:
        # By the ranks and the size of groups; each list is the same on all of these ranks.
        self._made: dict[tuple[tuple[int, ...], int], list[Communicator]] = {}
        # Groups of leaders that were created to measure, by the ranks and the size of groups.
        self._leaders: dict[tuple[tuple[int, ...], int], list[Any]] = {}
        self._exchanges = 0

    @property
    def calls(self) -> int:
        """The number of allreduces so far, of all models."""
        return sum(held.all_calls for several in self._made.values() for held in several)

    def leaders(self, ranks: Sequence[int], size: int) -> Any:
        """Return a ProcessGroup of the leaders of groups of SIZE among RANKS; None if not a leader.

        The next communicator of two levels uses it. A collective call: all RANKS must make it.
        """
        groups = self._leaders.setdefault((tuple(ranks), size), [])
        if not groups:
            groups.append(new_group(split_ranks(ranks, size).leaders))
        return groups[0]

    def take(
        self, ranks: Sequence[int], size: int | None, number: int, place: Any, *, overlaps: bool
    ) -> list[Communicator]:
        """Return NUMBER communicators of RANKS for tensors at PLACE, in groups of SIZE if given.

        A collective call: all RANKS must make it.
        """
        key = (tuple(ranks), size or 0)
        made = self._made.setdefault(key, [])
        taken = [made[index] for index in self._agreed(made, ranks)[:number]]
        for communicator in taken:
            communicator.take(overlaps=overlaps)
        while len(taken) < number:
            if size is None:
                groups = [new_group(ranks)]
            else:
                leaders = self._leaders.pop(key, [])
                hierarchy = split_ranks(ranks, size)
                reducing, broadcasting = (
                    next((group for group in map(new_group, hierarchy.groups) if group), None)
                    for _ in range(2)
                )
                groups = [reducing, *(leaders or [new_group(hierarchy.leaders)]), broadcasting]
            taken.append(Communicator(groups, place, overlaps=overlaps))
            made.append(taken[-1])
        return taken

    def free_unused(self, ranks: Sequence[int], size: int) -> None:
        """Free the communicators that were created to measure groups of SIZE among RANKS.

        Paddle 3 can do so on GPUs. All RANKS must make this call, with no collective pending.
        """
        key = (tuple(ranks), size)
        made = self._made.get(key, [])
        unused = [made[index] for index in self._agreed(made, ranks)]
        groups = [*self._leaders.pop(key, []), *(group for free in unused for group in free.groups)]
        for group in groups:
            if group is not None:
                group.shutdown()
        self._made[key] = [communicator for communicator in made if communicator not in unused]

    def _agreed(self, made: list[Communicator], ranks: Sequence[int]) -> list[int]:
        """Return the indexes of communicators of MADE that are free on all RANKS."""
        if not made:
            return []
        if not all(communicator.is_free for communicator in made):
            # A model and its optimizer often hold each other.
            gc.collect()
        free = [index for index, communicator in enumerate(made) if communicator.is_free]
        self._exchanges += 1
        key = f"fleetrun/pool/{_digest(ranks)}/{len(made)}/{self._exchanges}"
        free_by_rank = job_store.all_gather(key, free, global_rank(), ranks)
        return sorted(set(free).intersection(*free_by_rank))


def release(communicators: Sequence[Communicator]) -> None:
    """Return COMMUNICATORS to the pool."""
    for communicator in communicators:
        communicator.release()
