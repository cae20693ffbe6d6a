"""What carries the allreduces: communicators of our own, one level or two, beside the backward."""

from __future__ import annotations

import atexit
import os
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Ids of our own communicators; those that Paddle counts up by itself stay far below.
_FIRST_ID = 1 << 20
# Room for the communicators of one model, and for the first ranks of the groups of models.
_PER_MODEL, _RANKS = 64, 4096
# They must live as long as their communicators.
_stores: list[Any] = []
# At the end, ranks may wait for each other's allreduces: the first one leaves, which wakes the
# others. The launcher kills after ten seconds.
_FIRST_LEAVES_S, _OTHERS_LEAVE_S = 1.0, 5.0
# How long ranks wait for one that is late at the end of its data, and how often they look.
_MEETING_S, _PACE_S = 600.0, 0.005


class Levels(NamedTuple):
    """The groups of the hierarchical allreduce, as ranks; and their leaders."""

    groups: tuple[tuple[int, ...], ...]
    leaders: tuple[int, ...]


def divide(ranks: Sequence[int], size: int) -> Levels:
    """Return the groups of SIZE ranks each; the last has what is left.

    >>> divide(range(5), 2)
    Levels(groups=((0, 1), (2, 3), (4,)), leaders=(0, 2, 4))
    """
    groups = tuple(tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))
    return Levels(groups, tuple(group[0] for group in groups))


class Ids:
    """Numbers the communicators of one model: equal on its ranks, no one else's."""

    def __init__(self, model: int, ranks: Sequence[int]) -> None:
        self._next = _FIRST_ID + (model * _RANKS + ranks[0] % _RANKS) * _PER_MODEL

    def take(self) -> int:
        """Return the next id; every rank takes them in the same order."""
        self._next += 1
        return self._next


def _paddles() -> Any:
    from paddle.distributed import collective

    return collective


def connect(ranks: Sequence[int], number: int) -> Any:
    """Return a new communicator of RANKS with the id NUMBER; None where this rank is not in it.

    `dist.new_group` counts its ids up only on the ranks that are members, so that groups that
    share no rank would meet in the store under the same name.
    """
    collective = _paddles()

    rank = collective._get_global_env().rank
    if len(ranks) < 2 or rank not in ranks:  # noqa: PLR2004 - alone
        return None
    store = collective._default_store
    if is_synchronous():
        store = own_store(store, number, is_leader=rank == ranks[0])
    return collective._new_process_group_impl(
        collective._default_backend,
        store,
        ranks.index(rank),
        len(ranks),
        f"fleetrun_{number}",
        None,
        group_id=number,
    )


def own_store(store: Any, number: int | str, *, is_leader: bool) -> Any:
    """Return a store for one communicator of gloo's, which is agreed on in STORE.

    Paddle's gloo puts the addresses of a communicator under the bare numbers of its ranks: in one
    store, ranks of the next one find those of the last, and wait for each other for ever.
    """
    from paddle.base import core

    key = f"fleetrun/communicators/{number}"
    if is_leader:
        host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        # It waits for nobody but itself, and is told of once it listens: who comes too early
        # waits for seconds before he tries again.
        own = core.TCPStore(host, port, True, 1, 300)
        store.set(key, f"{host}:{port}")
    else:
        address = store.get(key)
        text = address.decode() if isinstance(address, bytes) else str(address)
        host, _, number_of_port = text.rpartition(":")
        own = core.TCPStore(host, int(number_of_port), False, 1, 300)
    _stores.append(own)
    return own


def meet(name: str, word: int, ranks: Sequence[int]) -> dict[int, int | None]:
    """Return the WORD of each of RANKS that meet under NAME; None of who does not come in time."""
    collective = _paddles()
    store = collective._default_store
    place = f"fleetrun/{name}"
    me = collective._get_global_env().rank
    store.set(f"{place}/{me}", str(word))
    # Who asks for what was not said waits for ever: so each says first that it has come.
    store.add(f"{place}/{me}/here", 1)
    arrived = store.add(place, 1)
    until = time.monotonic() + _MEETING_S
    while arrived < len(ranks) and time.monotonic() < until:
        time.sleep(_PACE_S)
        arrived = store.add(place, 0)
    here = [rank for rank in ranks if store.add(f"{place}/{rank}/here", 0)]
    said = {rank: store.get(f"{place}/{rank}") if rank in here else None for rank in ranks}
    return {rank: None if text is None else int(text) for rank, text in said.items()}


def is_synchronous() -> bool:
    """Whether collectives return when they are done, whatever they were asked, as gloo's do."""
    collective = _paddles()

    return bool(collective._default_backend == "gloo")


class OneLevel:
    """All ranks at once."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, tensor: Any) -> Iterator[Any]:
        """Sum TENSOR over all ranks: each task must be waited for before the next is taken."""
        from paddle.base.core import ReduceOp

        yield self._group.all_reduce(tensor, ReduceOp.SUM, False)


class TwoLevels:
    """To the leader of each group, among the leaders, and back into the groups."""

    def __init__(self, levels: Levels, ids: Ids) -> None:
        # Every rank counts the ids of all groups, its own or not.
        inner = [connect(group, ids.take()) for group in levels.groups]
        self._inner = next((group for group in inner if group is not None), None)
        self._leaders = connect(levels.leaders, ids.take())

    def sum(self, tensor: Any) -> Iterator[Any]:
        """Sum TENSOR over all ranks: each task must be waited for before the next is taken."""
        from paddle.base.core import ReduceOp

        if self._inner is not None:
            yield self._inner.reduce(tensor, 0, ReduceOp.SUM, False)
        if self._leaders is not None:
            yield self._leaders.all_reduce(tensor, ReduceOp.SUM, False)
        if self._inner is not None:
            yield self._inner.broadcast(tensor, 0, False)


class Pending:
    """An allreduce whose first task is under way on the device."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._tasks = tasks
        self._current = next(tasks, None)

    def wait(self) -> None:
        """Do the rest and wait for it."""
        while self._current is not None:
            self._current.wait()
            self._current = next(self._tasks, None)


class Errand:
    """An allreduce that a thread of ours makes."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._tasks = tasks
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the allreduce, in the thread."""
        try:
            for task in self._tasks:
                task.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def wait(self) -> None:
        """Wait until it is made."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class Courier:
    """A thread that runs errands, one after the other."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._is_leaving = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def send(self, errand: Errand) -> None:
        """Have ERRAND run after those before it."""
        self._errands.put(errand)

    def leave(self, patience_s: float) -> None:
        """Begin no more errands, and wait for so long until the one under way is done."""
        self._is_leaving = True
        self._errands.put(None)
        self._thread.join(patience_s)

    def _serve(self) -> None:
        while not self._is_leaving:
            errand = self._errands.get()
            if errand is not None:
                errand.run()


_couriers: list[Courier] = []


def _leave() -> None:
    """End the threads before Python does: one that returns from C++ later aborts the process."""
    is_first = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    until = time.monotonic() + (_FIRST_LEAVES_S if is_first else _OTHERS_LEAVE_S)
    for courier in _couriers:
        courier.leave(max(0.0, until - time.monotonic()))


class Lane:
    """One communicator; what is given to it goes out in that order."""

    def __init__(self, carrier: OneLevel | TwoLevels, *, overlaps: bool) -> None:
        self._carrier = carrier
        self._overlaps = overlaps
        # How many allreduces it has made.
        self.calls = 0
        self._courier: Courier | None = None
        if overlaps and is_synchronous():
            self._courier = Courier()
            if not _couriers:
                atexit.register(_leave)
            _couriers.append(self._courier)

    def issue(self, tensor: Any, *, is_alone: bool = False) -> Pending | Errand | None:
        """Begin to sum TENSOR over the ranks; None when it is done already.

        One that is alone in its backward needs no thread of ours: it would only be waited for.
        """
        self.calls += 1
        tasks = self._carrier.sum(tensor)
        if self._overlaps and self._courier is None:
            return Pending(tasks)
        if self._courier is None or is_alone:
            for task in tasks:
                task.wait()
            return None
        errand = Errand(tasks)
        self._courier.send(errand)
        return errand
