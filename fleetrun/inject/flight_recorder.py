"""Records the last collectives of this rank in a mapped file, which outlives the rank.

`rundir/flightfile.py` reads it. Writes reach the kernel at once, so they survive a `kill -9`;
nothing waits for a disk. A ring that has failed is marked in its header, so that the rank does not
seem to have stopped there. Collectives inside Paddle's operators and programs are not seen.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import mmap
import os
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from . import border
from .import_hooks import after_import, watch_method

_VARIABLE = "FLEETRUN_FLIGHT_RECORDER"
_WHAT = "the flight recorder"
# The file: a header, the last sequence number of each channel, lines of JSON that name channels,
# and slots.
MAGIC = b"FLTRING3"
# Magic, state, pid, restart, rank, when the tasks of a device were last polled.
HEADER = struct.Struct("<8s4I8xQ")
HEADER_BYTES = 64
_STATE, _STATE_AT = struct.Struct("<I"), 8
_SETTLED, _SETTLED_AT = struct.Struct("<Q"), 32
RECORDING, FAILED = 0, 1
HEAD, CHANNELS, TABLE_BYTES = struct.Struct("<Q"), 512, 64 * 1024
# A slot: the number of the collective, when it was done, its state; a line of JSON follows. Times
# are nanoseconds of the wall clock.
SLOT, SLOT_BYTES, SLOTS = struct.Struct("<QQI"), 320, 1024
_TEXT_BYTES = SLOT_BYTES - SLOT.size
_TABLE_AT = HEADER_BYTES + CHANNELS * HEAD.size
_SLOTS_AT = _TABLE_AT + TABLE_BYTES
# The state of a collective: the caller waits, it runs on a device, or it has raised.
BLOCKING, ASYNCHRONOUS, RAISED = 0, 1, 2
# The most device tasks that are not known to be done, and how often a thread polls them.
_MOST_PENDING, _PERIOD_S = 64, 1.0
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")
_OURS = os.path.dirname(os.path.abspath(__file__))
# By method of ProcessGroup, each of which may end in `_on_calc_stream`: the collective, and the
# places of the tensor and of the peer among the arguments, -1 if there is none.
OPERATIONS = {
    method: (name, tensor, peer)
    for name, tensor, peer, methods in (
        ("all_reduce", 0, -1, "all_reduce allreduce"),
        ("broadcast", 0, 1, "broadcast"),
        ("reduce", 0, 1, "reduce"),
        ("all_gather", 1, -1, "all_gather all_gather_into_tensor all_gather_partial"),
        ("all_to_all", 1, -1, "all_to_all all_to_all_tensor all_to_all_single"),
        ("all_to_all", 0, -1, "alltoall alltoall_single"),
        ("reduce_scatter", 0, -1, "reduce_scatter reduce_scatter_tensor"),
        ("scatter", 0, 2, "scatter scatter_tensor"),
        ("gather", 0, 2, "gather"),
        ("barrier", -1, -1, "barrier"),
        ("send", 0, 1, "send send_partial"),
        ("recv", 0, 1, "recv recv_partial"),
    )
    for method in methods.split()
}
# A backward in which Paddle's own reducer sums gradients, invisible to our hooks; and the index of
# the ProcessGroup among the arguments of that reducer.
_BACKWARD, _REDUCERS_GROUP = "backward", 3


class _Group(NamedTuple):
    """A ProcessGroup, kept alive so that its id is not reused, and the NUMBER-th of its RANKS."""

    process_group: Any
    ranks: tuple[int, ...]
    number: int
    is_blocking: bool


class _Values(NamedTuple):
    """What is recorded of a tensor, or of all the gradients of a backward."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> _Values:
        """Describe the only one of TENSORS, or the number of elements of several."""
        sizes = [math.prod(tensor.shape) for tensor in tensors]
        shape = tuple(tensors[0].shape) if len(tensors) == 1 else (sum(sizes),)
        dtype = str(tensors[0].dtype).rpartition(".")[2].lower()
        return cls(dtype, shape, sum(sizes) * int(tensors[0].element_size()))


class FlightRecorder:
    """Records the collectives of this process, once it has a group, in the file PATH."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None
        self._table_bytes = 0
        self._numbers = itertools.count(1)
        self._groups: dict[int, _Group] = {}
        # How many groups have had the same ranks.
        self._made: Counter[tuple[int, ...]] = Counter()
        # By group, and by operation and peer of a send or recv: the channel and its next number.
        self._channels: dict[tuple[int, str, int], tuple[int, Iterator[int]]] = {}
        # Our own threads reduce, too.
        self._naming = threading.Lock()
        self._is_library: dict[str, bool] = {}
        self._pending: deque[tuple[int, Any]] = deque(maxlen=_MOST_PENDING)
        # What the next backward sums: by reducer, its group and gradients.
        self._armed: dict[int, tuple[Any, _Values]] = {}
        self.is_on = True

    def fail(self) -> None:
        """Mark the ring as failed, and stop recording."""
        self.is_on = False
        if self._memory is not None:
            _STATE.pack_into(self._memory, _STATE_AT, FAILED)

    def add(self, process_group: Any, ranks: Sequence[int]) -> None:
        """Register the RANKS of a PROCESS_GROUP."""
        if not self.is_on or id(process_group) in self._groups:
            return
        if self._memory is None:
            self._memory = _mapped(self._path)
            # A job that the script starts later must not replace the ring.
            os.environ.pop(_VARIABLE, None)
        members = tuple(int(rank) for rank in ranks)
        self._made[members] += 1
        is_blocking = process_group.name().lower() == "gloo"
        group = _Group(process_group, members, self._made[members], is_blocking)
        self._groups[id(process_group)] = group

    def begin(
        self, process_group: Any, operation: tuple[str, int, int], args: Sequence[Any]
    ) -> int:
        """Record that OPERATION is called with ARGS; return its number, 0 if it is not recorded."""
        name, place, peer_place = operation
        peer = int(args[peer_place]) if 0 <= peer_place < len(args) else -1
        tensor = args[place] if 0 <= place < len(args) else None
        if isinstance(tensor, (list, tuple)):
            tensor = tensor[0] if tensor else None
        values = _Values() if tensor is None else _Values.of([tensor])
        return self._issue(process_group, name, values, peer)

    def _issue(self, process_group: Any, name: str, values: _Values, peer: int = -1) -> int:
        group, memory = self._groups.get(id(process_group)), self._memory
        if group is None or memory is None or not self.is_on:
            return 0
        channel, sequences = self._channel(group, name, peer)
        number, sequence = next(self._numbers), next(sequences)
        fields = [channel, sequence, time.time_ns(), name, *values, peer]
        site = self._site(sys._getframe(1))
        line = json.dumps([*fields, site], ensure_ascii=False).encode(errors="replace")
        if len(line) > _TEXT_BYTES:
            # Without its line in the script.
            line = json.dumps([*fields, None]).encode()[:_TEXT_BYTES]
        at = _SLOTS_AT + number % SLOTS * SLOT_BYTES
        is_blocking = group.is_blocking or name == _BACKWARD
        SLOT.pack_into(memory, at, number, 0, BLOCKING if is_blocking else ASYNCHRONOUS)
        memory[at + SLOT.size : at + SLOT_BYTES] = line.ljust(_TEXT_BYTES, b"\0")
        HEAD.pack_into(memory, HEADER_BYTES + channel * HEAD.size, sequence)
        return number

    def _channel(self, group: _Group, name: str, peer: int) -> tuple[int, Iterator[int]]:
        """Return the channel of a collective of GROUP, and the numbers of its next ones."""
        key = (id(group.process_group), *((name, peer) if name in ("send", "recv") else ("", -1)))
        with self._naming:
            if key not in self._channels:
                assert self._memory is not None
                channel = len(self._channels)
                entry = ["channel", channel, _runs(group.ranks), group.number, *key[1:]]
                line = json.dumps(entry).encode() + b"\n"
                at, end = self._table_bytes, self._table_bytes + len(line)
                if end >= TABLE_BYTES or channel >= CHANNELS:
                    raise OverflowError("there are too many groups")
                self._memory[_TABLE_AT + at : _TABLE_AT + end] = line
                self._table_bytes = end
                self._channels[key] = channel, itertools.count(1)
        return self._channels[key]

    def mark(self, number: int, state: int | None = None) -> None:
        """Record that NUMBER, if it is still in the ring, is in STATE, and done unless RAISED."""
        if self._memory is None or not self.is_on:
            return
        at = _SLOTS_AT + number % SLOTS * SLOT_BYTES
        there, done, before = SLOT.unpack_from(self._memory, at)
        if there == number:
            done = done or (0 if state == RAISED else time.time_ns())
            SLOT.pack_into(self._memory, at, number, done, before if state is None else state)

    def end(self, number: int, process_group: Any, task: Any) -> None:
        """Record that the call NUMBER has returned TASK, which may still be running."""
        if task is None or self._groups[id(process_group)].is_blocking:
            self.mark(number)
        else:
            self._pending.append((number, task))
            assert self._settling

    def arm(self, reducer: int, process_group: Any, gradients: _Values) -> None:
        """Let the next backward sum GRADIENTS in PROCESS_GROUP, by REDUCER."""
        self._armed[reducer] = process_group, gradients

    def begin_backward(self) -> list[tuple[int, Any]]:
        """Record the backward that begins, once for each reducer that communicates in it."""
        armed, self._armed = self._armed.values(), {}
        return [(self._issue(group, _BACKWARD, gradients), group) for group, gradients in armed]

    def end_backward(self, number: int, process_group: Any, _result: None) -> None:
        """Record that a backward has returned; what it gave to a device may still be running."""
        is_blocking = self._groups[id(process_group)].is_blocking
        self.mark(number, None if is_blocking else ASYNCHRONOUS)

    def settle(self) -> None:
        """From another thread, record which tasks are done and when the others were still pending.

        Otherwise a rank that calls nothing more would seem to wait for all of its collectives.
        """
        at_ns = time.time_ns()
        if self._memory is not None and self.is_on:
            for number, task in tuple(self._pending):
                if task.is_completed():
                    self.mark(number)
            _SETTLED.pack_into(self._memory, _SETTLED_AT, at_ns)

    @functools.cached_property
    def _settling(self) -> threading.Thread:
        """The thread that settles, begun with the first task of a device."""
        settle = watching(self, self.settle)
        has_ended = threading.Event()

        def run() -> None:
            while self.is_on and not has_ended.wait(_PERIOD_S):
                settle()

        thread = threading.Thread(target=run, name="fleetrun-collectives", daemon=True)

        def stop() -> None:
            has_ended.set()
            thread.join(_PERIOD_S)
            # Otherwise the last ones of a script that has waited for them would stay open.
            settle()

        # No task may be polled once its device has been shut down.
        atexit.register(stop)
        thread.start()
        return thread

    def _site(self, frame: FrameType | None) -> tuple[str, int, str] | None:
        """Return the script's line that calls; None if the script does not call."""
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            if file not in self._is_library:
                # Paddle need not be among the installed packages.
                ours = (_OURS, *getattr(sys.modules.get("paddle"), "__path__", ()))
                self._is_library[file] = file.startswith(ours) or any(
                    part in file for part in _LIBRARIES
                )
            if not self._is_library[file]:
                return file[-100:], frame.f_lineno, code.co_name[:40]
            frame = frame.f_back
        return None


# The recorder of this process, if the launcher requests one.
_recorder: FlightRecorder | None = None


def watch() -> None:
    """Record collectives if the launcher has given a file for them."""
    global _recorder  # one process
    path = os.environ.get(_VARIABLE)
    if path:
        _recorder = FlightRecorder(path)
        after_import("paddle.base.core", functools.partial(_patch_methods, _recorder))
        after_import("paddle.distributed.communication.group", _patch_groups)


def add_group(process_group: Any, ranks: Sequence[int]) -> None:
    """Register the RANKS of a PROCESS_GROUP, if there is a recorder."""
    if _recorder is not None and process_group is not None:
        watching(_recorder, _recorder.add)(process_group, ranks)


def watching(recorder: FlightRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    """Let METHOD of RECORDER fail at most once: then the ring is marked, and recording stops."""

    def guarded(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except BaseException:
            recorder.fail()
            raise

    return border.watching(_WHAT, 0)(guarded)


def _recorded(
    recorder: FlightRecorder,
    call: Callable[..., Any],
    begin: Callable[..., list[tuple[int, Any]]],
    end: Callable[..., None],
) -> Callable[..., Any]:
    """Return CALL, recorded in the groups for which BEGIN returns a number, 0 for none.

    END is called with the number, the group and the result.
    """
    begin, end, mark = (watching(recorder, hook) for hook in (begin, end, recorder.mark))

    @functools.wraps(call)
    def recorded(*args: Any, **options: Any) -> Any:
        begun = [entry for entry in begin(*args, **options) or () if entry[0]]
        try:
            result = call(*args, **options)
        except BaseException:
            for number, _ in begun:
                mark(number, RAISED)
            raise
        for number, group in begun:
            end(number, group, result)
        return result

    return recorded


def _patch_groups(module: Any) -> None:
    watch_method(
        module.Group, "__init__", after=lambda group: add_group(group.process_group, group.ranks)
    )


def _patch_methods(recorder: FlightRecorder, core: Any) -> None:
    def begin(
        operation: tuple[str, int, int], process_group: Any, *args: Any, **_: Any
    ) -> list[tuple[int, Any]]:
        return [(recorder.begin(process_group, operation, args), process_group)]

    kind: Any = core.ProcessGroup
    for name, operation in OPERATIONS.items():
        for method in (name, f"{name}_on_calc_stream"):
            if hasattr(kind, method):
                own = functools.partial(begin, operation)
                recorded = _recorded(recorder, getattr(kind, method), own, recorder.end)
                setattr(kind, method, recorded)
    if hasattr(core, "EagerReducer"):
        _patch_backward(recorder, core)


def _patch_backward(recorder: FlightRecorder, core: Any) -> None:
    """Record each backward in which a reducer of Paddle's sums gradients, as one collective."""
    kind: Any = core.EagerReducer
    build, run = kind.__init__, core.eager.run_backward
    # By id, with its group, which Paddle keeps, and the gradients that it sums.
    reducers: dict[int, tuple[Any, _Values]] = {}

    @functools.wraps(build)
    def __init__(reducer: Any, *args: Any) -> None:
        build(reducer, *args)
        keep(reducer, args[0], args[_REDUCERS_GROUP])

    def remember(reducer: Any, parameters: Sequence[Any], group: Any) -> None:
        if parameters:
            reducers[id(reducer)] = group, _Values.of(parameters)

    def prepare(reducer: Any) -> None:
        if id(reducer) in reducers:
            recorder.arm(id(reducer), *reducers[id(reducer)])

    keep = watching(recorder, remember)
    kind.__init__ = __init__
    watch_method(kind, "prepare_for_backward", before=watching(recorder, prepare))
    core.eager.run_backward = _recorded(
        recorder, run, lambda *_, **__: recorder.begin_backward(), recorder.end_backward
    )


def _mapped(path: str) -> mmap.mmap:
    """Make the file PATH with a header, and return its memory."""
    draft = f"{path}.{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600)
    try:
        # On a full disk a missing page would kill the rank when it is written.
        os.posix_fallocate(fd, 0, _SLOTS_AT + SLOTS * SLOT_BYTES)
        memory = mmap.mmap(fd, _SLOTS_AT + SLOTS * SLOT_BYTES)
        names = "PADDLE_RESTART_COUNT", "PADDLE_TRAINER_ID"
        restart, rank = (int(os.environ.get(name) or 0) for name in names)
        HEADER.pack_into(memory, 0, MAGIC, RECORDING, os.getpid(), restart, rank, 0)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(fd)
    return memory


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return RANKS as runs of consecutive ones, as in [[0, 2], [5, 5]]."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs
