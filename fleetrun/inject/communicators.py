"""Communicators of our own for the allreduces of buckets, which run beside the backward.

A `Communicator` sums tensors over all ranks, in the order in which they are given to it. With NCCL
the sums run on the device. gloo's collectives block, so a `CommThread` runs them.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from . import gloo_stores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Ids of our communicators. Paddle counts its own up from 0.
_FIRST_ID = 1 << 20
# Ids reserved for one model, and the number of first ranks that are told apart.
_IDS_PER_MODEL, _MAX_FIRST_RANKS = 64, 4096
# How long a rank waits at exit for its allreduce under way, in seconds. Ranks may wait for each
# other: rank 0 gives up first, which fails the allreduces of the others. The launcher kills after
# ten seconds.
_EXIT_WAIT_RANK_0_S, _EXIT_WAIT_S = 1.0, 5.0


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


class CommunicatorIds:
    """The ids of one model's communicators: equal on all ranks of the model, used by no other."""

    def __init__(self, model: int, ranks: Sequence[int]) -> None:
        first_rank = ranks[0] % _MAX_FIRST_RANKS
        self._next = _FIRST_ID + (model * _MAX_FIRST_RANKS + first_rank) * _IDS_PER_MODEL

    def take(self) -> int:
        """Return the next id. Every rank must take the ids in the same order."""
        self._next += 1
        return self._next


def _collective() -> Any:
    from paddle.distributed import collective

    return collective


def global_rank() -> int:
    """Return the rank of this process among all ranks of the job."""
    return int(_collective()._get_global_env().rank)


def is_synchronous() -> bool:
    """Whether the backend's collectives block until they are done, as gloo's always do."""
    return bool(_collective()._default_backend == "gloo")


def new_group(ranks: Sequence[int], number: int) -> Any:
    """Return a new ProcessGroup of RANKS with the id NUMBER; None if this rank is alone or not in.

    `dist.new_group` is no choice: it counts its ids on member ranks only, so groups without a
    common rank would use the same keys in the store.
    """
    rank = global_rank()
    if len(ranks) <= 1 or rank not in ranks:
        return None
    collective = _collective()
    store = collective._default_store
    if is_synchronous():
        store = gloo_stores.new_store(store, number, is_leader=rank == ranks[0])
    return collective._new_process_group_impl(
        collective._default_backend,
        store,
        ranks.index(rank),
        len(ranks),
        f"fleetrun_{number}",
        None,
        group_id=number,
    )


class FlatAllReduce:
    """An allreduce among all ranks of one ProcessGroup."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def tasks(self, tensor: Any) -> Iterator[Any]:
        """Sum TENSOR over all ranks in place; each yielded task is waited for before the next."""
        from paddle.base.core import ReduceOp

        yield self._group.all_reduce(tensor, ReduceOp.SUM, False)


class HierarchicalAllReduce:
    """Reduce to the leader of each group, allreduce among the leaders, broadcast in each group.

    GROUP is this rank's group, None if the rank is alone in it. LEADERS is None for all others.
    """

    def __init__(self, group: Any, leaders: Any) -> None:
        self._group = group
        self._leaders = leaders

    def tasks(self, tensor: Any) -> Iterator[Any]:
        """Sum TENSOR over all ranks in place; each yielded task is waited for before the next."""
        from paddle.base.core import ReduceOp

        if self._group is not None:
            yield self._group.reduce(tensor, 0, ReduceOp.SUM, False)
        if self._leaders is not None:
            yield self._leaders.all_reduce(tensor, ReduceOp.SUM, False)
        if self._group is not None:
            yield self._group.broadcast(tensor, 0, False)


def new_hierarchical(hierarchy: Hierarchy, ids: CommunicatorIds) -> HierarchicalAllReduce:
    """Connect this rank to its group, and the leaders with each other."""
    # Every rank takes an id for each group, whether it is a member or not.
    groups = [new_group(group, ids.take()) for group in hierarchy.groups]
    own = next((group for group in groups if group is not None), None)
    return HierarchicalAllReduce(own, new_group(hierarchy.leaders, ids.take()))


class DeviceWork:
    """An allreduce whose first task runs on the device."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._tasks = tasks
        self._current = next(tasks, None)

    def wait(self) -> None:
        """Issue the remaining tasks, and wait for all."""
        while self._current is not None:
            self._current.wait()
            self._current = next(self._tasks, None)


class ThreadWork:
    """An allreduce that a `CommThread` runs."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._tasks = tasks
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the allreduce in the calling thread."""
        try:
            for task in self._tasks:
                task.wait()
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._done.release()

    def wait(self) -> None:
        """Wait until `run` has ended; raise what it raised."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class CommThread:
    """A daemon thread that runs works one after the other, in the order of `submit`."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, work: ThreadWork) -> None:
        """Run WORK after those submitted before it."""
        self._works.put(work)

    def stop(self, timeout_s: float) -> None:
        """Start no further work; wait at most TIMEOUT_S for the one under way."""
        self._is_stopping = True
        self._works.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while not self._is_stopping:
            work = self._works.get()
            if work is not None:
                work.run()


_threads: list[CommThread] = []


def _stop_threads() -> None:
    """Stop the threads before Python ends: one that returns from C++ later aborts the process."""
    is_rank_0 = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    until = time.monotonic() + (_EXIT_WAIT_RANK_0_S if is_rank_0 else _EXIT_WAIT_S)
    for thread in _threads:
        thread.stop(max(0.0, until - time.monotonic()))


class Communicator:
    """Sums tensors over all ranks, one after the other; with OVERLAPS beside the computation."""

    def __init__(self, algorithm: FlatAllReduce | HierarchicalAllReduce, *, overlaps: bool) -> None:
        self._algorithm = algorithm
        self._overlaps = overlaps
        # The number of allreduces so far.
        self.calls = 0
        self._thread: CommThread | None = None
        if overlaps and is_synchronous():
            self._thread = CommThread()
            if not _threads:
                atexit.register(_stop_threads)
            _threads.append(self._thread)

    def all_reduce(self, tensor: Any, *, is_only: bool = False) -> DeviceWork | ThreadWork | None:
        """Begin to sum TENSOR in place over the ranks; return None if that is done already.

        IS_ONLY: the backward has no other allreduce, so a thread would only be waited for.
        """
        self.calls += 1
        tasks = self._algorithm.tasks(tensor)
        if self._overlaps and self._thread is None:
            return DeviceWork(tasks)
        if self._thread is None or is_only:
            for task in tasks:
                task.wait()
            return None
        work = ThreadWork(tasks)
        self._thread.submit(work)
        return work

    def sum_integers(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of NUMBERS (int32) over the ranks; not counted in `calls`."""
        import paddle

        tensor = paddle.to_tensor(list(numbers), dtype="int32")
        work = self.all_reduce(tensor)
        self.calls -= 1
        if work is not None:
            work.wait()
        return [int(number) for number in tensor.numpy()]
