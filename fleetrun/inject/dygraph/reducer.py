"""Averages the gradients of a model over the ranks, in buckets, while backward still runs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import buckets
from . import backward, coalesced, sparse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .communicators import Errand, Lane, Pending


# By what part of a backward buckets must go out sooner on average, to be made anew: what one
# operator makes together comes in any order, and there is nothing to be gained.
_WORTH_MOVING = 0.1


class Limits(NamedTuple):
    """What bounds a bucket; None: nothing does."""

    most_bytes: float | None = None
    most_gradients: int | None = None
    # Of the bucket that goes out last.
    last_bytes: float | None = None


class Bucket:
    """Gradients that go out together."""

    def __init__(self, parameters: list[Any], nbytes: int, *, stays: bool) -> None:
        self.parameters = parameters
        self.nbytes = nbytes
        self.block = coalesced.Block(parameters, stays=stays)
        # How many of them this backward has not made yet.
        self.missing = len(parameters)
        self.is_out = False
        # How many gradients there were when it went out.
        self.gradients_before = 0
        # What must be waited for, and what keeps the memory until then.
        self.pending: Pending | Errand | None = None
        self.flat: Any = None
        # Parameters without a gradient here, and where that of other ranks will be.
        self.absent: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        """Forget the last backward, and get ready for the next one."""
        self.block.prepare()
        self.missing = len(self.parameters)
        self.is_out = False
        self.pending = self.flat = None
        self.absent = []


class Reducer:
    """Takes the place of Paddle's own reducer in one `paddle.DataParallel`.

    Every rank issues the same buckets in the same order, whatever its backward made: a bucket
    waits for those before it, and what is left goes out at the end, with zeros for the gradients
    that are not there. Whether another rank had one is agreed on in one more, small allreduce,
    which ends after the first backward if all ranks had all gradients.

    The first backward is expected to make the gradients of the last layers first. It tells in
    which order they really come. Where buckets go out much sooner in that order, as rank 0 saw it,
    they follow it from then on: an unused parameter must not hold up those behind it.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        *,
        sparse_parameters: Sequence[Any],
        group: Any,
        lanes: Sequence[Lane],
        ranks: Sequence[int],
        limits: Callable[[int], Limits],
        finds_unused: bool,
        must_sync: Callable[[Sequence[Any]], bool],
        reduced: Callable[[Reducer], None],
    ) -> None:
        self._sparse = list(sparse_parameters)
        self._group = group
        self.ranks = ranks
        self._nranks = len(ranks)
        self._lanes = lanes
        self._limits = limits
        self._finds_unused = finds_unused
        self._must_sync = must_sync
        self._reduced = reduced
        # Whether the forwards asked for their gradients to be averaged; and whether one of them
        # still waits for its backward.
        self._is_armed = False
        self._is_awaited = False
        self._is_active = False
        self._knows_usage = False
        # Whether the buckets are in the order of a backward that was seen.
        self._is_ordered = False
        # Recomputed layers make their gradients in several portions: nothing goes out early.
        self._goes_late = False
        # Another model has some of these parameters, too.
        self._shares = False
        self._hooked: set[int] = set()
        self._all = list(parameters)
        self.parameters: list[Any] = []
        self.buckets: list[Bucket] = []
        self._homes: dict[int, Bucket] = {}
        self._frozen: list[Any] = []
        # The gradients of this backward in the order in which they came: a set that keeps it.
        self._fired: dict[int, None] = {}
        # Whether backward came to sparse parameters.
        self._is_touched = False
        self._next = 0
        # How many buckets were out before the last gradient of the last backward was there.
        self.early = 0
        # How many gradients came at another place than was expected at first.
        self.moved = 0
        self.rounds = 0
        self._arrange()
        for parameter in self._sparse:
            parameter._register_backward_hook(self._touched())
        backward.listen(self)

    @property
    def everything(self) -> list[Any]:
        """Every parameter that it averages, dense or sparse."""
        return [*self.parameters, *self._sparse]

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Do nothing: DataParallel calls it, and Paddle's own looks for unused parameters then."""

    def hear_of_forward(self, *, syncs: bool) -> None:
        """Average the gradients of later backwards if the forward SYNCS them.

        One under `no_sync` takes nothing back from one that still waits for its backward: Paddle
        has it so, and one average too many does no harm.
        """
        if syncs:
            self._is_armed = self._is_awaited = True
        elif not self._is_awaited:
            self._is_armed = False

    def has_any(self, parameters: Sequence[Any]) -> bool:
        """Whether it averages any of PARAMETERS, or would if they were trained."""
        own = {id(each) for each in (*self._all, *self._sparse)}
        return not own.isdisjoint(map(id, parameters))

    def share(self) -> None:
        """Bear with another model that has some of the same parameters.

        A backward that ends in both models is reduced by one after the other, which changes
        nothing: the average of averages is the average. But neither may move a gradient that the
        other one has sent, nor rely on one that belongs to another model's backward.
        """
        self._shares = self._goes_late = True
        self._knows_usage = False
        self._pack()

    def rest(self) -> None:
        """Leave newer backwards alone until the next forward; one may still wait for its own."""
        self._is_armed = self._is_awaited

    def _arrange(self) -> None:
        """Take the parameters that are trained now; last layers first."""
        self.parameters = [each for each in reversed(self._all) if not each.stop_gradient]
        self._frozen = [each for each in self._all if each.stop_gradient]
        for parameter in self.parameters:
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                # Paddle calls it after the gradient was accumulated.
                parameter._register_backward_hook(self._hook(parameter))
        self._knows_usage = self._is_ordered = False
        self._pack()

    def _pack(self) -> None:
        """Put the gradients into buckets, in the order of the parameters."""
        sizes, packed = self._packed(self.parameters)
        self.buckets = [
            Bucket(
                [self.parameters[index] for index in one],
                sum(sizes[index] for index in one),
                stays=not self._shares,
            )
            for one in packed
        ]
        self._homes = {
            id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters
        }

    def _packed(self, parameters: Sequence[Any]) -> tuple[list[int], list[list[int]]]:
        """Return the sizes of PARAMETERS in bytes, and the indexes of those in each bucket."""
        sizes = [each.size * each.element_size() for each in parameters]
        most_bytes, most_gradients, last_bytes = self._limits(sum(sizes))
        return sizes, buckets.pack(
            sizes,
            [str(each.dtype) for each in parameters],
            limit_bytes=most_bytes,
            limit_count=most_gradients,
            last_bytes=last_bytes,
        )

    def _hook(self, parameter: Any) -> Callable[..., None]:
        key = id(parameter)
        # Paddle keeps a hook as long as its parameter, which a reducer keeps: neither would go.
        reducer = weakref.ref(self)

        def made(*_: Any) -> None:
            owner = reducer()
            if owner is not None and owner._is_active:
                owner._made(key)

        return made

    def _touched(self) -> Callable[..., None]:
        reducer = weakref.ref(self)

        def touch(*_: Any) -> None:
            owner = reducer()
            if owner is not None:
                owner._is_touched = True

        return touch

    def begin(self) -> None:
        """Get ready for a backward."""
        self._is_active = self._is_armed and self._must_sync(self.everything)
        if not self._is_active:
            self._is_awaited = False
            return
        self._is_touched = False
        if any(not each.stop_gradient for each in self._frozen):
            # All ranks run the same script: they unfreeze together.
            self._arrange()
        self._fired = {}
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def _made(self, key: int) -> None:
        """Take note of a gradient, and send its bucket if it is its turn."""
        bucket = self._homes[key]
        if backward.is_nested():
            self._goes_late = True
        if bucket.is_out:
            message = (
                "fleetrun: a parameter got a second gradient in one backward after its bucket had"
                " gone out (a recomputed layer shares it): use the strategy without"
                " communication fusion for this model."
            )
            raise RuntimeError(message)
        if key in self._fired:
            return
        self._fired[key] = None
        bucket.missing -= 1
        if not bucket.missing and not self._goes_late:
            self._send_what_is_ready()

    def _send_what_is_ready(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send(self._next)
            self._next += 1

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.is_out = True
        bucket.gradients_before = len(self._fired)
        bucket.flat, bucket.absent = bucket.block.gather()
        # Paddle divides before it sums, too.
        coalesced.scale(bucket.flat, 1.0 / self._nranks)
        lane = self._lanes[number % len(self._lanes)]
        bucket.pending = lane.issue(bucket.flat, is_alone=len(self.buckets) == 1)

    def finish(self) -> None:
        """Send what is left, and wait for everything."""
        if not self._is_active or not (self._fired or self._is_touched):
            return
        self._is_active = self._is_awaited = False
        self.flush()

    def flush(self) -> None:
        """Average what gradients there are, but for those that are on their way already."""
        made = len(self._fired)
        sent = self.buckets[: self._next]
        self.early = sum(1 for bucket in sent if bucket.gradients_before < made)
        for number in range(self._next, len(self.buckets)):
            self._send(number)
        self._next = len(self.buckets)
        usage = order = None
        if not (self._knows_usage and self._is_ordered):
            usage, order = self._agree()
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            for parameter, gradient in bucket.absent:
                self._complete(parameter, gradient, usage)
            bucket.pending = bucket.flat = None
            bucket.absent = []
        for parameter in self._sparse:
            if not parameter.stop_gradient:
                sparse.average(parameter, self._group, self._nranks)
        self.rounds += 1
        self._reduced(self)
        if order:
            self._follow(order)

    def restart(self) -> None:
        """Be as before a backward, to `flush` what others have left."""
        self._next = 0
        self._fired = {}
        for bucket in self.buckets:
            bucket.reset()

    def _agree(self) -> tuple[dict[int, int], dict[int, int] | None]:
        """Return how many ranks have a gradient of each parameter; of all, by its id.

        And, if it is not known yet, at which place rank 0 got each; those that none got are last.
        """
        if not self.parameters:
            return {}, None
        absent = {id(parameter) for bucket in self.buckets for parameter, _ in bucket.absent}
        have = [0 if id(each) in absent else 1 for each in self.parameters]
        if not self._is_ordered:
            # The sum of what rank 0 says, and of zeros.
            seen = self._fired if self._group.rank() == 0 else ()
            places = {key: place for place, key in enumerate(seen, 1)}
            have += [places.get(id(each), 0) for each in self.parameters]
        keys = [id(each) for each in self.parameters]
        counted = coalesced.sum_of(have, self._lanes[0])
        counts, told = counted[: len(keys)], counted[len(keys) :]
        is_sure = not self._finds_unused and not self._shares
        self._knows_usage = is_sure and min(counts) == self._nranks
        usage = dict(zip(keys, counts))
        if not any(told):
            return usage, None
        end = len(keys)
        order = {key: place or end + (not usage[key]) for key, place in zip(keys, told)}
        return usage, order

    def _follow(self, places: dict[int, int]) -> None:
        """Make the buckets anew, in the order of PLACES, if they go out much sooner so; once."""
        self._is_ordered = True
        order = sorted(self.parameters, key=lambda each: places[id(each)])
        waits = []
        for parameters in (self.parameters, order):
            sizes, packed = self._packed(parameters)
            seen = [min(places[id(each)], len(parameters)) for each in parameters]
            waits.append(buckets.wait(packed, sizes, seen))
        if waits[0] - waits[1] > _WORTH_MOVING:
            moved = zip(self.parameters, order)
            self.moved = sum(1 for was, now in moved if was is not now)
            self.parameters = order
            self._pack()

    def _complete(self, parameter: Any, gradient: Any, usage: dict[int, int] | None) -> None:
        """Give PARAMETER the average of the other ranks, if any of them has a gradient of it."""
        if parameter.stop_gradient:
            return
        if usage is None:
            message = (
                f"fleetrun: the parameter {parameter.name} had a gradient on every rank at first"
                " and has none now: build DataParallel with find_unused_parameters=True."
            )
            raise RuntimeError(message)
        if usage[id(parameter)]:
            parameter._set_grad_ivar(gradient)

    def abandon(self) -> None:
        """Let go of what is out: it ends by itself, in step with the other ranks."""
        if self._is_active:
            self._is_active = False
            for bucket in self.buckets:
                bucket.pending = bucket.flat = None
