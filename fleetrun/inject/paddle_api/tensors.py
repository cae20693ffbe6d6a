"""Accesses gradients by Paddle's private functions."""

from __future__ import annotations

import functools
import operator
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

_STRIDES = "FLAGS_use_stride_kernel"
_IS_FROZEN = operator.attrgetter("stop_gradient")


def nbytes(tensor: Any) -> int:
    """Return the size of TENSOR in bytes."""
    return int(tensor.size) * int(tensor.element_size())


def is_trained(parameter: Any) -> bool:
    """Whether PARAMETER gets gradients of its own; the output of an operator gets none."""
    return not parameter.stop_gradient and bool(parameter.is_leaf)


def states(parameters: Sequence[Any]) -> list[list[Any]]:
    """Return what a script may change of PARAMETERS by freezing or casting them.

    Read by functions in C: it is compared at every forward. Paddle 2 takes 3 us to read and compare
    a dtype, and there is one trainable one of four bytes. Leaves are not read: only frozen ones may
    become an operator's output, and they are not frozen then.
    """
    sizes = {*map(tensor_class().element_size, parameters)}
    dtypes = [] if sizes == {4} else [int(parameter.dtype) for parameter in parameters]
    return [[*map(_IS_FROZEN, parameters)], dtypes]


def on_gradient(parameter: Any, hook: Callable[..., None]) -> None:
    """Call HOOK right after each accumulation of the gradient of PARAMETER."""
    parameter._register_backward_hook(hook)


def make_contiguous(parameters: Sequence[Any]) -> None:
    """Make gradients of PARAMETERS contiguous before they are accumulated."""
    # A C function costs less than one of ours.
    contiguous = tensor_class().contiguous
    for parameter in maybe_strided(parameters):
        parameter.register_hook(contiguous)


def maybe_strided(parameters: Sequence[Any]) -> list[Any]:
    """Return those of PARAMETERS whose gradients may be strided; vectors only by scripts' hooks."""
    paddle: Any = sys.modules["paddle"]
    # Vendors' plug-ins disable strided gradients of views.
    if not paddle.get_flags([_STRIDES])[_STRIDES]:
        return []
    return [parameter for parameter in parameters if parameter.ndim > 1]


def gradients(parameters: Sequence[Any]) -> list[Any]:
    """Return the gradient of each of PARAMETERS, None where there is none."""
    # Not an import: it is called in every step.
    grads: list[Any] = sys.modules["paddle.base.core"].eager.get_all_grads(list(parameters))
    for index, gradient in enumerate(grads):
        if gradient is None and parameters[index].stop_gradient:
            # Paddle omits it while the parameter is frozen, as GANs do for a while.
            grads[index] = parameters[index]._grad_ivar()
    return grads


def set_gradient(parameter: Any, gradient: Any) -> None:
    """Set the gradient of PARAMETER to a copy of GRADIENT, unnoticed by `parameter.grad =`."""
    parameter._set_grad_ivar(gradient)


def keep_memory(parameter: Any) -> None:
    """Let the next backward add to the gradient of PARAMETER in place, though it was cleared."""
    parameter._unset_fake_empty()


def share_memory(source: Any, target: Any) -> None:
    """Make TARGET a view of SOURCE's memory."""
    source._share_buffer_to(target)


def made_at(place: Any) -> AbstractContextManager[None]:
    """Create tensors at PLACE, whatever device the script has chosen."""
    guard: AbstractContextManager[None] = sys.modules["paddle.base.framework"]._dygraph_place_guard(
        place
    )
    return guard


@functools.lru_cache
def tensor_class() -> Any:
    """Return the class of all tensors of dynamic graphs."""
    return sys.modules["paddle.base.core"].eager.Tensor
