"""Communicators of our own for the allreduces of buckets, which run beside the backward.

A `Communicator` sums tensors over all ranks, in the order in which they are given to it. With NCCL
the sums run on the device. gloo's collectives block, so a `CommThread` runs them.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import queue
import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import store as job_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Ids of our communicators. Paddle counts its own up from 0.
_FIRST_ID = 1 << 20
# How many communicators this process has made among the same ranks: all of them count alike.
_made: Counter[tuple[int, ...]] = Counter()
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
    """Return a new ProcessGroup of RANKS; None if this rank is alone or not in.

    All RANKS must call it alike. `dist.new_group` is no choice: it counts its ids on member ranks
    only, so groups without a common rank would use the same keys in the store.
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
        # Of all ranks of the job: no two groups get the same.
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
    return create(store=store)


def _digest(ranks: Sequence[int]) -> str:
    """Return a short name for RANKS, of which there may be thousands."""
    import hashlib

    return hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]


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


def new_hierarchical(hierarchy: Hierarchy) -> HierarchicalAllReduce:
    """Connect this rank to its group, and the leaders with each other."""
    groups = [new_group(group) for group in hierarchy.groups]
    own = next((group for group in groups if group is not None), None)
    return HierarchicalAllReduce(own, new_group(hierarchy.leaders))


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
        self._stopping = threading.Event()
        # The thread must not hold this object, which would then never go.
        self._thread = threading.Thread(
            target=_serve, args=(self._works, self._stopping), daemon=True
        )
        self._thread.start()

    def submit(self, work: ThreadWork) -> None:
        """Run WORK after those submitted before it."""
        self._works.put(work)

    def end(self) -> None:
        """End the thread after the works that were submitted."""
        self._works.put(None)

    def stop(self, timeout_s: float) -> None:
        """Start no further work; wait at most TIMEOUT_S for the one under way."""
        self._stopping.set()
        self._works.put(None)
        self._thread.join(timeout_s)


def _serve(works: queue.SimpleQueue[ThreadWork | None], stopping: threading.Event) -> None:
    while not stopping.is_set():
        work = works.get()
        if work is None:
            return
        work.run()
        del work


_threads: weakref.WeakSet[CommThread] = weakref.WeakSet()


def _stop_threads() -> None:
    """Stop the threads before Python ends: one that returns from C++ later aborts the process."""
    is_rank_0 = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    until = time.monotonic() + (_EXIT_WAIT_RANK_0_S if is_rank_0 else _EXIT_WAIT_S)
    for thread in list(_threads):
        thread.stop(max(0.0, until - time.monotonic()))


class Communicator:
    """Sums tensors over all ranks, one after the other; with OVERLAPS beside the computation."""

    def __init__(self, algorithm: FlatAllReduce | HierarchicalAllReduce, *, overlaps: bool) -> None:
        self._algorithm = algorithm
        self._overlaps = overlaps
        # The number of allreduces of the model that has it, and of all models before.
        self.calls = self._former_calls = 0
        # No model has it.
        self.is_free = False
        # A backward has raised: this rank may have begun more allreduces than others.
        self.is_spoiled = False
        self._thread: CommThread | None = None
        self.take(overlaps=overlaps)

    @property
    def all_calls(self) -> int:
        """The number of allreduces of all models that have had it."""
        return self._former_calls + self.calls

    def take(self, *, overlaps: bool) -> None:
        """Let a model have it."""
        self._former_calls, self.calls = self.all_calls, 0
        self.is_free = False
        self._overlaps = overlaps
        if overlaps and is_synchronous():
            self._thread = CommThread()
            if not _threads:
                atexit.unregister(_stop_threads)
                atexit.register(_stop_threads)
            _threads.add(self._thread)

    def release(self) -> None:
        """Let another model have it; its thread ends after the work that was submitted."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None
        self.is_free = not self.is_spoiled

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


class Pool:
    """The communicators that models have made, in the order in which they were made.

    Paddle keeps every ProcessGroup of gloo until the process ends, in tables that cannot be
    emptied. So a model takes what models that are gone have left.
    """

    def __init__(self) -> None:
        # By the ranks and the size of groups; each list is alike on all of these ranks.
        self._made: dict[tuple[tuple[int, ...], int], list[Communicator]] = {}
        self._exchanges = 0

    @property
    def calls(self) -> int:
        """The number of allreduces so far, of all models."""
        return sum(each.all_calls for made in self._made.values() for each in made)

    def take(
        self, ranks: Sequence[int], size: int | None, number: int, *, overlaps: bool
    ) -> list[Communicator]:
        """Return NUMBER communicators of RANKS, hierarchical in groups of SIZE if it is given.

        All RANKS must call it alike.
        """
        made = self._made.setdefault((tuple(ranks), size or 0), [])
        taken = [made[place] for place in self._agreed(made, ranks)[:number]]
        for each in taken:
            each.take(overlaps=overlaps)
        while len(taken) < number:
            algorithm = (
                FlatAllReduce(new_group(ranks))
                if size is None
                else new_hierarchical(split_ranks(ranks, size))
            )
            taken.append(Communicator(algorithm, overlaps=overlaps))
            made.append(taken[-1])
        return taken

    def _agreed(self, made: list[Communicator], ranks: Sequence[int]) -> list[int]:
        """Return the places of MADE that no model has on any of RANKS any more."""
        if not made:
            return []
        if not all(each.is_free for each in made):
            # A model and its optimizer often hold each other.
            gc.collect()
        free = [place for place, each in enumerate(made) if each.is_free]
        self._exchanges += 1
        key = f"fleetrun/pool/{_digest(ranks)}/{len(made)}/{self._exchanges}"
        found = job_store.all_gather(key, free, global_rank(), ranks)
        return sorted(set(free).intersection(*found))


def release(communicators: Sequence[Communicator]) -> None:
    """Let other models have COMMUNICATORS."""
    for each in communicators:
        each.release()
