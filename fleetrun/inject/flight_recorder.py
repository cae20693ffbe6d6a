"""Records each collective of this rank in a ring in a mapped file, which outlives the rank.

`rundir/flightfile.py` reads it. Writes reach the kernel at once, so they survive a `kill -9`;
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
import os
import re
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from . import border
from .import_hooks import after_import, in_place_of, watch_method

_VARIABLE = "FLEETRUN_FLIGHT_RECORDER"
_WHAT = "the flight recorder"
# The file: a header, the last sequence number of each channel, lines of JSON that name channels and
# what is not recorded, and slots.
MAGIC = b"FLTRING3"
# Magic, state, pid, restart, rank, when the tasks of a device were last polled.
HEADER = struct.Struct("<8s4I8xQ")
HEADER_BYTES = 64
_STATE, _STATE_AT = struct.Struct("<I"), 8
_SETTLED, _SETTLED_AT = struct.Struct("<Q"), 32
# The state of a ring: its rank may go on, the recorder has failed, the script has ended.
RECORDING, FAILED, ENDED = 0, 1, 2
HEAD, CHANNELS, TABLE_BYTES = struct.Struct("<Q"), 512, 64 * 1024
# A slot: the number of the collective, when it was done, its state; a line of JSON follows. Times
# are nanoseconds of the wall clock.
SLOT, SLOT_BYTES, SLOTS = struct.Struct("<QQI"), 320, 1024
_TEXT_BYTES = SLOT_BYTES - SLOT.size
# The state of a collective: the caller waits, it runs on a device, or it has raised.
BLOCKING, ASYNCHRONOUS, RAISED = 0, 1, 2
# A group whose members wait for each other to make it, in a channel of its own.
NEW_GROUP = "new_group"
# The most device tasks that are not known to be done.
_MOST_PENDING = 64
# How often a thread polls them while the rank calls no collective.
_PERIOD_S = 1.0
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")
_OURS = os.path.dirname(os.path.abspath(__file__))


class Operation(NamedTuple):
    """How a method of ProcessGroup is called: which arguments are tensor, peer and kind of sum."""

    name: str
    tensor: int | None = 0
    peer: int | None = None
    reduction: int | None = None


# By method; each may end in `_on_calc_stream`.
OPERATIONS = {
    method: operation
    for operation, methods in (
        (Operation("all_reduce", reduction=1), "all_reduce allreduce"),
        (Operation("broadcast", peer=1), "broadcast"),
        (Operation("reduce", peer=1, reduction=2), "reduce"),
        (Operation("all_gather", 1), "all_gather all_gather_into_tensor all_gather_partial"),
        (Operation("all_to_all", 1), "all_to_all all_to_all_tensor all_to_all_single"),
        (Operation("all_to_all"), "alltoall alltoall_single"),
        (Operation("reduce_scatter", reduction=2), "reduce_scatter reduce_scatter_tensor"),
        (Operation("scatter", peer=2), "scatter scatter_tensor"),
        (Operation("gather", peer=2), "gather"),
        (Operation("barrier", None), "barrier"),
        (Operation("send", peer=1), "send send_partial"),
        (Operation("recv", peer=1), "recv recv_partial"),
    )
    for method in methods.split()
}
_PAIRS = ("send", "recv")
_ON_STREAM = "{}_on_calc_stream"
# A backward in which Paddle's own reducer sums gradients, invisible to our hooks.
_BACKWARD = "backward"
# The index of the ProcessGroup among the arguments of Paddle's reducer.
_REDUCERS_GROUP = 3
# The functions within which Paddle calls collectives that we do not see: module, class if any, and
# how that is named.
_UNRECORDED = """
paddle._C_ops, paddle._legacy_C_ops = Paddle's kernels
    sync_batch_norm_ c_softmax_with_cross_entropy c_softmax_with_multi_label_cross_entropy c_concat
    c_allgather c_allreduce_sum c_allreduce_sum_ c_allreduce_max_ margin_cross_entropy all_reduce
    class_center_sample global_scatter global_gather fused_attention fused_feedforward all_gather
    fused_multi_transformer fused_multi_transformer_ mp_allreduce_sum all_to_all reduce_scatter
paddle.base.executor Executor = static programs
    run
paddle.jit.dy2static.partial_program PartialProgramLayer = to_static
    __call__ sot_call
paddle.jit.dy2static.pir_partial_program PartialProgramLayer = to_static
    __call__ sot_call
paddle.jit.translated_layer = jit.load
    _run_dygraph
paddle.distributed.parallel_with_gloo = gloo_barrier
    gloo_barrier
paddle.distributed.fleet.base.role_maker Gloo = fleet's barriers
    barrier all_reduce all_gather
paddle.distributed.auto_parallel.api = auto parallel
    shard_tensor dtensor_from_fn dtensor_from_local reshard
"""


class Ring:
    """A ring in the file PATH: the last collectives, and the channels that they name by number."""

    def __init__(self, path: str) -> None:
        self._table_at = HEADER_BYTES + CHANNELS * HEAD.size
        self._slots_at = self._table_at + TABLE_BYTES
        size = self._slots_at + SLOTS * SLOT_BYTES
        draft = f"{path}.{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(draft, flags, 0o600)
        try:
            # On a full disk a missing page would kill the rank when it is written.
            os.posix_fallocate(fd, 0, size)
            self._memory = mmap.mmap(fd, size)
            restart, rank = (_number(f"PADDLE_{name}") for name in ("RESTART_COUNT", "TRAINER_ID"))
            HEADER.pack_into(self._memory, 0, MAGIC, RECORDING, os.getpid(), restart, rank, 0)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        finally:
            os.close(fd)
        self._used = 0
        self._numbers = itertools.count(1)
        self._channels = itertools.count()
        # Our own threads reduce, too.
        self._naming = threading.Lock()

    def name(self, kind: str, *values: Any) -> None:
        """Write a line of KIND with VALUES to the table."""
        line = json.dumps([kind, *values]).encode() + b"\n"
        with self._naming:
            at, self._used = self._table_at + self._used, self._used + len(line)
            if self._used >= TABLE_BYTES:
                raise OverflowError("there are too many groups")
            self._memory[at : at + len(line)] = line

    def new_channel(self, ranks: Sequence[int], number: int, operation: str, peer: int) -> int:
        """Return the number of a new channel."""
        channel = next(self._channels)
        if channel >= CHANNELS:
            raise OverflowError("there are too many groups")
        self.name("channel", channel, _ranges(ranks), number, operation, peer)
        return channel

    def begin(self, state: int, channel: int, sequence: int, call: list[Any]) -> int:
        """Record CALL, the SEQUENCE-th of CHANNEL, which is issued now; return its number."""
        number = next(self._numbers)
        fields = [channel, sequence, time.time_ns(), *call]
        text = json.dumps(fields, ensure_ascii=False).encode(errors="replace")
        if len(text) > _TEXT_BYTES:
            # Without its line in the script.
            text = json.dumps([*fields[:-1], None]).encode()[:_TEXT_BYTES]
        at = self._slots_at + number % SLOTS * SLOT_BYTES
        SLOT.pack_into(self._memory, at, number, 0, state)
        self._memory[at + SLOT.size : at + SLOT_BYTES] = text.ljust(_TEXT_BYTES, b"\0")
        HEAD.pack_into(self._memory, HEADER_BYTES + channel * HEAD.size, sequence)
        return number

    def end(self, number: int, state: int | None = None) -> None:
        """Record that NUMBER, if it is still in the ring, is done, or that it is in STATE."""
        at = self._slots_at + number % SLOTS * SLOT_BYTES
        there, done, before = SLOT.unpack_from(self._memory, at)
        if there == number:
            if state is None:
                done, state = done or time.time_ns(), before
            SLOT.pack_into(self._memory, at, number, done, state)

    def settled(self, at_ns: int) -> None:
        """Record that the open collectives were not done at AT_NS."""
        _SETTLED.pack_into(self._memory, _SETTLED_AT, at_ns)

    def close(self, state: int) -> None:
        """Record that the ring ends here: FAILED whatever the rank does, ENDED with its script."""
        _STATE.pack_into(self._memory, _STATE_AT, state)


class _Group(NamedTuple):
    """A ProcessGroup, kept alive so that its id is not reused, and the NUMBER-th of its RANKS."""

    process_group: Any
    ranks: tuple[int, ...]
    number: int
    is_blocking: bool


class _Tensor(NamedTuple):
    """What is recorded of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    element_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> _Tensor:
        dtype = str(tensor.dtype).rpartition(".")[2].lower()
        return cls(dtype, tuple(tensor.shape), int(tensor.element_size()))


_NO_TENSOR = _Tensor("", (), 0)


class FlightRecorder:
    """Records the collectives of this process, once it has a group, in the file PATH."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ring: Ring | None = None
        self._groups: dict[int, _Group] = {}
        # By group, operation and peer: the channel and its next number.
        self._channels: dict[tuple[int, str, int], tuple[int, Iterator[int]]] = {}
        self._world: tuple[int, ...] = ()
        # How many calls of new_group there have been, of groups without this rank, too.
        self._new_groups = 0
        # How many groups have had the same ranks.
        self._made: Counter[tuple[int, ...]] = Counter()
        self._is_library: dict[str, bool] = {}
        self._pending: deque[tuple[int, Any]] = deque(maxlen=_MOST_PENDING)
        self._has_ended = threading.Event()
        # What the next backward sums, by the id of its group.
        self._armed: dict[int, tuple[Any, _Tensor]] = {}
        self._unrecorded: dict[str, None] = {}
        self.is_on = True

    def leave(self) -> None:
        """Stop recording in a forked child, as the ring belongs to its parent."""
        self.is_on = False

    def fail(self) -> None:
        """Mark the ring as ended."""
        self.is_on = False
        if self._ring is not None:
            self._ring.close(FAILED)

    def end_script(self) -> None:
        """Record that the script has ended without an error: a device may take long to end."""
        if self._ring is not None and self.is_on and getattr(sys, "last_value", None) is None:
            self._ring.close(ENDED)

    def add(self, process_group: Any, ranks: Sequence[int]) -> None:
        """Register the RANKS of a PROCESS_GROUP."""
        if not self.is_on or id(process_group) in self._groups:
            return
        members = tuple(int(rank) for rank in ranks)
        if self._ring is None:
            self._ring, self._world = Ring(self._path), members
            # A job that the script starts later must not replace the ring.
            os.environ.pop(_VARIABLE, None)
            for what in self._unrecorded:
                self._ring.name("unrecorded", what)
            # What the script registers later runs earlier, and may communicate.
            atexit.register(self.end_script)
        self._made[members] += 1
        is_blocking = process_group.name().lower() == "gloo"
        group = _Group(process_group, members, self._made[members], is_blocking)
        self._groups[id(process_group)] = group

    def note_unrecorded(self, what: str) -> None:
        """Record that WHAT is used, within which Paddle calls collectives without our knowledge."""
        if what not in self._unrecorded:
            self._unrecorded[what] = None
            if self._ring is not None and self.is_on:
                self._ring.name("unrecorded", what)

    def begin(self, process_group: Any, operation: Operation, args: Sequence[Any]) -> int:
        """Record that OPERATION is called with ARGS; return its number, 0 if it is not recorded."""
        name, place, peer_place, reduction = operation
        has_peer = peer_place is not None and peer_place < len(args)
        peer = int(args[peer_place]) if has_peer else -1  # type: ignore[index]
        if reduction is not None and reduction < len(args):
            kind = str(args[reduction]).rpartition(".")[2].lower()
            name = name if kind == "sum" else f"{name} ({kind})"
        tensor = args[place] if place is not None and place < len(args) else None
        if isinstance(tensor, (list, tuple)):
            tensor = tensor[0] if tensor else None
        described = _NO_TENSOR if tensor is None else _Tensor.of(tensor)
        return self._issue(process_group, name, described, peer)

    def _issue(self, process_group: Any, name: str, tensor: _Tensor, peer: int = -1) -> int:
        group = self._groups.get(id(process_group))
        if group is None or self._ring is None or not self.is_on:
            return 0
        while self._pending and self._pending[0][1].is_completed():
            self._ring.end(self._pending.popleft()[0])
        key = (id(process_group), *((name, peer) if name in _PAIRS else ("", -1)))
        if key not in self._channels:
            channel = self._ring.new_channel(group.ranks, group.number, *key[1:])
            self._channels[key] = channel, itertools.count(1)
        channel, numbers = self._channels[key]
        nbytes = math.prod(tensor.shape) * tensor.element_bytes
        is_blocking = group.is_blocking or name == _BACKWARD
        call = [name, tensor.dtype, tensor.shape, nbytes, peer, self._site(sys._getframe(1))]
        return self._ring.begin(
            BLOCKING if is_blocking else ASYNCHRONOUS, channel, next(numbers), call
        )

    def begin_group(self, ranks: Sequence[int] | None) -> int:
        """Record that this rank makes a group of RANKS, by default of all."""
        self._new_groups += 1
        members = self._world if ranks is None else tuple(sorted(int(rank) for rank in ranks))
        is_member = _number("PADDLE_TRAINER_ID") in members
        if self._ring is None or not self.is_on or len(members) < 2 or not is_member:
            return 0
        channel = self._ring.new_channel(members, self._new_groups, NEW_GROUP, -1)
        site = self._site(sys._getframe(1))
        return self._ring.begin(BLOCKING, channel, 1, [NEW_GROUP, "", [], 0, -1, site])

    def end(self, number: int, process_group: Any = None, task: Any = None) -> None:
        """Record that the call NUMBER has returned TASK, which may still be running."""
        if self._ring is None or not self.is_on:
            return
        group = self._groups.get(id(process_group))
        if task is None or group is None or group.is_blocking:
            self._ring.end(number)
            return
        self._pending.append((number, task))
        assert self._settling

    def raised(self, number: int) -> None:
        """Record that the call NUMBER has raised."""
        if self._ring is not None and self.is_on:
            self._ring.end(number, RAISED)

    def arm(self, process_group: Any, gradients: _Tensor) -> None:
        """Let the next backward sum GRADIENTS in PROCESS_GROUP, and those that it sums already."""
        _, others = self._armed.get(id(process_group), (None, _NO_TENSOR))
        elements = math.prod(gradients.shape) + math.prod(others.shape) * bool(others.dtype)
        self._armed[id(process_group)] = process_group, gradients._replace(shape=(elements,))

    def begin_backward(self) -> list[tuple[int, Any]]:
        """Record the backward that begins, in each group in which it communicates."""
        armed = [*self._armed.values()]
        self._armed.clear()
        return [(self._issue(group, _BACKWARD, sums), group) for group, sums in armed]

    def end_backward(self, number: int, process_group: Any, _result: None) -> None:
        """Record that a backward has returned; what it gave to a device may still be running."""
        if self._ring is None or not self.is_on:
            return
        if not self._groups[id(process_group)].is_blocking:
            self._ring.end(number, ASYNCHRONOUS)
        self._ring.end(number)

    def settle(self) -> None:
        """From another thread, record which tasks are done and when the others were still pending.

        Otherwise a rank that calls nothing more would seem to wait for all of its collectives.
        """
        ring, at_ns = self._ring, time.time_ns()
        if ring is not None and self.is_on:
            for number, task in tuple(self._pending):
                if task.is_completed():
                    ring.end(number)
            ring.settled(at_ns)

    @functools.cached_property
    def _settling(self) -> threading.Thread:
        """The thread that settles, begun with the first task of a device."""
        settle = watching(self, self.settle)

        def run() -> None:
            while self.is_on and not self._has_ended.wait(_PERIOD_S):
                settle()

        thread = threading.Thread(target=run, name="fleetrun-collectives", daemon=True)

        def stop() -> None:
            self._has_ended.set()
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
                self._is_library[file] = file.startswith((_OURS, _paddles_folder())) or any(
                    part in file for part in _LIBRARIES
                )
            if not self._is_library[file]:
                return file[-100:], frame.f_lineno, code.co_name[:40]
            frame = frame.f_back
        return None


def _paddles_folder() -> str:
    """Return where Paddle's code is, which need not be among the installed packages."""
    return os.path.join(sys.modules["paddle"].__path__[0], "") if "paddle" in sys.modules else _OURS


def watch() -> None:
    """Record collectives if the launcher has given a file for them."""
    global _recorder  # one process
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    _recorder = FlightRecorder(path)
    os.register_at_fork(after_in_child=_recorder.leave)
    after_import("paddle.base.core", functools.partial(_patch_methods, _recorder))
    after_import("paddle.distributed.communication.group", _patch_groups)
    after_import("paddle.distributed.collective", functools.partial(_patch_new_group, _recorder))
    for entry in re.split(r"\n(?! )", _UNRECORDED.strip()):
        head, *lines = entry.split("\n")
        place, _, what = head.partition(" = ")
        functions = " ".join(lines).split()
        for owner in place.split(", "):
            module, _, kind = owner.partition(" ")
            after_import(module, functools.partial(_note, _recorder, kind, functions, what))


# The recorder of this process, if the launcher requests one.
_recorder: FlightRecorder | None = None


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
    begin, end, raised = (watching(recorder, hook) for hook in (begin, end, recorder.raised))

    @functools.wraps(call)
    def recorded(*args: Any, **options: Any) -> Any:
        begun = begin(*args, **options) or ()
        try:
            result = call(*args, **options)
        except BaseException:
            for number, _ in begun:
                if number:
                    raised(number)
            raise
        for number, group in begun:
            if number:
                end(number, group, result)
        return result

    return recorded


def _patch_groups(module: Any) -> None:
    watch_method(
        module.Group, "__init__", after=lambda group: add_group(group.process_group, group.ranks)
    )


def _patch_new_group(recorder: FlightRecorder, collective: Any) -> None:
    def begin(
        ranks: Sequence[int] | None = None, *_: Any, **_options: Any
    ) -> list[tuple[int, None]]:
        return [(recorder.begin_group(ranks), None)]

    new_group = collective.new_group
    collective.new_group = _recorded(recorder, new_group, begin, recorder.end)
    _replace_in_modules("new_group", new_group, collective.new_group)


def _replace_in_modules(name: str, function: Any, replacement: Any) -> None:
    """Replace FUNCTION in the modules that have imported it: Paddle may be imported already."""
    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is function:
            vars(module)[name] = replacement


def _note(
    recorder: FlightRecorder, owner: str, functions: Sequence[str], what: str, module: Any
) -> None:
    """Record that WHAT is used when one of the FUNCTIONS of OWNER in MODULE is called."""
    note = watching(recorder, recorder.note_unrecorded)

    def noted(original: Any, *args: Any, **options: Any) -> Any:
        note(what)
        return original(*args, **options)

    patched = getattr(module, owner) if owner else module
    for name in functions:
        if hasattr(patched, name):
            function = getattr(patched, name)
            replacement = in_place_of(patched, name)(noted)
            if isinstance(function, FunctionType) and not owner:
                _replace_in_modules(name, function, replacement)


def methods_of(kind: Any) -> list[tuple[str, Operation]]:
    """Return the names of the methods of a ProcessGroup's class that are collectives, and which."""
    return [
        (method, operation)
        for name, operation in OPERATIONS.items()
        for method in (name, _ON_STREAM.format(name))
        if hasattr(kind, method)
    ]


def _patch_methods(recorder: FlightRecorder, core: Any) -> None:
    def begin(
        operation: Operation, process_group: Any, *args: Any, **_: Any
    ) -> list[tuple[int, Any]]:
        return [(recorder.begin(process_group, operation, args), process_group)]

    kind: Any = core.ProcessGroup
    for name, operation in methods_of(kind):
        own = functools.partial(begin, operation)
        setattr(kind, name, _recorded(recorder, getattr(kind, name), own, recorder.end))
    if hasattr(core, "EagerReducer"):
        _patch_backward(recorder, core)


def _patch_backward(recorder: FlightRecorder, core: Any) -> None:
    """Record each backward in which a reducer of Paddle's sums gradients, as one collective."""
    kind: Any = core.EagerReducer
    build, run = kind.__init__, core.eager.run_backward
    # By id, with its group, which Paddle keeps.
    reducers: dict[int, tuple[Any, _Tensor]] = {}

    @functools.wraps(build)
    def __init__(reducer: Any, *args: Any) -> None:
        build(reducer, *args)
        keep(reducer, args[0], args[_REDUCERS_GROUP])

    def remember(reducer: Any, parameters: Sequence[Any], group: Any) -> None:
        elements = sum(math.prod(parameter.shape) for parameter in parameters)
        if parameters:
            sums = _Tensor.of(parameters[0])._replace(shape=(elements,))
            reducers[id(reducer)] = group, sums

    def prepare(reducer: Any) -> None:
        if id(reducer) in reducers:
            recorder.arm(*reducers[id(reducer)])

    keep, arm = watching(recorder, remember), watching(recorder, prepare)

    def begin(*_: Any, **_options: Any) -> list[tuple[int, Any]]:
        return recorder.begin_backward()

    kind.__init__ = __init__
    watch_method(kind, "prepare_for_backward", before=arm)
    core.eager.run_backward = _recorded(recorder, run, begin, recorder.end_backward)


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
