"""Sums gradients over several gloo communicators, which Paddle's own operators cannot do.

Paddle's CPU kernels take the communicator from the device, so all operators use the same one,
whatever their ring id (seen in 2.6.2 and 3.3.1: ranks waited for ranks outside their ring). Instead
two `py_func` operators per bucket are inserted. The first hands the gradients to the threads of a
channel, and backward goes on. The second waits for the sums; it stands before the first reader
of a gradient of the bucket.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import allreduce_stages, communicators, flight_recorder, gloo_stores, store
from ...allreduce_stages import ThreadStages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...allreduce_stages import Stage, Work

OPERATOR = "py_func"
_TOKEN = "fleetrun_token"  # noqa: S105 - it orders operators
# The open channels, by the number of ranks, the size of groups and the channel's own number.
_channels: dict[tuple[int, int, int], Channel] = {}
# All ranks have the same counts. Fleetrun's rings of static graphs begin at 100, Paddle's own at 0.
_numbers = itertools.count(100)
# The first operators of buckets, by Paddle's number for their functions.
_starts: dict[int, StartOperator] = {}


class Channel:
    """The communicators of the stages of allreduces, and the threads that run them in order."""

    def __init__(self, stages: Sequence[Stage], rings: tuple[int, ...]) -> None:
        self.rings = rings
        # Not stopped at exit: a rank that fails must not wait for unresponsive ranks.
        self._threads = ThreadStages(stages)

    def begin(self, tensor: Any) -> Work:
        """Let the threads sum TENSOR over the ranks."""
        return self._threads.submit(tensor)


class StartOperator(NamedTuple):
    """An operator that passes its first GRADIENTS inputs to a channel."""

    channel: Channel
    gradients: int


def open_channels(rank: int, ranks: int, *, size: int, number: int) -> list[Channel]:
    """Connect RANKS by NUMBER channels: in groups of SIZE and among their leaders if above 1.

    A collective call: all ranks must make it, and connect their communicators in the same order.
    """
    levels = communicators.split_ranks(range(ranks), size if size > 1 else ranks)
    for channel in range(number):
        if (ranks, size, channel) in _channels:
            continue
        _channels[ranks, size, channel] = _open_channel(rank, levels)
    return [_channels[ranks, size, channel] for channel in range(number)]


def _open_channel(rank: int, levels: communicators.Hierarchy) -> Channel:
    top = next(_numbers)
    # All ranks number all groups, also those that they are not in.
    numbered = [(next(_numbers), next(_numbers), group) for group in levels.groups]
    first, last, group = next(entry for entry in numbered if rank in entry[2])
    reducing = _connect(rank, group, first)
    if len(levels.groups) == 1:
        return Channel(allreduce_stages.flat(reducing), (first,))
    rings = (first, last, top) if rank in levels.leaders else (first, last)
    leaders = _connect(rank, levels.leaders, top)
    broadcasting = _connect(rank, group, last)
    return Channel(allreduce_stages.hierarchical(reducing, leaders, broadcasting), rings)


def _connect(rank: int, ranks: Sequence[int], number: int) -> Any:
    if len(ranks) < 2 or rank not in ranks:  # alone
        return None
    from paddle.base import core

    is_leader = rank == ranks[0]
    with gloo_stores.new_store(
        store.job_store(), number, size=len(ranks), is_leader=is_leader
    ) as own:
        group = core.ProcessGroupGloo.create(own, ranks.index(rank), len(ranks), number)
    flight_recorder.add_group(group, ranks)
    return group


def channel_of(op: Any) -> Channel | None:
    """Return the channel that the operator OP passes gradients to, or None."""
    if op.type != OPERATOR:
        return None
    start = _starts.get(int(op.attr("forward_callable_id")))
    return None if start is None else start.channel


def gradients_of(op: Any) -> list[str]:
    """Return the names of the gradients that the operator OP passes to a channel."""
    return list(op.input_arg_names[: _starts[int(op.attr("forward_callable_id"))].gradients])


def work_beside(block: Any) -> list[int]:
    """Return, for each bucket of BLOCK, how many operators run during its sum."""
    begun: dict[str, int] = {}
    overlapped = []
    for place, op in enumerate(block.ops):
        if channel_of(op) is not None:
            begun[op.output_arg_names[0]] = place
        elif op.type == OPERATOR:
            starts = [begun[name] for name in op.input_arg_names if name in begun]
            overlapped += [
                sum(between.type != OPERATOR for between in block.ops[start:place])
                for start in starts
            ]
    return overlapped


def make_token(block: Any) -> Any:
    """Make a variable in BLOCK that marks that a bucket was sent."""
    from paddle.utils import unique_name

    return block.create_var(
        name=unique_name.generate(_TOKEN),
        shape=[1],
        dtype="float32",
        persistable=False,
        stop_gradient=True,
    )


def insert(
    block: Any,
    places: tuple[int, int],
    gradients: Sequence[Any],
    channel: Channel,
    *,
    tokens: tuple[Any, Any],
    op_role: int,
) -> None:
    """Sum GRADIENTS of BLOCK over CHANNEL from the first of PLACES on; read the sums at the second.

    The first of TOKENS marks that the previous bucket was sent: ranks that began in different
    orders would wait for each other. The second is for this bucket.
    """
    before, token = tokens
    begin, end = _functions(channel, gradients)
    for place, function, read, written in (
        (places[1], end, [*gradients, token], gradients),
        (places[0], begin, gradients if before is None else [*gradients, before], [token]),
    ):
        block._insert_op_without_sync(
            place,
            type=OPERATOR,
            inputs={"X": read},
            outputs={"Out": written},
            attrs={
                "forward_callable_id": function,
                "backward_callable_id": -1,
                "backward_skip_vars": [],
                "op_role": op_role,
            },
        )


def _functions(channel: Channel, gradients: Sequence[Any]) -> tuple[int, int]:
    """Return Paddle's numbers of two functions: one begins to sum, one returns the sums."""
    import numpy as np

    paddle: Any = sys.modules["paddle"]
    common: Any = sys.modules["paddle.static.nn.common"]
    kind = paddle.base.data_feeder.convert_dtype(gradients[0].dtype)
    ends = np.cumsum([math.prod(gradient.shape) for gradient in gradients])
    carried = np.zeros(ends[-1], dtype=kind)
    tensor = _sharing(carried)
    under_way: list[Work] = []

    # Paddle inspects their parameter names, so they cannot be methods.
    def begin(*tensors: Any) -> Any:
        for part, value in zip(np.split(carried, ends[:-1]), tensors):
            part[:] = np.asarray(value).reshape(-1)
        under_way.append(channel.begin(tensor))
        return np.zeros(1, "float32")

    def end(*tensors: Any) -> Any:
        under_way.pop().wait()
        return [
            part.reshape(value.shape())
            for part, value in zip(np.split(carried, ends[:-1]), tensors)
        ]

    numbers = common.PyFuncRegistry(begin).id, common.PyFuncRegistry(end).id
    _starts[numbers[0]] = StartOperator(channel, len(gradients))
    return numbers


def _sharing(array: Any) -> Any:
    """Return a tensor that shares the memory of ARRAY."""
    from paddle.base import core

    paddle: Any = sys.modules["paddle"]
    place = paddle.CPUPlace()
    # Creating a tensor needs the tracer of dynamic graphs; using it does not.
    with paddle.base.dygraph.guard(place):
        return core.eager.Tensor(array, place, False, True, "fleetrun_carried", True)
