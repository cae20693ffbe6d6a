"""Averages the gradients of a model over the ranks where Paddle's own reducer cannot.

That is: over several communicators, in two levels, in 16 bits, or beside the backward over gloo.
Every rank sends the same buckets in the same order, each once all its gradients are there. That is
right only if every rank computes every gradient once in a backward. So the first backward sends
nothing until its end, and asks all ranks. If they did not, all later ones send at their end, too,
after a small sum that says which gradients the ranks have; the table says so.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from ..paddle_api import tensors
from . import backward
from .paddles_reducer import OUT_OF_STEP, SPARSE_LOOKUP, Passage, averaged, choose_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..allreduce_stages import Work
    from ..buckets import BucketLimits
    from ..communicators import Communicator, Hierarchy
    from .compression import Compression

_NOT_PLAIN = "some rank did not compute every gradient once, row-major, in its first backward"
_MAY_BE_UNUSED = "find_unused_parameters is on"
_MERGED = "gradients are merged"


class ReducerSetup(NamedTuple):
    """How the reducer of a model sends gradients; LIMITS take the bytes of all of them."""

    limits: Callable[[int], BucketLimits]
    communicators: Sequence[Communicator]
    hierarchy: Hierarchy | None
    overlaps: bool
    compression: Compression | None


class Bucket:
    """The gradients of PARAMETERS, which are reduced together."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.sizes = [int(parameter.size) for parameter in parameters]
        self.nbytes = sum(map(tensors.nbytes, parameters))
        self.reset()

    def reset(self) -> None:
        """Get ready for the next backward."""
        # Gradients that this backward has not computed yet.
        self.missing = len(self.parameters)
        # What is summed, and the pending work.
        self.flat: Any = None
        self.work: Work | None = None
        # Whether it is sent in 16 bits.
        self.is_cast = False
        # The number of gradients of the model that were ready when it was sent.
        self.gradients_before = 0


# Reducers with a forward whose backward is still to come. Those of one backward send at its end, in
# the same order on all ranks, as they share communicators.
_awaiting: weakref.WeakSet[Reducer] = weakref.WeakSet()


class Reducer:
    """Averages the gradients of one `paddle.DataParallel`; `model._reducer`, as Paddle's is.

    ON_REDUCED is called after each average. MUST_SYNC says whether the backward of a forward is to
    be averaged.
    """

    def __init__(
        self,
        model: Any,
        setup: ReducerSetup,
        *,
        on_reduced: Callable[[Reducer], None],
        must_sync: Callable[[Sequence[Any]], bool] | None,
    ) -> None:
        self.setup = setup
        self._on_reduced, self._must_sync = on_reduced, must_sync
        self._nranks = len(model.group.ranks)
        self.parameters = averaged(model)
        self._place = self.parameters[0].place
        # Why buckets are never sent early, if so.
        self._why_always_late = _MAY_BE_UNUSED if model.find_unused_parameters else ""
        if must_sync is not None:
            self._why_always_late = _MERGED
        self._hooked: set[int] = set()
        # Backwards of the last forward are reduced; it awaits the first; the running one may be.
        self._is_armed = self._is_awaited = self._is_active = False
        self._passage = Passage()
        # A backward has raised after buckets were sent.
        self._is_out_of_step = False
        # The ids of the parameters whose gradients have arrived, and whether any came twice.
        self._arrived: dict[int, None] = {}
        self._is_repeated = False
        self._sends_early = False
        self._nested = 0
        # The next bucket to send.
        self._next = 0
        self.backwards = 0
        # In the last backward: buckets that were sent before the last gradient was ready, and the
        # allreduces of each communicator.
        self.early = 0
        self.calls: list[int] = []
        self._arrange()
        backward.listen(self)

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Reduce the backward of OUTPUTS; DataParallel calls it after each forward that syncs.

        Raises RuntimeError if this rank has left a backward that the others have ended.
        """
        if self._is_out_of_step:
            raise RuntimeError(OUT_OF_STEP)
        # The script may drop the model before the backward.
        self._passage.watch(outputs, self)
        if self._states != tensors.states(self.parameters):
            # All ranks run the same script, so they cast and unfreeze together.
            self._arrange()
        self._is_armed = self._is_awaited = bool(self.buckets) and (
            self._must_sync is None or self._must_sync(self.parameters)
        )
        if self._is_awaited:
            _awaiting.add(self)

    @property
    def bucket_bytes(self) -> list[int]:
        """The bytes of each bucket, in the order of sending."""
        return [bucket.nbytes for bucket in self.buckets]

    @property
    def will_send_early(self) -> bool:
        """Whether the next backward sends buckets before its end."""
        return self.why_late == "" and self.setup.overlaps and len(self.buckets) > 1

    def disarm(self, outputs: Sequence[Any]) -> None:
        """Reduce no backward before the next forward that syncs, unless one is still awaited.

        OUTPUTS are those of a forward under `no_sync`. As in Paddle, it does not disarm an earlier
        one that still waits for its backward: reducing once too often does no harm.
        """
        self._passage.watch(outputs)
        self._is_armed = self._is_awaited

    def _arrange(self) -> None:
        """Make the buckets of the currently trained parameters; ask about the next backward."""
        self._states = tensors.states(self.parameters)
        trained = list(filter(tensors.is_trained, self.parameters))
        groups = choose_groups(trained, set(), self.setup.limits) if trained else []
        self.buckets = [Bucket([trained[index] for index in group]) for group in groups]
        self._bucket_of = {
            id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        # Why buckets are sent at the end; None: the next backward shows whether they must be.
        self.why_late = self._why_always_late or None
        fresh = [param for param in trained if id(param) not in self._hooked]
        self._hooked.update(map(id, fresh))
        for parameter in fresh:
            # Paddle cannot remove it.
            references = weakref.ref(self), weakref.ref(parameter)
            tensors.on_gradient(parameter, functools.partial(_notify, *references))
        tensors.make_contiguous(fresh)

    # `backward` calls the next three around each outermost backward.

    def begin(self) -> None:
        """Get ready for a backward."""
        self._is_active = self._is_armed
        if not self._is_active:
            return
        self._sends_early = self.why_late == "" and self._is_awaited and not {*_awaiting} - {self}
        self._passage.is_seen = False
        self._nested, self._next, self._is_repeated = backward.nested, 0, False
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.reset()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and write the averages.

        Raises RuntimeError if the backward has left out a gradient that it had at first.
        """
        import paddle

        is_first = self._is_awaited
        is_ours = is_first or self._passage.is_seen or self._passage.is_unknown
        if not (self._is_active and self._arrived and is_ours):
            return
        self._is_active = self._is_awaited = False
        _awaiting.discard(self)
        with tensors.made_at(self._place), paddle.no_grad():
            counts = None if is_first and self.why_late == "" else self._look()
            self._average(counts)
        if is_first or not self.backwards:
            self.backwards += 1
            self._on_reduced(self)
        missing = [param for key, param in self._by_id().items() if key not in self._arrived]
        if counts is None and missing:
            raise RuntimeError(
                f"fleetrun: the parameter {missing[0].name} had a gradient on every rank at first"
                " and has none now: build DataParallel with find_unused_parameters=True."
            )

    def abandon(self) -> None:
        """Leave a backward that has raised; what was sent ends by itself."""
        self._is_out_of_step |= self._is_active and self._next > 0
        self._is_active = False

    def _arrive(self, parameter: Any) -> None:
        """Count the gradient of PARAMETER, which was accumulated; send complete buckets."""
        bucket = self._bucket_of.get(id(parameter))
        if not self._is_active or bucket is None:
            return
        if id(parameter) in self._arrived:
            self._is_repeated = True
            if bucket.flat is not None:
                raise RuntimeError(
                    f"fleetrun: the parameter {parameter.name} got a second gradient in one"
                    " backward after its bucket was sent (a recomputed layer shares it): use the"
                    " strategy without communication fusion for this model."
                )
            return
        self._arrived[id(parameter)] = None
        bucket.missing -= 1
        if self._sends_early and backward.nested == self._nested:
            while self._next < len(self.buckets) and not self.buckets[self._next].missing:
                self._send(self.buckets[self._next])

    def _by_id(self) -> dict[int, Any]:
        return {id(param): param for bucket in self.buckets for param in bucket.parameters}

    def _look(self) -> dict[int, int]:
        """Return, by the id of each parameter, how many ranks have its gradient.

        A collective call. The first one decides whether later backwards may send early.
        """
        trained = self._by_id()
        gradients = tensors.gradients([*trained.values()])
        for parameter, gradient in zip(trained.values(), gradients):
            if gradient is not None and gradient.is_selected_rows():
                raise RuntimeError(f"fleetrun: {SPARSE_LOOKUP.format(parameter.name)}")
        is_plain = (
            len(self._arrived) == len(trained)
            and not self._is_repeated
            and backward.nested == self._nested
            and all(gradient is not None and gradient.is_contiguous() for gradient in gradients)
        )
        has = [gradient is not None for gradient in gradients]
        communicator = self.setup.communicators[0]
        *counts, plain = communicator.sum_integers([*has, is_plain], self._place)
        if self.why_late is None:
            self.why_late = "" if plain == self._nranks else _NOT_PLAIN
        return dict(zip(trained, counts))

    def _average(self, counts: dict[int, int] | None) -> None:
        """Average all gradients; COUNTS: as `_look` returns."""
        communicators = self.setup.communicators
        before = [communicator.calls for communicator in communicators]
        sent = self.buckets[: self._next]
        self.early = sum(1 for bucket in sent if bucket.gradients_before < len(self._arrived))
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            self._write(bucket, counts)
        self.calls = [
            communicator.calls - calls for communicator, calls in zip(communicators, before)
        ]
        for number in range(len(sent)):
            self.calls[number % len(self.calls)] += 1

    def _send(self, bucket: Bucket) -> None:
        """Begin the allreduce of BUCKET, the next one."""
        import paddle

        number, self._next = self._next, self._next + 1
        bucket.gradients_before = len(self._arrived)
        with tensors.made_at(self._place), paddle.no_grad():
            flats = [
                paddle.zeros([size], parameter.dtype) if gradient is None else gradient.flatten()
                for parameter, gradient, size in zip(
                    bucket.parameters, tensors.gradients(bucket.parameters), bucket.sizes
                )
            ]
            if any(flat.dtype != flats[0].dtype for flat in flats):
                # Mixed precision with `master_grad=True` leaves merged gradients in fp32.
                flats = [flat.cast("float32") for flat in flats]
            flat = paddle.concat(flats)
            # Paddle divides before it sums, too.
            flat.scale_(1.0 / self._nranks)
            compression = self.setup.compression
            bucket.flat = flat
            bucket.is_cast = compression is not None and flat.dtype == paddle.float32
            if compression is not None and bucket.is_cast:
                bucket.flat = flat.cast(compression.dtype)
        communicators = self.setup.communicators
        # A thread would not help the only allreduce.
        overlaps = self.setup.overlaps and len(self.buckets) > 1
        bucket.work = communicators[number % len(communicators)].all_reduce(
            bucket.flat, overlaps=overlaps
        )

    def _write(self, bucket: Bucket, counts: dict[int, int] | None) -> None:
        """Make the gradients of BUCKET the averages; COUNTS: as `_look` returns."""
        import paddle

        flat, bucket.flat, bucket.work = bucket.flat, None, None
        if bucket.is_cast:
            flat = flat.cast("float32")
        parts = paddle.split(flat, bucket.sizes) if len(bucket.sizes) > 1 else [flat]
        gradients = tensors.gradients(bucket.parameters)
        for parameter, gradient, part in zip(bucket.parameters, gradients, parts):
            if gradient is not None:
                # Perhaps a hook at the end of the backward has cast it.
                average = part if part.dtype == gradient.dtype else part.cast(gradient.dtype)
                if gradient.is_contiguous():
                    tensors.share_memory(average, gradient)
                else:
                    gradient.copy_(average.reshape(gradient.shape), False)
                # `clear_grad` marks it as empty until this rank computes it.
                tensors.keep_memory(parameter)
            elif counts is not None and counts[id(parameter)] and not parameter.stop_gradient:
                average = part.reshape(parameter.shape).cast(parameter.dtype)
                tensors.set_gradient(parameter, average)


def _notify(reducer: weakref.ref[Reducer], parameter: weakref.ref[Any]) -> None:
    """Tell REDUCER, if it lives, that a gradient of PARAMETER was accumulated; hold neither."""
    alive = reducer()
    if alive is not None:
        alive._arrive(parameter())
