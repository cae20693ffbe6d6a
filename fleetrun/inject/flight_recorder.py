"""Records each collective of this rank in a ring in a mapped file, which outlives the rank.

`records/flightfile.py` reads it. Writes reach the kernel at once, so they survive a `kill -9`;
nothing waits for a disk. A ring that has failed is marked in its header, so that the rank does not
seem to have stopped there.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import mmap
import operator
import os
import struct
import sys
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from . import border
from .import_hooks import after_import, in_place_of, watch_method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType, ModuleType

_VARIABLE = "FLEETRUN_FLIGHT_RECORDER"
_WHAT = "the flight recorder"
MAGIC = b"FLTRING2"
# The header: magic, slots, channels, bytes of the table, its bytes in use, state, pid, restart,
# rank, when the tasks of a device were last polled.
HEADER = struct.Struct("<8s8IQ")
_USED, _STATE, _SETTLED = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<Q")
_USED_AT, _STATE_AT, _SETTLED_AT = 20, 24, 40
HEADER_BYTES = 64
# The state of a ring: its rank may go on, the recorder has failed, the script has ended.
RECORDING, FAILED, ENDED = 0, 1, 2
# The last sequence number of each channel.
_HEAD = struct.Struct("<Q")
# A slot: number, sequence number, time issued, time done, bytes, call site, channel, operation,
# dtype, dimensions, state, peer, shape, place of the parts plus 1 (0: none). Times are nanoseconds
# of the wall clock.
SLOT = struct.Struct("<QQQQqIHHBBHi6II")
# The parts of an all_to_all: the number of its slot, the ranks of its group, and how many elements
# go to each of them and come from each. They lie behind the slots, in a ring of their own.
PARTS, WORD = struct.Struct("<QI"), struct.Struct("<I")
PARTS_BYTES = 32 * 1024
_NUMBER, _DONE, _OUTCOME = struct.Struct("<Q"), struct.Struct("<Q"), struct.Struct("<H")
_NUMBER_DONE = struct.Struct("<Q16xQ")
_DONE_AT, _OUTCOME_AT = 24, 50
# The state of a collective: the caller waits, it runs on a device, or it has raised; added if it
# runs in the stream of computation, of which Paddle does not tell whether it is done.
BLOCKING, ASYNCHRONOUS, RAISED = 0, 1, 2
IN_STREAM = 4
SLOTS, CHANNELS, TABLE_BYTES = 1024, 512, 64 * 1024
# The end of the table: the first call of a process that this one has forked.
FORKED_BYTES = 1024
_MOST_DIMENSIONS, _LARGEST = 6, 2**32 - 1
# The most device tasks that are not known to be done.
_MOST_PENDING = 64
# How often a thread polls them while the rank calls no collective.
_PERIOD_S = 1.0
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")
_OURS = os.path.dirname(os.path.abspath(__file__))


class Operation(NamedTuple):
    """How a method of ProcessGroup is called: which arguments are tensor, peer and kind of sum."""

    name: str
    tensor: int | None
    peer: int | None = None
    reduction: int | None = None
    # Of what is sent and received in parts: the result, the tensor, and the sizes of their parts.
    parts: tuple[int, ...] = ()
    # Whether it blocks with every backend; such calls have a channel of their own.
    blocks: bool = False
    is_in_stream: bool = False


# By method; each may end in `_on_calc_stream`.
OPERATIONS = {
    "all_reduce": Operation("all_reduce", 0, None, 1),
    "allreduce": Operation("all_reduce", 0, None, 1),
    "broadcast": Operation("broadcast", 0, 1),
    "reduce": Operation("reduce", 0, 1, 2),
    "all_gather": Operation("all_gather", 1),
    "all_gather_into_tensor": Operation("all_gather", 1),
    "all_gather_partial": Operation("all_gather", 1),
    "all_to_all": Operation("all_to_all", 1, parts=(0, 1)),
    "all_to_all_tensor": Operation("all_to_all", 1, parts=(0, 1)),
    "all_to_all_single": Operation("all_to_all", 1, parts=(0, 1, 2, 3)),
    "alltoall": Operation("all_to_all", 0),
    "alltoall_single": Operation("all_to_all", 0),
    "reduce_scatter": Operation("reduce_scatter", 0, None, 2),
    "reduce_scatter_tensor": Operation("reduce_scatter", 0, None, 2),
    "scatter": Operation("scatter", 0, 2),
    "scatter_tensor": Operation("scatter", 0, 2),
    "gather": Operation("gather", 0, 2),
    "barrier": Operation("barrier", None),
    "send": Operation("send", 0, 1),
    "recv": Operation("recv", 0, 1),
    "send_partial": Operation("send", 0, 1),
    "recv_partial": Operation("recv", 0, 1),
}
# A backward in which Paddle's own reducer sums gradients, invisible to our hooks.
BACKWARD = "backward"
_BACKWARD = Operation(BACKWARD, 1, None, 0, blocks=True)
# A group whose members wait for each other to make it: in the call of the same number, which stands
# in place of a peer.
NEW_GROUP = "new_group"
_NEW_GROUP = Operation(NEW_GROUP, None, 0, blocks=True)
# A wait for a key of a store, which a rank makes alone.
STORE = "store"
_PAIRS = ("send", "recv")
_ON_STREAM = "{}_on_calc_stream"
# The index of the ProcessGroup among the arguments of Paddle's reducer.
_REDUCERS_GROUP = 3


class Ring:
    """A ring in the file PATH: the last collectives, and the names that they refer to by number."""

    def __init__(self, path: str) -> None:
        self._slots_at = HEADER_BYTES + CHANNELS * _HEAD.size + TABLE_BYTES
        self._table_at = HEADER_BYTES + CHANNELS * _HEAD.size
        self._parts_at = self._slots_at + SLOTS * SLOT.size
        size = self._parts_at + PARTS_BYTES
        draft = f"{path}.{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(draft, flags, 0o600)
        try:
            # On a full disk a missing page would kill the rank when it is written.
            os.posix_fallocate(fd, 0, size)
            self.memory = mmap.mmap(fd, size)
            header = (MAGIC, SLOTS, CHANNELS, TABLE_BYTES, 0, RECORDING, os.getpid())
            restart, rank = (_number(f"PADDLE_{name}") for name in ("RESTART_COUNT", "TRAINER_ID"))
            HEADER.pack_into(self.memory, 0, *header, restart, rank, 0)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        finally:
            os.close(fd)
        self._used = self._parts_used = 0
        self._numbers = itertools.count(1)
        self._known: dict[tuple[str, Any], int] = {}
        self._counts: Counter[str] = Counter()
        # Our own threads reduce, too.
        self._naming = threading.Lock()

    def name(self, kind: str, key: Any, value: Any = None) -> int:
        """Return the number of KEY among those of its KIND; 0 if there is no room for more lines.

        VALUE is written instead of the key, if given.
        """
        number = self._known.get((kind, key))
        if number is None:
            with self._naming:
                number = self._write(kind, key if value is None else value)
                self._known[kind, key] = number
        return number

    def _write(self, kind: str, value: Any) -> int:
        number = self._counts[kind] = self._counts[kind] + 1
        line = json.dumps([kind, number, value]).encode() + b"\n"
        end = self._used + len(line)
        if kind == "site" and end > TABLE_BYTES // 2:
            return 0
        if end > TABLE_BYTES - FORKED_BYTES or (kind == "channel" and number >= CHANNELS):
            raise OverflowError("there are too many groups")
        at = self._table_at + self._used
        self.memory[at : at + len(line)] = line
        _USED.pack_into(self.memory, _USED_AT, end)
        self._used = end
        return number

    def write_forked(self, *call: Any) -> None:
        """Write the CALL of this process, a fork of the ring's owner, unless one is written."""
        line = json.dumps([os.getpid(), *call]).encode() + b"\n"
        at = self._slots_at - FORKED_BYTES
        if len(line) <= FORKED_BYTES and not self.memory[at]:
            self.memory[at : at + len(line)] = line

    def _write_parts(self, number: int, parts: Sequence[int]) -> int:
        """Write the PARTS of the collective NUMBER; return their place plus 1, 0 without room."""
        size = PARTS.size + len(parts) * WORD.size
        if size > PARTS_BYTES:
            return 0
        with self._naming:
            place = self._parts_used if self._parts_used + size <= PARTS_BYTES else 0
            self._parts_used = place + size
        at = self._parts_at + place
        PARTS.pack_into(self.memory, at, number, len(parts) // 2)
        struct.pack_into(f"<{len(parts)}I", self.memory, at + PARTS.size, *parts)
        return place + 1

    def begin(
        self,
        sequence: int,
        channel: int,
        nbytes: int,
        *fields: Any,
        parts: Sequence[int] = (),
        again: int = 0,
    ) -> int:
        """Record a collective that is issued now, and return its number.

        It takes the place of the collective AGAIN, if that is given and still in the ring.
        """
        at = self._slots_at + again % SLOTS * SLOT.size
        number = again
        if not again or _NUMBER.unpack_from(self.memory, at)[0] != again:
            number = next(self._numbers)
            at = self._slots_at + number % SLOTS * SLOT.size
        place = self._write_parts(number, parts) if parts else 0
        SLOT.pack_into(
            self.memory, at, number, sequence, time.time_ns(), 0, nbytes, fields[0], channel,
            *fields[1:], place,
        )  # fmt: skip
        _HEAD.pack_into(self.memory, HEADER_BYTES + channel * _HEAD.size, sequence)
        return number

    def end(self, number: int) -> None:
        """Record that NUMBER is done, if it is still in the ring and not known to be done."""
        at = self._slots_at + number % SLOTS * SLOT.size
        if _NUMBER_DONE.unpack_from(self.memory, at) == (number, 0):
            _DONE.pack_into(self.memory, at + _DONE_AT, time.time_ns())

    def mark(self, number: int, outcome: int) -> None:
        """Record the state OUTCOME of NUMBER, if it is still in the ring."""
        at = self._slots_at + number % SLOTS * SLOT.size
        if _NUMBER.unpack_from(self.memory, at)[0] == number:
            _OUTCOME.pack_into(self.memory, at + _OUTCOME_AT, outcome)

    def settled(self, at_ns: int) -> None:
        """Record that the open collectives were not done at AT_NS."""
        _SETTLED.pack_into(self.memory, _SETTLED_AT, at_ns)

    def close(self, state: int) -> None:
        """Record that the ring ends here: FAILED whatever the rank does, ENDED with its script."""
        _STATE.pack_into(self.memory, _STATE_AT, state)


class _Gradients:
    """What a reducer of Paddle's sums in a backward, as one tensor."""

    def __init__(self, parameter: Any, elements: int) -> None:
        self._parameter = parameter
        self.dtype = parameter.dtype
        self.shape = [elements]

    def element_size(self) -> int:
        """Return the bytes of a number of the first parameter."""
        return int(self._parameter.element_size())

    def __add__(self, other: _Gradients) -> _Gradients:
        """Return those of both reducers."""
        return _Gradients(self._parameter, self.shape[0] + other.shape[0])


class _Group:
    """A ProcessGroup, and the number of collectives of each of its channels."""

    def __init__(self, ring: Ring, process_group: Any, ranks: Sequence[int], number: int) -> None:
        # Kept alive, so that its id is not reused.
        self.process_group = process_group
        self.ranks = tuple(ranks)
        self.is_blocking = process_group.name().lower() == "gloo"
        self._is_alone = not number
        self._ring = ring
        value = [_ranges(self.ranks), number, process_group.name()]
        self._name = ring.name("group", (self.ranks, number), value)
        self._channels: dict[tuple[str, int], tuple[int, Any]] = {}
        self.collectives = self.channel("", -1)

    def channel(self, operation: str, peer: int) -> tuple[int, Any]:
        """Return the number of the channel for OPERATION with PEER, and its counter."""
        channel = self._channels.get((operation, peer))
        if channel is None:
            value = [self._name, operation, peer]
            number = self._ring.name("channel", tuple(value), value)
            # What a rank waits for alone needs no number.
            counter = itertools.repeat(1) if self._is_alone else itertools.count(1)
            channel = self._channels[operation, peer] = number, counter
        return channel


class FlightRecorder:
    """Records the collectives of this process, once it has a group, in the file PATH."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ring: Ring | None = None
        self._groups: dict[int, _Group] = {}
        # The group of what this rank waits for alone, and the last wait of each kind.
        self._alone: _Group | None = None
        self._last_waits: dict[str, int] = {}
        # How many calls of new_group there have been, of groups without this rank, too.
        self._new_groups = 0
        # How many groups have had the same ranks.
        self._made: dict[tuple[int, ...], int] = {}
        self._dtypes: dict[Any, tuple[int, int]] = {}
        self._is_library: dict[str, bool] = {}
        self._pending: deque[tuple[int, Any]] = deque(maxlen=_MOST_PENDING)
        self._settling: threading.Thread | None = None
        self._has_ended = threading.Event()
        # Whether the calls that are made begin together, later.
        self._is_coalescing = False
        # The groups by their ids in Paddle.
        self._rings: dict[int, Any] = {}
        # The groups in which the next backward communicates, and Paddle's reducers whose forward
        # has run.
        self._armed: dict[int, tuple[Any, dict[int, _Gradients | None]]] = {}
        # Whether gradients of layers communicate in it.
        self._has_armed_layers = False
        # What is used that calls collectives where they cannot be recorded.
        self._unrecorded: dict[str, None] = {}
        self.is_on = True
        self._is_forked = False

    def leave(self) -> None:
        """Stop recording in a forked child, as the ring belongs to its parent."""
        self.is_on = False
        self._is_forked = True

    def fail(self) -> None:
        """Mark the ring as ended."""
        self.is_on = False
        if self._ring is not None:
            self._ring.close(FAILED)

    def end_script(self) -> None:
        """Record that the script has ended without an error: a device may take long to end."""
        if self._ring is not None and self.is_on and getattr(sys, "last_value", None) is None:
            self._ring.close(ENDED)

    def add(self, process_group: Any, ranks: Sequence[int], ring: int | None = None) -> None:
        """Register the RANKS of a PROCESS_GROUP, which kernels and programs call RING."""
        if not self.is_on:
            return
        if ring is not None:
            self._rings[ring] = process_group
        if id(process_group) in self._groups:
            return
        if self._ring is None:
            if _is_ancestors(self._path):
                # The script of the rank has started a job of its own.
                self.is_on = False
                return
            self._ring = Ring(self._path)
            for what in self._unrecorded:
                self._ring.name("unrecorded", what)
            # What the script registers later runs earlier, and may communicate.
            atexit.register(self.end_script)
        members = tuple(int(rank) for rank in ranks)
        number = self._made[members] = self._made.get(members, 0) + 1
        self._groups[id(process_group)] = _Group(self._ring, process_group, members, number)

    def note_unrecorded(self, what: str) -> None:
        """Record that WHAT is used, within which Paddle calls collectives without our knowledge."""
        if what not in self._unrecorded:
            self._unrecorded[what] = None
            if self._ring is not None and self.is_on:
                self._ring.name("unrecorded", what)

    def group_of(self, ring: int) -> Any:
        """Return the group that kernels and programs call RING; None if it is not known."""
        return self._rings.get(ring)

    def coalesce(self, process_group: Any, *, begins: bool) -> None:
        """Record that a batch of calls in PROCESS_GROUP begins or ends."""
        # On a custom device, Paddle 3.3.1 calls them one after the other.
        self._is_coalescing = begins and not process_group.name().startswith("XCCL")

    def arm(self, process_group: Any, model: int = 0, gradients: _Gradients | None = None) -> None:
        """Let the next backward communicate in PROCESS_GROUP: the GRADIENTS of MODEL, or layers."""
        models = self._armed.setdefault(id(process_group), (process_group, {}))[1]
        if model:
            models[model] = gradients
        else:
            self._has_armed_layers = True

    def note_partial(self) -> None:
        """Record that `paddle.grad` computes gradients, perhaps of layers that communicate in it.

        Which of them it computes cannot be seen, and not all ranks need to.
        """
        if self._has_armed_layers:
            self.note_unrecorded("paddle.grad")

    def begin_backward(self) -> list[tuple[int, Any]]:
        """Record the backward that begins, in each group in which it communicates."""
        armed = [*self._armed.values()]
        self._armed.clear()
        self._has_armed_layers = False
        return [
            (self.begin(group, _BACKWARD, (_models([*models]), *_sum(models.values()))), group)
            for group, models in armed
        ]

    def begin_wait(self, operation: Operation) -> int:
        """Record that this rank waits in OPERATION, for which it has no group."""
        world = next(iter(self._groups.values()), None)
        if world is None or not self.is_on:
            return 0
        assert self._ring is not None
        if self._alone is None:
            members = (_number("PADDLE_TRAINER_ID"),)
            # Not that of a group of this rank alone.
            self._alone = _Group(self._ring, world.process_group, members, 0)
            self._groups[id(self._alone)] = self._alone
        # Polls neither fill the ring nor show that the job makes progress.
        again = self._last_waits.get(operation.name, 0)
        number = self.begin(self._alone, operation, (), again)
        self._last_waits[operation.name] = number
        return number

    def begin_group(self, ranks: Sequence[int] | None) -> int:
        """Record that this rank makes a group of RANKS, by default of all."""
        self._new_groups += 1
        world = next(iter(self._groups.values()), None)
        if world is None or not self.is_on:
            return 0
        members = world.ranks if ranks is None else tuple(sorted(int(rank) for rank in ranks))
        if len(members) < 2 or _number("PADDLE_TRAINER_ID") not in members:
            return 0
        assert self._ring is not None
        number = self._made.get(members, 0) + 1
        group = _Group(self._ring, world.process_group, members, number)
        self._groups[id(group)] = group
        try:
            return self.begin(group, _NEW_GROUP, (self._new_groups,))
        finally:
            del self._groups[id(group)]

    def end_group(self, number: int) -> None:
        """Record that the group of the call NUMBER has been made."""
        if self._ring is not None and self.is_on:
            self._ring.end(number)

    def begin(
        self, process_group: Any, operation: Operation, args: Sequence[Any], again: int = 0
    ) -> int:
        """Record that OPERATION is called with ARGS; return its number, 0 if it is not recorded."""
        group = self._groups.get(id(process_group))
        ring = self._ring
        if group is None or ring is None or not self.is_on:
            return self._note_fork(group, operation)
        if self._pending:
            self.settle()
        name, place, peer_place, reduction, parts_places, blocks, is_in_stream = operation
        peer = -1
        if peer_place is not None and peer_place < len(args):
            peer = int(args[peer_place])
        channel, counter = group.collectives
        if blocks or name in _PAIRS:
            channel, counter = group.channel(name, peer)
        if reduction is not None and reduction < len(args):
            name = _sum_name(name, args[reduction])
        tensor = args[place] if place is not None and place < len(args) else None
        if isinstance(tensor, (list, tuple)):
            tensor = tensor[0] if tensor else None
        shape: Sequence[int] = ()
        dtype = size = 0
        if tensor is not None:
            shape = tensor.shape
            dtype, size = self._dtypes.get(tensor.dtype) or self._name_dtype(tensor)
            for length in shape:
                size *= length
        dimensions = len(shape)
        lengths = [min(length, _LARGEST) for length in shape[:_MOST_DIMENSIONS]]
        lengths += [0] * (_MOST_DIMENSIONS - len(lengths))
        site = self._site(ring.name, sys._getframe(1))
        code = ring.name("operation", name)
        state = BLOCKING if blocks or group.is_blocking else ASYNCHRONOUS
        if is_in_stream and state == ASYNCHRONOUS and not self._is_coalescing:
            state |= IN_STREAM
        parts = _parts(args, parts_places, len(group.ranks)) if parts_places else ()
        return ring.begin(
            *(next(counter), channel, size, site, code, dtype, dimensions, state, peer),
            *lengths,
            parts=parts,
            again=again,
        )

    def _note_fork(self, group: _Group | None, operation: Operation) -> int:
        """Record that a fork calls OPERATION in a GROUP of its parent; return 0.

        The threads and devices with which the parent communicates are not forked.
        """
        if group is not None and self._ring is not None and self._is_forked:
            site = self._site(lambda _kind, _key, line: line, sys._getframe(1))
            self._ring.write_forked(operation.name, site)
        return 0

    def end(self, number: int, process_group: Any, task: Any) -> None:
        """Record that the call NUMBER has returned TASK, which may still be running."""
        if self._ring is None or not self.is_on:
            return
        if self._groups[id(process_group)].is_blocking or task is None:
            self._ring.end(number)
        else:
            self._pending.append((number, task))
            if self._settling is None:
                self._settle_periodically()

    def end_backward(self, number: int, process_group: Any, _task: None) -> None:
        """Record that a backward has returned; what it gave to a device may still be running."""
        if self._ring is None or not self.is_on:
            return
        if not self._groups[id(process_group)].is_blocking:
            self._ring.mark(number, ASYNCHRONOUS)
        self._ring.end(number)

    def raised(self, number: int) -> None:
        """Record that the call NUMBER has raised."""
        if self._ring is not None and self.is_on:
            self._ring.mark(number, RAISED)

    def settle(self) -> None:
        """Record which tasks are done, in their order."""
        pending, ring = self._pending, self._ring
        while pending and ring is not None and pending[0][1].is_completed():
            ring.end(pending.popleft()[0])

    def settle_all(self) -> None:
        """From another thread, record which tasks are done and when the others were still pending.

        Otherwise a rank that calls nothing more would seem to wait for all of its collectives.
        """
        ring, at_ns = self._ring, time.time_ns()
        for number, task in tuple(self._pending):
            if ring is not None and self.is_on and task.is_completed():
                ring.end(number)
        if ring is not None and self.is_on:
            ring.settled(at_ns)

    def _settle_periodically(self) -> None:
        settle = watching(self, self.settle_all)

        def run() -> None:
            while self.is_on and not self._has_ended.wait(_PERIOD_S):
                settle()

        # No task may be polled once its device has been shut down.
        atexit.register(self._stop_settling)
        self._settling = threading.Thread(target=run, name="fleetrun-collectives", daemon=True)
        self._settling.start()

    def _stop_settling(self) -> None:
        self._has_ended.set()
        assert self._settling is not None
        self._settling.join(_PERIOD_S)
        # Otherwise the last ones of a script that has waited for them would stay open.
        watching(self, self.settle_all)()

    def _name_dtype(self, tensor: Any) -> tuple[int, int]:
        assert self._ring is not None
        number = self._ring.name("dtype", str(tensor.dtype).rpartition(".")[2].lower())
        self._dtypes[tensor.dtype] = row = number, int(tensor.element_size())
        return row

    def _site(self, name: Callable[[str, Any, Any], Any], frame: FrameType | None) -> Any:
        """Return what NAME returns for the script's calling line; 0 if the script does not call."""
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            is_library = self._is_library.get(file)
            if is_library is None:
                is_library = file.startswith((_OURS, _paddles_folder()))
                is_library = is_library or any(part in file for part in _LIBRARIES)
                self._is_library[file] = is_library
            if not is_library:
                line = (file, frame.f_lineno, code.co_name)
                return name("site", line, [file[-200:], line[1], line[2][:100]])
            frame = frame.f_back
        return 0


def _paddles_folder() -> str:
    """Return where Paddle's code is, which need not be among the installed packages."""
    return os.path.join(sys.modules["paddle"].__path__[0], "") if "paddle" in sys.modules else _OURS


def _is_ancestors(path: str) -> bool:
    """Whether the ring PATH is that of a process of this attempt from which this one descends."""
    try:
        with open(path, "rb") as file:
            header = HEADER.unpack(file.read(HEADER.size))
        owner, restart = header[6:8]
        process = os.getppid()
        while restart == _number("PADDLE_RESTART_COUNT") and process > 1:
            if process == owner:
                return True
            with open(f"/proc/{process}/stat", "rb") as file:
                # The name, in parentheses, may contain anything; the state and the parent follow.
                process = int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, struct.error):
        # There is no ring, or an ancestor has just ended.
        return False
    return False


def _parts(args: Sequence[Any], places: Sequence[int], ranks: int) -> list[int]:
    """Return how many elements go to each of RANKS and come from each; nothing: not known."""
    received, sent, *sizes = (args[place] for place in places if place < len(args))
    received_sizes, sent_sizes = sizes if len(sizes) > 1 else ((), ())
    parts = [*_elements(sent, sent_sizes, ranks), *_elements(received, received_sizes, ranks)]
    return parts if len(parts) == 2 * ranks else []


def _elements(tensor: Any, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return how many elements each part of TENSOR has, which is split at SIZES of its rows."""
    if isinstance(tensor, (list, tuple)):
        return [min(math.prod(part.shape), _LARGEST) for part in tensor]
    if not sizes:
        return [min(math.prod(tensor.shape) // ranks, _LARGEST)] * ranks
    row = math.prod(tensor.shape[1:])
    return [min(int(size) * row, _LARGEST) for size in sizes]


_names: dict[tuple[str, Any], str] = {}
# What needs no mention: the usual reduction, and a backward of the only model.
_USUAL = ("sum", "model 1")


def _sum_name(name: str, kind: Any) -> str:
    """Return the operation's name with the KIND of its sum, unless that is the usual one."""
    known = _names.get((name, kind))
    if known is None:
        word = str(kind).rpartition(".")[2].lower()
        known = _names[name, kind] = name if word in _USUAL else f"{name} ({word})"
    return known


# By module: the functions that let Paddle call collectives in C++; and how that is named.
_UNRECORDED = {
    "paddle.distributed.auto_parallel.api": (
        ("shard_tensor", "dtensor_from_fn", "dtensor_from_local", "reshard"),
        "auto parallel",
    ),
}

# The recorder of this process, if the launcher requests one.
_recorder: FlightRecorder | None = None


def watch() -> FlightRecorder | None:
    """Record collectives if the launcher has given a file for them, and return the recorder."""
    global _recorder
    path = os.environ.get(_VARIABLE)
    if path:
        _recorder = FlightRecorder(path)
        os.register_at_fork(after_in_child=_recorder.leave)
        after_import("paddle.base.core", functools.partial(_patch_methods, _recorder))
        after_import("paddle.distributed.communication.group", _patch_groups)
        after_import(
            "paddle.distributed.collective", functools.partial(_patch_new_group, _recorder)
        )
        for module, (functions, what) in _UNRECORDED.items():
            after_import(module, functools.partial(_note, _recorder, functions, what))
    return _recorder


def add_group(process_group: Any, ranks: Sequence[int], ring: int | None = None) -> None:
    """Register the RANKS of a PROCESS_GROUP, if there is a recorder; RING: its Group's id."""
    if _recorder is not None and process_group is not None:
        watching(_recorder, _recorder.add)(process_group, ranks, ring)


def watching(recorder: FlightRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    """Let METHOD of RECORDER fail at most once: then the ring is marked, and recording stops."""

    def guarded(*args: Any) -> Any:
        try:
            return method(*args)
        except BaseException:
            recorder.fail()
            raise

    return border.watching(_WHAT, 0)(guarded)


def _patch_groups(module: Any) -> None:
    def add(group: Any) -> None:
        add_group(group.process_group, group.ranks, group.id)

    watch_method(module.Group, "__init__", after=add)


def _patch_new_group(recorder: FlightRecorder, collective: Any) -> None:
    new_group = collective.new_group
    begin, end, raised = (
        watching(recorder, hook)
        for hook in (recorder.begin_group, recorder.end_group, recorder.raised)
    )

    @functools.wraps(new_group)
    def recorded(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        number = begin(ranks)
        try:
            group = new_group(ranks, *args, **options)
        except BaseException:
            if number:
                raised(number)
            raise
        if number:
            end(number)
        return group

    collective.new_group = recorded
    replace_in_modules("new_group", new_group, recorded)


def replace_in_modules(name: str, function: Any, replacement: Any) -> None:
    """Replace FUNCTION in the modules that have imported it: Paddle may be imported already."""
    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is function:
            vars(module)[name] = replacement


def _note(recorder: FlightRecorder, functions: Sequence[str], what: str, module: Any) -> None:
    """Record that WHAT is used when one of the FUNCTIONS of MODULE is called."""
    note = watching(recorder, recorder.note_unrecorded)

    def noted(original: Any, *args: Any, **options: Any) -> Any:
        note(what)
        return original(*args, **options)

    for name in functions:
        if hasattr(module, name):
            function = getattr(module, name)
            replace_in_modules(name, function, in_place_of(module, name)(noted))


def _patch_methods(recorder: FlightRecorder, core: ModuleType) -> None:
    kind: Any = core.ProcessGroup
    for name, operation in methods_of(kind):
        setattr(kind, name, _recorded(getattr(kind, name), operation, recorder))
    for name, begins in (("_start_coalescing", True), ("_end_coalescing", False)):
        if hasattr(kind, name):
            coalesce = watching(recorder, functools.partial(recorder.coalesce, begins=begins))
            watch_method(kind, name, before=coalesce)
    if hasattr(core, "EagerReducer"):
        _patch_backward(recorder, core)


def methods_of(kind: Any) -> list[tuple[str, Operation]]:
    """Return the names of the methods of a ProcessGroup's class that are collectives, and which."""
    methods = [
        (form.format(name), Operation(*operation[:-1], is_in_stream=form == _ON_STREAM))
        for name, operation in OPERATIONS.items()
        for form in ("{}", _ON_STREAM)
    ]
    return [(name, operation) for name, operation in methods if hasattr(kind, name)]


def run_in_groups(
    called: Iterable[tuple[int, Any]],
    function: Callable[[], Any],
    end: Callable[..., Any],
    raised: Callable[..., Any],
) -> Any:
    """Return what FUNCTION does, once END or RAISED is told of each call; 0: it is not recorded.

    CALLED has the number of the call in each of its groups.
    """
    recorded = [(number, group) for number, group in called if number]
    try:
        result = function()
    except BaseException:
        for number, _ in recorded:
            raised(number)
        raise
    for number, group in recorded:
        end(number, group, None)
    return result


def _patch_backward(recorder: FlightRecorder, core: Any) -> None:
    """Record each backward in which a reducer of Paddle's sums gradients, as one collective."""
    kind: Any = core.EagerReducer
    build, run = kind.__init__, core.eager.run_backward
    # By id, with its number among those of its group; Paddle keeps the groups.
    reducers: dict[int, tuple[Any, int, _Gradients | None]] = {}
    made: Counter[int] = Counter()
    begin, end, raised, arm, note_partial, count = (
        watching(recorder, hook)
        for hook in (
            *(recorder.begin_backward, recorder.end_backward, recorder.raised, recorder.arm),
            *(recorder.note_partial, _gradients),
        )
    )

    @functools.wraps(build)
    def __init__(reducer: Any, *args: Any) -> None:
        build(reducer, *args)
        group = args[_REDUCERS_GROUP]
        made[id(group)] += 1
        reducers[id(reducer)] = group, made[id(group)], count(args[0])

    def prepare(reducer: Any) -> None:
        arm(*reducers.get(id(reducer), (None,)))

    @functools.wraps(run)
    def run_backward(*args: Any, **options: Any) -> Any:
        backward = functools.partial(run, *args, **options)
        return run_in_groups(begin() or (), backward, end, raised)

    kind.__init__ = __init__
    watch_method(kind, "prepare_for_backward", before=prepare)
    core.eager.run_backward = run_backward
    if hasattr(core.eager, "run_partial_grad"):
        watch_method(core.eager, "run_partial_grad", before=lambda _outputs: note_partial())


def _gradients(parameters: Sequence[Any]) -> _Gradients | None:
    """Return the gradients of PARAMETERS, if there are any."""
    elements = sum(math.prod(parameter.shape) for parameter in parameters)
    return _Gradients(parameters[0], elements) if parameters else None


def _sum(models: Iterable[_Gradients | None]) -> list[_Gradients]:
    """Return the gradients of all MODELS, which is nothing if there are none."""
    known = [gradients for gradients in models if gradients is not None]
    return [functools.reduce(operator.add, known)] if known else []


def _models(numbers: Sequence[int]) -> str:
    """Name the models of one backward; without one, layers communicate in it.

    >>> _models([1]), _models([2, 1]), _models([])
    ('model 1', 'models 1, 2', 'model 1')
    """
    numbers = numbers or [1]
    named = ", ".join(str(number) for number in sorted(numbers))
    return f"model{'s' * (len(numbers) > 1)} {named}"


def _recorded(
    method: Callable[..., Any], operation: Operation, recorder: FlightRecorder
) -> Callable[..., Any]:
    begin, end, raised = (
        watching(recorder, hook) for hook in (recorder.begin, recorder.end, recorder.raised)
    )

    @functools.wraps(method)
    def recorded(process_group: Any, *args: Any, **options: Any) -> Any:
        number = begin(process_group, operation, args)
        try:
            task = method(process_group, *args, **options)
        except BaseException:
            if number:
                raised(number)
            raise
        if number:
            end(number, process_group, task)
        return task

    return recorded


def _ranges(ranks: Sequence[int]) -> list[list[int]]:
    """Return RANKS as runs of consecutive ones: [first, last].

    >>> _ranges([0, 1, 2, 5])
    [[0, 2], [5, 5]]
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else 0
