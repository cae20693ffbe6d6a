"""Sums gradients over several gloo communicators, which Paddle's own operators cannot do.

Paddle's CPU kernels take the communicator from the device, so all operators use the same one,
whatever their ring id (seen in 2.6.2 and 3.3.1: ranks waited for ranks outside their ring). Instead
two `py_func` operators per bucket are inserted. The first hands the gradients to the threads of a
channel, and backward goes on. The second waits for the sums; it stands before the first reader
of a gradient of the bucket.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import allreduce_stages, communicators, flight_recorder, gloo_stores, store
from ...allreduce_stages import ThreadStages
from ...paddle_api import programs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...allreduce_stages import Stage, Work

OPERATOR = "py_func"
_TOKEN = "fleetrun_token"  # noqa: S105 - it orders operators
# The channels that there are, by the number of ranks, the size of groups and their own number.
_channels: dict[tuple[int, int, int], Channel] = {}
# All ranks count alike. Fleetrun's rings of static graphs begin at 100, Paddle's own at 0.
_numbers = itertools.count(100)
# The first operators of buckets, by the number that Paddle has for their functions.
_starts: dict[int, StartOperator] = {}


class Channel:
    """The communicators of the stages of allreduces, and the threads that run these in order."""

    def __init__(self, stages: Sequence[Stage], rings: tuple[int, ...]) -> None:
        self.rings = rings
        # Not stopped at exit: a rank that fails must not wait for ranks that do not answer.
        self._threads = ThreadStages(stages)

    def begin(self, tensor: Any) -> Work:
        """Let the threads sum TENSOR over the ranks."""
        return self._threads.submit(tensor)


class BucketMember(NamedTuple):
    """A gradient in a bucket: its variable and how many numbers it has."""

    variable: Any
    size: int


class StartOperator(NamedTuple):
    """An operator that gives its first GRADIENTS inputs to a channel."""

    channel: Channel
    gradients: int


def open_channels(rank: int, ranks: int, *, size: int, number: int) -> list[Channel]:
    """Connect RANKS by NUMBER communicators; in groups of SIZE and among their leaders if above 1.

    All ranks call it alike: each connects what it is a member of, in the same order.
    """
    levels = communicators.split_ranks(range(ranks), size if size > 1 else ranks)
    for channel in range(number):
        if (ranks, size, channel) in _channels:
            continue
        _channels[ranks, size, channel] = _open_channel(rank, levels)
    return [_channels[ranks, size, channel] for channel in range(number)]


def _open_channel(rank: int, levels: communicators.Hierarchy) -> Channel:
    top = next(_numbers)
    # Ranks count the numbers of all groups, their own or not.
    numbered = [(next(_numbers), next(_numbers), group) for group in levels.groups]
    first, last, group = next(each for each in numbered if rank in each[2])
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
        made = core.ProcessGroupGloo.create(own, ranks.index(rank), len(ranks), number)
    flight_recorder.add_group(made, ranks)
    return made


def channel_of(op: Any) -> Channel | None:
    """Return the channel that the operator OP gives gradients to, None if it does not."""
    if op.type != OPERATOR:
        return None
    start = _starts.get(int(op.attr("forward_callable_id")))
    return None if start is None else start.channel


def gradients_of(op: Any) -> list[str]:
    """Return the names of what the operator OP gives to a channel."""
    return list(op.input_arg_names[: _starts[int(op.attr("forward_callable_id"))].gradients])


def work_beside(block: Any) -> list[int]:
    """Return, for each bucket of BLOCK, how many operators run while a channel sums it."""
    begun: dict[str, int] = {}
    found = []
    for place, op in enumerate(block.ops):
        if channel_of(op) is not None:
            begun[op.output_arg_names[0]] = place
        elif op.type == OPERATOR:
            starts = [begun[name] for name in op.input_arg_names if name in begun]
            found += [
                sum(other.type != OPERATOR for other in block.ops[start:place]) for start in starts
            ]
    return found


def make_token(block: Any) -> Any:
    """Make a variable in BLOCK that says that a bucket has gone out."""
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
    members: Sequence[BucketMember],
    channel: Channel,
    *,
    tokens: tuple[Any, Any],
    op_role: int,
) -> None:
    """Sum MEMBERS of BLOCK over CHANNEL, from the first of PLACES on; read the sums at the second.

    The first of TOKENS says that the bucket before has gone out: ranks that began in different
    orders would wait for each other. The second is for this bucket.
    """
    before, token = tokens
    gradients = [member.variable for member in members]
    begin, end = _functions(channel, members)
    for place, function, read, written in (
        (places[1], end, [*gradients, token], gradients),
        (places[0], begin, gradients if before is None else [*gradients, before], [token]),
    ):
        programs.insert(
            block,
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


def _functions(channel: Channel, members: Sequence[BucketMember]) -> tuple[int, int]:
    """Return Paddle's numbers of two functions: one begins to sum MEMBERS, one has the sums."""
    import numpy as np

    paddle: Any = sys.modules["paddle"]
    common: Any = sys.modules["paddle.static.nn.common"]
    kind = paddle.base.data_feeder.convert_dtype(members[0].variable.dtype)
    carried = np.zeros(sum(member.size for member in members), dtype=kind)
    ends = np.cumsum([member.size for member in members])[:-1]
    tensor = _sharing(carried)
    under_way: list[Work] = []

    # Paddle looks at the names of their parameters, so they cannot be methods.
    def begin(*tensors: Any) -> Any:
        for part, given in zip(np.split(carried, ends), tensors):
            part[:] = np.asarray(given).reshape(-1)
        under_way.append(channel.begin(tensor))
        return np.zeros(1, "float32")

    def end(*tensors: Any) -> Any:
        under_way.pop().wait()
        return [
            part.reshape(given.shape()) for part, given in zip(np.split(carried, ends), tensors)
        ]

    numbers = common.PyFuncRegistry(begin).id, common.PyFuncRegistry(end).id
    _starts[numbers[0]] = StartOperator(channel, len(members))
    return numbers


def _sharing(array: Any) -> Any:
    """Return a tensor that lives in the memory of ARRAY."""
    from paddle.base import core

    paddle: Any = sys.modules["paddle"]
    place = paddle.CPUPlace()
    # Tensors need the tracer of dynamic graphs to come into being, but not later.
    with paddle.base.dygraph.guard(place):
        return core.eager.Tensor(array, place, False, True, "fleetrun_carried", True)
