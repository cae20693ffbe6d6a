"""Averages the gradients of a model over the ranks, in buckets, while backward still runs."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from .. import buckets
from ..paddle_api import tensors
from . import backward, changes, sparse
from .arrivals import Arrivals
from .flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..allreduce_stages import Work
    from ..communicators import Communicator
    from .compression import Compression
    from .gradient_check import GradientCheck


# Buckets are rebuilt if that sends them earlier by this fraction of a backward, on average. The
# gradients of one operator arrive in any order, which is no reason to rebuild.
_MIN_GAIN = 0.1
# The backwards with new buckets that show which gradient of each arrives last.
_LEARNT = 2


def pack(
    parameters: Sequence[Any],
    limits: Callable[[int], buckets.BucketLimits],
    root_of: Callable[[Any], int | None] = lambda _: None,
) -> tuple[list[int], list[list[int]]]:
    """Return the sizes of PARAMETERS in bytes, and the indexes of those in each bucket.

    LIMITS takes the total in bytes. ROOT_OF returns the index of the only rank that needs the sum
    for a parameter, or None if all do.
    """
    sizes = list(map(tensors.nbytes, parameters))
    kinds = [f"{parameter.dtype} {root_of(parameter)}" for parameter in parameters]
    return sizes, buckets.pack(sizes, kinds, limits(sum(sizes)))


class Bucket:
    """Gradients that are reduced together, of NBYTES in total."""

    def __init__(self, parameters: list[Any], nbytes: int, *, reuse: bool) -> None:
        self.parameters = parameters
        self.nbytes = nbytes
        self.buffer = FlatBuffer(parameters, reuse=reuse)
        # Gradients that this backward has not computed yet.
        self.missing = len(parameters)
        self.is_sent = False
        # The number of gradients of the model that were ready when it was sent.
        self.gradients_before = 0
        # The pending work, and the memory that must stay until it is done.
        self.work: Work | None = None
        self.flat: Any = None
        # Parameters without a gradient on this rank, each with its view of `flat`.
        self.absent: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        """Get ready for the next backward."""
        self.buffer.prepare()
        self.missing = len(self.parameters)
        self.is_sent = False
        self.work = self.flat = None
        self.absent = []


def weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls METHOD as long as its object lives, without holding it."""
    reference = weakref.WeakMethod(method)

    def hook(*_: Any) -> None:
        method = reference()
        if method is not None:
            method()

    return hook


def missing_gradient(parameter: Any = None) -> RuntimeError:
    """Return the error for a backward that has left out PARAMETER for the first time."""
    name = "a parameter" if parameter is None else f"the parameter {parameter.name}"
    return RuntimeError(
        f"fleetrun: {name} had a gradient on every rank at first and has none now: build"
        " DataParallel with find_unused_parameters=True."
    )


def _at_own_place(method: Callable[..., None]) -> Callable[..., None]:
    """Let METHOD of a reducer create tensors on the device of its parameters."""

    @functools.wraps(method)
    def placed(reducer: Reducer, *args: Any) -> None:
        with tensors.made_at(reducer.place):
            method(reducer, *args)

    return placed


class Reducer:
    """Replaces Paddle's own reducer in one `paddle.DataParallel`.

    Every rank sends the same buckets in the same order, whatever gradients its backward computes. A
    bucket waits for those before it. Incomplete buckets are sent at the end, with zeros for absent
    gradients. One more small allreduce shows whether other ranks have them; it is omitted once all
    ranks have had all gradients.

    The buckets follow the reversed order of the parameters at first, and then the order in which
    rank 0 got its gradients in the first backward, if that sends them much earlier. So an unused
    parameter does not hold up those behind it.
    """

    # Why the averages of earlier backwards may differ between ranks: a sentence, and a blank.
    doubt = ""

    def __init__(
        self,
        parameters: Sequence[Any],
        *,
        sparse_parameters: Sequence[Any],
        group: Any,
        communicators: list[Communicator],
        more_communicators: Callable[[int], None],
        compression: Compression | None,
        ranks: Sequence[int],
        limits: Callable[[int], buckets.BucketLimits],
        finds_unused: bool,
        must_sync: Callable[[Sequence[Any]], bool],
        on_reduced: Callable[[Reducer], None],
        check: GradientCheck,
    ) -> None:
        self._check = check
        self._sparse = list(sparse_parameters)
        self._group = group
        self.ranks = ranks
        self._nranks = len(ranks)
        self._scale = 1.0 / len(ranks)
        # MORE_COMMUNICATORS takes a number of buckets and adds to them, a collective call.
        self._communicators = communicators
        self._more_communicators = more_communicators
        # There may be too few communicators for the buckets.
        self._is_short = False
        self._compression = compression
        self._limits = limits
        self._finds_unused = finds_unused
        self._must_sync = must_sync
        self._on_reduced = on_reduced
        # The next backward is reduced; and a forward still waits for its backward.
        self._is_armed = False
        self._is_awaited = False
        # The running backward is reduced.
        self._is_active = False
        # All ranks have all gradients in each backward.
        self._knows_usage = False
        # The buckets are in the order of an observed backward.
        self._is_ordered = False
        # Buckets are sent only at the end: recomputed layers add to their gradients several times.
        self._sends_late = False
        # Another model has some of these parameters, too.
        self._shares_parameters = False
        self._arrivals = Arrivals(weakly(self._take_arrived))
        # The backwards of `_LEARNT` that are still to come.
        self._unlearnt = _LEARNT
        # How many backwards had run inside others when this one began.
        self._nested = 0
        self._all = list(parameters)
        self._changes, self._dtypes = changes.count, _dtypes(self._all)
        self.parameters: list[Any] = []
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._frozen: list[Any] = []
        # The ids of the parameters whose gradients are ready, in the order of arrival.
        self._ready: dict[int, None] = {}
        self._has_sparse_gradient = False
        # The next bucket to send.
        self._next = 0
        # Buckets that were sent before the last gradient of the last backward was ready.
        self.early = 0
        # Gradients that were moved to another place when the buckets were rebuilt.
        self.moved = 0
        self.backwards = 0
        # In the last backward: allreduces that show which gradients other ranks have, and
        # collectives for sparse gradients.
        self.agreements = self.sparse_collectives = 0
        self._arrange()
        self.place = self.trained_parameters[0].place
        for parameter in self._sparse:
            tensors.on_gradient(parameter, weakly(self._note_sparse_gradient))
        backward.listen(self)

    @property
    def bytes_as_built(self) -> list[int] | None:
        """The bytes of each bucket if Paddle's reducer averages, else None."""
        return None

    @property
    def trained_parameters(self) -> list[Any]:
        """The parameters whose gradients are averaged, dense or sparse."""
        return [*self.parameters, *self._sparse]

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Reduce the backward of OUTPUTS; DataParallel calls it after each forward that syncs."""
        del outputs
        if self._changes != changes.count:
            self._look_at_changes()
        self._is_armed = self._is_awaited = True

    def disarm(self) -> None:
        """Reduce no backward before the next forward that syncs, unless one is still awaited.

        As in Paddle, a forward under `no_sync` does not disarm an earlier one that still waits for
        its backward: reducing once too often does no harm.
        """
        self._is_armed = self._is_awaited

    def _look_at_changes(self) -> None:
        """Rearrange if dtypes have changed, or parameters were unfrozen."""
        before, self._changes, self._dtypes = self._dtypes, changes.count, _dtypes(self._all)
        if before != self._dtypes or any(map(tensors.is_trained, self._frozen)):
            # All ranks run the same script, so they cast and unfreeze together.
            self._on_change()

    def _on_change(self) -> None:
        """Build the buckets for the currently trained parameters and their dtypes."""
        self._arrange()

    def overlaps(self, parameters: Sequence[Any]) -> bool:
        """Whether any of PARAMETERS belongs to this model, trained or frozen."""
        return not set(map(id, (*self._all, *self._sparse))).isdisjoint(map(id, parameters))

    def share_parameters(self) -> None:
        """Prepare for another model that has some of the same parameters.

        A backward through both models is reduced by one reducer after the other, which changes
        nothing: averaging an average gives the same. But neither may move a gradient that the
        other has sent, nor rely on a gradient that only the other model's backward computes.
        """
        self._shares_parameters = self._sends_late = True
        self._knows_usage = False
        self._build_buckets()

    def _arrange(self) -> None:
        """Take the currently trained parameters, the last layers first."""
        self.parameters = list(filter(tensors.is_trained, reversed(self._all)))
        self._frozen = [param for param in self._all if not tensors.is_trained(param)]
        for parameter in self.parameters:
            self._watch(parameter)
        self._knows_usage = self._is_ordered = False
        self._build_buckets()

    def _watch(self, parameter: Any) -> None:
        """Record each gradient of PARAMETER."""
        if self._arrivals.watch(parameter):
            tensors.keep_additions_right([parameter])

    def _expect_last(self, parameter: Any) -> None:
        """Check for complete buckets after each gradient of PARAMETER, likely a last one."""
        self._arrivals.end_at(parameter)

    @property
    def _reuses_memory(self) -> bool:
        """Whether gradients may stay in the memory of their buckets."""
        return not self._shares_parameters

    def _build_buckets(self) -> None:
        sizes, packed = self._packed(self.parameters)
        self.buckets = [
            Bucket(
                [self.parameters[index] for index in indexes],
                sum(sizes[index] for index in indexes),
                reuse=self._reuses_memory,
            )
            for indexes in packed
        ]
        self._bucket_of = {
            id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        self._unlearnt = _LEARNT
        self._is_short = True
        for bucket in self.buckets:
            self._expect_last(bucket.parameters[-1])

    def _add_missing_communicators(self) -> None:
        if self._is_short:
            self._is_short = False
            self._add_communicators()

    def _add_communicators(self) -> None:
        """Take more communicators if the buckets need them; a collective call."""
        self._more_communicators(len(self.buckets))

    def _packed(self, parameters: Sequence[Any]) -> tuple[list[int], list[list[int]]]:
        return pack(parameters, self._limits, self._root_of)

    def _root_of(self, parameter: Any) -> int | None:
        """Return the index of the only rank that needs the sum for PARAMETER, or None for all."""
        del parameter
        return None

    def _note_sparse_gradient(self) -> None:
        self._has_sparse_gradient = True

    def begin(self) -> None:
        """Get ready for a backward."""
        self._is_active = self._is_armed and self._must_sync(self.trained_parameters)
        if not self._is_active:
            self._is_awaited = False
            self._arrivals.clear()
            return
        self._has_sparse_gradient = False
        # Not in another model's backward: a rank that has finished may be gone by then.
        if self._is_awaited:
            self._add_missing_communicators()
        self.restart()

    def _take_arrived(self) -> None:
        """Count the gradients that have arrived, and send complete buckets."""
        if not self._is_active:
            return
        if backward.nested != self._nested:
            self._sends_late = True
        for key in self._arrivals.take():
            bucket = self._bucket_of[key]
            if bucket.is_sent:
                raise RuntimeError(
                    "fleetrun: a parameter got a second gradient in one backward after its bucket"
                    " was sent (a recomputed layer shares it): use the strategy without"
                    " communication fusion for this model."
                )
            if key not in self._ready:
                self._ready[key] = None
                bucket.missing -= 1
        if self._sends_late or self._is_short:
            return
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send(self._next)
            self._next += 1

    def _learn_last(self) -> None:
        """Expect the gradient that arrived last in each bucket to be the last one next time."""
        places = {key: place for place, key in enumerate(self._ready)}
        for bucket in self.buckets:
            arrived = [param for param in bucket.parameters if id(param) in places]
            if arrived:
                self._expect_last(max(arrived, key=lambda param: places[id(param)]))

    @_at_own_place
    def _send(self, number: int) -> None:
        """Begin the allreduce of the bucket NUMBER."""
        import paddle

        bucket = self.buckets[number]
        bucket.is_sent = True
        bucket.gradients_before = len(self._ready)
        bucket.flat, bucket.absent = bucket.buffer.gather()
        with paddle.no_grad():
            # Paddle divides before it sums, too.
            bucket.flat.scale_(self._scale)
        communicator = self._communicators[number % len(self._communicators)]
        is_only = len(self.buckets) == 1
        compression = self._compression
        if compression is not None and not compression.compresses(bucket.flat):
            compression = None
        if self._check.is_on:
            sent_as = compression.dtype if compression else str(bucket.flat.dtype)
            self._check.sent(bucket.flat, sent_as)
        if compression is None:
            root = self._root_of(bucket.parameters[0])
            bucket.work = communicator.all_reduce(bucket.flat, is_only=is_only, root=root)
            return
        bucket.work = compression.all_reduce(
            communicator, bucket.flat, is_only=is_only, measures=not self.backwards
        )

    def finish(self) -> None:
        """Send the remaining buckets, and wait for all allreduces."""
        if not self._is_active:
            return
        sent = self._next
        self._take_arrived()
        if not (self._ready or self._has_sparse_gradient):
            return
        if self._unlearnt or self._next > sent:
            self._unlearnt = max(0, self._unlearnt - 1)
            self._learn_last()
        self._is_active = self._is_awaited = False
        self.flush()

    @_at_own_place
    def flush(self) -> None:
        """Average all gradients that are not being averaged already, and wait for all."""
        self._add_missing_communicators()
        ready = len(self._ready)
        sent = self.buckets[: self._next]
        self.early = sum(1 for bucket in sent if bucket.gradients_before < ready)
        for number in range(self._next, len(self.buckets)):
            self._send(number)
        self._next = len(self.buckets)
        usage = order = None
        self.agreements = self.sparse_collectives = 0
        if not (self._knows_usage and self._is_ordered):
            usage, order = self._exchange_usage()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            self._check.received(bucket.flat)
            for parameter, gradient in bucket.absent:
                self._set_absent(parameter, gradient, usage)
            bucket.work = bucket.flat = None
            bucket.absent = []
        for parameter in self._sparse:
            if not parameter.stop_gradient:
                self.sparse_collectives += sparse.average(parameter, self._group, self._nranks)
        self._check.finish()
        self.backwards += 1
        self._conclude()
        self._on_reduced(self)
        if order:
            self._reorder(order)

    def _conclude(self) -> None:
        """Do nothing; subclasses act here once all gradients have been averaged."""

    def restart(self) -> None:
        """Reset the state to that before a backward."""
        self._next = 0
        self._ready = {}
        self._arrivals.clear()
        self._nested = backward.nested
        self._check.begin(self.backwards)
        for bucket in self.buckets:
            bucket.reset()

    def _exchange_usage(self) -> tuple[dict[int, int], dict[int, int] | None]:
        """Return, by the id of each parameter, how many ranks have its gradient.

        And, unless the order is known, its place in rank 0's backward; parameters that no rank
        uses come last.
        """
        if not self.parameters:
            return {}, None
        absent = {id(parameter) for bucket in self.buckets for parameter, _ in bucket.absent}
        keys = list(map(id, self.parameters))
        values = [0 if key in absent else 1 for key in keys]
        if not self._is_ordered:
            # All ranks but rank 0 add zeros.
            ready = self._ready if self._group.rank() == 0 else ()
            own_places = {key: place for place, key in enumerate(ready, 1)}
            values += [own_places.get(key, 0) for key in keys]
        sums = self._communicators[0].sum_integers(values)
        self.agreements += 1
        counts, places = sums[: len(keys)], sums[len(keys) :]
        may_know = not self._finds_unused and not self._shares_parameters
        self._knows_usage = may_know and min(counts) == self._nranks
        usage = dict(zip(keys, counts))
        if not any(places):
            return usage, None
        end = len(keys)
        order = {key: place or end + (not usage[key]) for key, place in zip(keys, places)}
        return usage, order

    def _reorder(self, places: dict[int, int]) -> None:
        """Rebuild the buckets in the order of PLACES if that sends them much earlier; once."""
        self._is_ordered = True
        order = sorted(self.parameters, key=lambda parameter: places[id(parameter)])
        times = []
        for parameters in (self.parameters, order):
            sizes, packed = self._packed(parameters)
            arrivals = [min(places[id(param)], len(parameters)) for param in parameters]
            times.append(buckets.mean_send_time(packed, sizes, arrivals))
        if times[0] - times[1] > _MIN_GAIN:
            self.moved = sum(1 for was, now in zip(self.parameters, order) if was is not now)
            self.parameters = order
            self._build_buckets()

    def _set_absent(self, parameter: Any, gradient: Any, usage: dict[int, int] | None) -> None:
        """Give PARAMETER the averaged GRADIENT if any rank has computed one."""
        if parameter.stop_gradient:
            return
        if usage is None:
            raise missing_gradient(parameter)
        if usage[id(parameter)]:
            tensors.set_gradient(parameter, gradient)

    def abandon(self) -> None:
        """Drop the pending works: they end by themselves, in step with the other ranks."""
        if self._is_active:
            self._is_active = False
            for communicator in self._communicators:
                communicator.is_spoiled = True
            for bucket in self.buckets:
                bucket.work = bucket.flat = None


def _dtypes(parameters: Sequence[Any]) -> list[Any]:
    return [parameter.dtype for parameter in parameters]
