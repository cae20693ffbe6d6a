"""The stages of an allreduce, and how they run beside the computation.

A flat allreduce is one stage. A hierarchical one is three: reduce to the leader of each group,
allreduce among the leaders, broadcast in each group. Each stage has its own communicator and takes
one tensor after the other, in the same order on all ranks. So no two ranks can deadlock.

gloo's collectives block, so a thread runs them. NCCL's run on the device.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    # Begins a collective on a tensor, and returns Paddle's task.
    Stage = Callable[[Any], Any]

# How long a rank waits at exit for its pending allreduces, in seconds. Ranks may wait for each
# other: rank 0 gives up first, which fails the allreduces of the others. The launcher kills after
# ten seconds.
_EXIT_WAIT_RANK_0_S, _EXIT_WAIT_S = 1.0, 5.0


class Work(Protocol):
    """A pending allreduce; Paddle's tasks qualify."""

    def wait(self) -> Any:
        """Wait until the tensor has the sum."""
        ...


def flat(group: Any) -> tuple[Stage, ...]:
    """Return the only stage of an allreduce among all ranks of the ProcessGroup GROUP."""
    from paddle.base.core import ReduceOp

    return (lambda tensor: group.all_reduce(tensor, ReduceOp.SUM, False),)


def hierarchical(reducing: Any, leaders: Any, broadcasting: Any) -> tuple[Stage, ...]:
    """Return the stages that this rank takes part in.

    REDUCING and BROADCASTING are two ProcessGroups of this rank's group, whose first rank is the
    leader; None if the rank is alone in it. LEADERS is None on ranks that are not leaders.
    """
    from paddle.base.core import ReduceOp

    stages: list[Stage] = []
    if reducing is not None:
        stages.append(lambda tensor: reducing.reduce(tensor, 0, ReduceOp.SUM, False))
    if leaders is not None:
        stages += flat(leaders)
    if broadcasting is not None:
        stages.append(lambda tensor: broadcasting.broadcast(tensor, 0, False))
    return tuple(stages)


def run(stages: Sequence[Stage], tensor: Any) -> None:
    """Sum TENSOR in place over the ranks, stage by stage."""
    for stage in stages:
        stage(tensor).wait()


class DeviceStages:
    """Issues all STAGES of an allreduce at once, which then run on the device.

    Paddle's NCCL collective runs in the stream of its communicator, after the work in the current
    stream. `wait` of its task makes the current stream wait, not the host. So each stage but the
    first is issued from its own stream, which only waits for the previous stage: neither the
    computation nor the next tensor is held up.

    NEW_STREAM creates a stream; ENTERED returns a context in which a stream is the current one.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        new_stream: Callable[[], Any],
        entered: Callable[[Any], AbstractContextManager[Any]],
    ) -> None:
        self._entered = entered
        # The gradients are ready in the current stream.
        self._first, *later = stages
        self._others = [(stage, new_stream()) for stage in later]

    def submit(self, tensor: Any) -> Work:
        """Begin to sum TENSOR in place over the ranks."""
        task = self._first(tensor)
        for stage, stream in self._others:
            with self._entered(stream):
                task.wait()
                task = stage(tensor)
        work: Work = task
        return work


class ThreadWork:
    """A sum of TENSOR over the ranks by STAGES, which a thread makes."""

    def __init__(self, stages: Sequence[Stage], tensor: Any) -> None:
        self._stages, self._tensor = stages, tensor
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run all stages in the calling thread."""
        try:
            run(self._stages, self._tensor)
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Wait for the last stage; raise the error of the stage that failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class ThreadStages:
    """A daemon thread that sums tensors by STAGES, in the order of `submit`."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._works: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        # The thread must not hold this object, which would then never be deleted.
        self._thread = threading.Thread(
            target=_serve, args=(self._works, self._stopping), daemon=True
        )
        self._thread.start()

    def submit(self, tensor: Any) -> ThreadWork:
        """Sum TENSOR in place over the ranks after those submitted before it."""
        work = ThreadWork(self._stages, tensor)
        self._works.put(work)
        return work

    def stop(self, timeout_s: float) -> None:
        """Start no further sum; wait at most TIMEOUT_S for the one under way."""
        self._stopping.set()
        self._works.put(None)
        self._thread.join(max(0.0, timeout_s))


def _serve(works: queue.SimpleQueue[ThreadWork | None], stopping: threading.Event) -> None:
    while (work := works.get()) is not None and not stopping.is_set():
        work.run()
        # It must not hold the tensor until the next one comes.
        del work


_stopped_at_exit: weakref.WeakSet[ThreadStages] = weakref.WeakSet()


def stop_at_exit(threads: ThreadStages) -> None:
    """Stop THREADS before Python ends: one that returns from C++ later aborts the process."""
    if not _stopped_at_exit:
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
    _stopped_at_exit.add(threads)


def _stop_all() -> None:
    is_rank_0 = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    deadline = time.monotonic() + (_EXIT_WAIT_RANK_0_S if is_rank_0 else _EXIT_WAIT_S)
    for threads in list(_stopped_at_exit):
        threads.stop(deadline - time.monotonic())
