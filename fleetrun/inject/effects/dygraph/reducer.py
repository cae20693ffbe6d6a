"""Averages the gradients of a model over the ranks, in buckets, while backward still runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import buckets
from . import backward, coalesced, sparse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .communicators import Errand, Lane, Pending


class Limits(NamedTuple):
    """What bounds a bucket; None: nothing does."""

    most_bytes: float | None = None
    most_gradients: int | None = None
    # Of the bucket that goes out last.
    last_bytes: float | None = None


class Bucket:
    """Gradients that go out together."""

    def __init__(self, parameters: list[Any], nbytes: int) -> None:
        self.parameters = parameters
        self.nbytes = nbytes
        # How many of them this backward has not made yet.
        self.missing = len(parameters)
        self.is_out = False
        # What must be waited for, and what keeps the memory until then.
        self.pending: Pending | Errand | None = None
        self.flat: Any = None
        # Parameters without a gradient here, and where that of other ranks will be.
        self.absent: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        """Forget the last backward."""
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
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        *,
        sparse_parameters: Sequence[Any],
        group: Any,  # noqa: ANN401 - Paddle's ProcessGroup
        lanes: Sequence[Lane],
        nranks: int,
        limits: Callable[[int], Limits],
        finds_unused: bool,
        must_sync: Callable[[Sequence[Any]], bool],
        reduced: Callable[[Reducer], None],
    ) -> None:
        self._sparse = list(sparse_parameters)
        self._group = group
        self._nranks = nranks
        self._lanes = lanes
        self._limits = limits
        self._finds_unused = finds_unused
        self._must_sync = must_sync
        self._reduced = reduced
        # Whether the last forward asked for its gradients to be averaged.
        self.is_armed = False
        self._is_active = False
        self._knows_usage = False
        # Recomputed layers make their gradients in several portions: nothing goes out early.
        self._goes_late = False
        self._hooked: set[int] = set()
        self._all = list(parameters)
        self.parameters: list[Any] = []
        self.buckets: list[Bucket] = []
        self._homes: dict[int, Bucket] = {}
        self._frozen: list[Any] = []
        self._fired: set[int] = set()
        # Whether backward came to this model at all.
        self._is_touched = False
        self._next = 0
        # How many buckets were out before the last gradient of the last backward was there.
        self.early = 0
        self.rounds = 0
        self._arrange()
        for parameter in self._sparse:
            parameter._register_backward_hook(self._touch)  # noqa: SLF001 - see `_arrange`
        backward.listen(self)

    @property
    def everything(self) -> list[Any]:
        """Every parameter that it averages, dense or sparse."""
        return [*self.parameters, *self._sparse]

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Do nothing: DataParallel calls it, and Paddle's own looks for unused parameters then."""

    def _arrange(self) -> None:
        """Pack the gradients of the parameters that are trained now; last layers first."""
        self.parameters = [each for each in reversed(self._all) if not each.stop_gradient]
        self._frozen = [each for each in self._all if each.stop_gradient]
        sizes = [each.size * each.element_size() for each in self.parameters]
        most_bytes, most_gradients, last_bytes = self._limits(sum(sizes))
        self.buckets = [
            Bucket([self.parameters[i] for i in packed], sum(sizes[i] for i in packed))
            for packed in buckets.pack(
                sizes,
                [str(each.dtype) for each in self.parameters],
                limit_bytes=most_bytes,
                limit_count=most_gradients,
                last_bytes=last_bytes,
            )
        ]
        self._homes = {
            id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        for parameter in self.parameters:
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                # Paddle calls it after the gradient was accumulated.
                parameter._register_backward_hook(self._hook(parameter))  # noqa: SLF001
        self._knows_usage = False

    def _hook(self, parameter: Any) -> Callable[..., None]:  # noqa: ANN401 - a parameter
        key = id(parameter)

        def made(*_: Any) -> None:  # noqa: ANN401
            if self._is_active:
                self._made(key)

        return made

    def _touch(self, *_: Any) -> None:  # noqa: ANN401
        self._is_touched = True

    def begin(self) -> None:
        """Get ready for a backward."""
        self._is_active = self.is_armed and self._must_sync(self.everything)
        self._is_touched = False
        if not self._is_active:
            return
        if any(not each.stop_gradient for each in self._frozen):
            # All ranks run the same script: they unfreeze together.
            self._arrange()
        self._fired = set()
        self._next = 0
        self.early = 0
        for bucket in self.buckets:
            bucket.reset()

    def _made(self, key: int) -> None:
        """Take note of a gradient, and send its bucket if it is its turn."""
        bucket = self._homes[key]
        self._is_touched = True
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
        self._fired.add(key)
        bucket.missing -= 1
        if not bucket.missing and not self._goes_late:
            self._send_what_is_ready(len(self._fired) == len(self.parameters))

    def _send_what_is_ready(self, is_last: bool) -> None:  # noqa: FBT001 - private
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send(self._next)
            self._next += 1
        if not is_last:
            self.early = self._next

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.is_out = True
        bucket.flat, bucket.absent = coalesced.gather(bucket.parameters)
        # Paddle divides before it sums, too.
        coalesced.scale(bucket.flat, 1.0 / self._nranks)
        bucket.pending = self._lanes[number % len(self._lanes)].issue(bucket.flat)

    def finish(self) -> None:
        """Send what is left, and wait for everything."""
        if not self._is_active or not self._is_touched:
            return
        self._is_active = False
        self.flush()

    def flush(self) -> None:
        """Average what gradients there are, but for those that are on their way already."""
        for number in range(self._next, len(self.buckets)):
            self._send(number)
        self._next = len(self.buckets)
        usage = None if self._knows_usage else self._agree_on_usage()
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

    def restart(self) -> None:
        """Be as before a backward, to `flush` what others have left."""
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def _agree_on_usage(self) -> dict[int, int]:
        """Return how many ranks have a gradient of each parameter; of all, by its id."""
        if not self.parameters:
            return {}
        absent = {id(parameter) for bucket in self.buckets for parameter, _ in bucket.absent}
        have = [0 if id(each) in absent else 1 for each in self.parameters]
        counted = coalesced.sum_of(have, self._lanes[0])
        self._knows_usage = not self._finds_unused and min(counted) == self._nranks
        return {id(each): count for each, count in zip(self.parameters, counted)}  # noqa: B905

    def _complete(self, parameter: Any, gradient: Any, usage: dict[int, int] | None) -> None:  # noqa: ANN401
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
            parameter._set_grad_ivar(gradient)  # noqa: SLF001 - `grad =` copies

    def abandon(self) -> None:
        """Wait for what is out: the communicators must stay in step."""
        if self._is_active:
            self._is_active = False
            for bucket in self.buckets:
                bucket.pending = bucket.flat = None
