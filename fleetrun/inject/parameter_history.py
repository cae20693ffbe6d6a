"""Records what changes a parameter: gradients, or a forward that keeps running statistics in it.

Running statistics are parameters of a layer, too: BatchNorm's `_mean` and `_variance`, and those of
custom layers. They look trained if a script sets `stop_gradient = False` for a whole layer, and
their names reveal nothing. But they have no gradients, or the forward itself writes them.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Methods that write without a new in-place version.
_WRITING_METHODS = ("set_value", "copy_")
# Marks these methods once they are patched.
_RECORDS = "_fleetrun_records"
# Every how many forwards the addresses are checked, which no writing method changes.
_EVERY = 8
# The writing forwards from which on a parameter is a statistic.
_MIN_WRITES = 2
# Sets that collect the ids of written tensors, by the set's own id.
_recorders: dict[int, set[int]] = {}


def watch_writes() -> None:
    """Patch the writing methods of tensors to record their calls, once."""
    kind = tensors.tensor_class()
    for name in _WRITING_METHODS:
        if hasattr(kind, name) and not hasattr(getattr(kind, name), _RECORDS):
            setattr(kind, name, _recorded(getattr(kind, name)))


def watch_kernels(operations: Any) -> Callable[[], None]:
    """Let the kernels of optimizers in OPERATIONS record their calls; return what ends that."""
    kernels = {
        name: kernel
        for name in tensors.OPTIMIZER_KERNELS
        if (kernel := getattr(operations, name, None)) is not None
    }

    def recorded(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def writing(parameters: Any, *args: Any, **options: Any) -> Any:
            written = parameters if isinstance(parameters, (list, tuple)) else [parameters]
            for ids in _recorders.values():
                ids.update(map(id, written))
            return kernel(parameters, *args, **options)

        return writing

    for name, kernel in kernels.items():
        setattr(operations, name, recorded(kernel))

    def end() -> None:
        for name, kernel in kernels.items():
            setattr(operations, name, kernel)

    return end


def record_writes(written: set[int]) -> None:
    """Add the ids of tensors to WRITTEN as they are written, until `end_record`."""
    _recorders[id(written)] = written


def end_record(written: set[int]) -> None:
    """Stop recording in WRITTEN."""
    _recorders.pop(id(written), None)


def _recorded(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def writing(tensor: Any, *args: Any, **options: Any) -> Any:
        for ids in _recorders.values():
            ids.add(id(tensor))
        return write(tensor, *args, **options)

    setattr(writing, _RECORDS, True)
    return writing


class WatchedForward(NamedTuple):
    """A running forward: the states BEFORE it, and the ids of what it has WRITTEN so far."""

    before: list[int]
    written: set[int]
    looks_at_addresses: bool


class ParameterHistory:
    """What has changed PARAMETERS: by their ids, valid while their model lives, or names."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        # No reference to the model: a history is dropped with it.
        self._parameters = list(parameters)
        # What sharding updates in place of a parameter has its name.
        self._trained: set[str] = set()
        self._sparse: set[str] = set()
        # The number of watched forwards that wrote into each.
        self._written: Counter[int] = Counter()
        self._forwards = 0
        # The update after which the ranks were last compared.
        self.updates = 0

    def record_gradients(self, parameters: Iterable[Any]) -> None:
        """Record which of PARAMETERS have a gradient now."""
        for parameter in parameters:
            # Group sharding updates slices that it names `slice@` and the parameter's name.
            name = parameter.name.rpartition("@")[2]
            if name in self._trained:
                continue
            gradient = parameter.grad
            # Mixed precision may keep it beside the parameter.
            if gradient is not None or getattr(parameter, "main_grad", None) is not None:
                self._trained.add(name)
            if gradient is not None and gradient.is_selected_rows():
                self._sparse.add(name)

    def begin_forward(self) -> WatchedForward:
        """Record which parameters are written until `end_forward`."""
        looks_at_addresses = not self._forwards % (_EVERY if self._forwards >= _EVERY else 1)
        forward = WatchedForward(
            self._states(addresses=looks_at_addresses), set(), looks_at_addresses
        )
        record_writes(forward.written)
        return forward

    def end_forward(self, forward: WatchedForward) -> None:
        """End what `begin_forward` began."""
        end_record(forward.written)
        self._forwards += 1
        after = self._states(addresses=forward.looks_at_addresses)
        if forward.before != after:
            for parameter, old, new in zip(self._parameters * 2, forward.before, after):
                if old != new:
                    forward.written.add(id(parameter))
        self._written.update(forward.written)

    def _states(self, *, addresses: bool) -> list[int]:
        """Return the in-place version of each parameter, then its address if requested."""
        # No function call for each parameter: this is done in each step.
        states = [parameter.inplace_version for parameter in self._parameters]
        if addresses:
            states += [parameter.data_ptr() for parameter in self._parameters]
        return states

    def is_trained(self, parameter: Any) -> bool:
        """Whether PARAMETER ever had a gradient when its optimizer stepped."""
        return parameter.name in self._trained

    def is_sparse(self, parameter: Any) -> bool:
        """Whether the first recorded gradient of PARAMETER was sparse."""
        return parameter.name in self._sparse

    def is_written(self, parameter: Any) -> bool:
        """Whether forwards write PARAMETER repeatedly.

        Some layers write once, when they initialise a parameter that they then train.
        """
        enough = min(self._forwards, _MIN_WRITES)
        return self._forwards > 0 and self._written[id(parameter)] >= enough
