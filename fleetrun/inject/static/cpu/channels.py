"""Sums gradients over several gloo communicators, which Paddle's own operators cannot do.

Paddle's CPU kernels take the communicator from the device, so all operators use the same one,
whatever their ring id (seen in 2.6.2 and 3.3.1: ranks waited for ranks outside their ring). Instead
two `py_func` operators per bucket are inserted. The first hands the gradients to the thread of a
channel, and backward goes on. The second waits for the sums; it stands before the first reader
of a gradient of the bucket.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import allreduce_stages, flight_recorder, gloo_stores, store
from ...allreduce_stages import ThreadStages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...allreduce_stages import Work

OPERATOR = "py_func"
_TOKEN = "fleetrun_token"  # noqa: S105 - it orders operators
# Fleetrun's rings of static graphs begin here, Paddle's own at 0.
FIRST = 100
_channels: list[Channel] = []
# The first operators of buckets, by Paddle's number for their functions.
_starts: dict[int, StartOperator] = {}


class Channel(NamedTuple):
    """The communicator RING of all ranks, and the thread that sums over it, in order."""

    ring: int
    # Not stopped at exit: a rank that fails must not wait for unresponsive ranks.
    threads: ThreadStages


class StartOperator(NamedTuple):
    """An operator that passes its first GRADIENTS inputs to a channel."""

    channel: Channel
    gradients: int


def open_channels(rank: int, ranks: int, number: int) -> list[Channel]:
    """Connect RANKS by NUMBER channels.

    A collective call: all ranks must make it, and connect their communicators in the same order.
    """
    for ring in range(FIRST + len(_channels), FIRST + number):
        group = _connect(rank, ranks, ring)
        _channels.append(Channel(ring, ThreadStages(allreduce_stages.flat(group))))
    return _channels[:number]


def _connect(rank: int, ranks: int, ring: int) -> Any:
    from paddle.base import core

    with gloo_stores.new_store(store.job_store(), ring, size=ranks, is_leader=rank == 0) as own:
        group = core.ProcessGroupGloo.create(own, rank, ranks, ring)
    flight_recorder.add_group(group, range(ranks))
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
    for gradient in gradients:
        # Paddle reads the shape of an output `x@GRAD` from `x`; gradients of gradients lack one.
        forward, suffix, rest = gradient.name.rpartition("@GRAD")
        if suffix and not rest and block._find_var_recursive(forward) is None:
            block.create_var(name=forward, shape=gradient.shape, dtype=gradient.dtype)
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
    # Creating a tensor needs the tracer of dynamic graphs; using it does not.
    with paddle.base.dygraph.guard(paddle.CPUPlace()):
        # It shares the memory of the array.
        tensor = paddle.base.core.eager.Tensor(
            carried, paddle.CPUPlace(), False, True, "fleetrun_carried", True
        )
    under_way: list[Work] = []

    # Paddle inspects their parameter names, so they cannot be methods.
    def begin(*tensors: Any) -> Any:
        for part, value in zip(np.split(carried, ends[:-1]), tensors):
            part[:] = np.asarray(value).reshape(-1)
        under_way.append(channel.threads.submit(tensor))
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
