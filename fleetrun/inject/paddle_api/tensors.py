"""Accesses gradients by Paddle's private functions: views, hooks, sparse rows."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

# coalesce_tensor's copy_data, set_constant, persist_output, constant; and, after use_align and
# align_size, its size_of_dtype, concated_shapes, concated_ranks.
_COPIED: tuple[Any, ...] = (True, False, False, 0.0)
_FROM_TENSORS: tuple[Any, ...] = (-1, [], [])
# The alignment of gradients on a device: a multiple of what CUDA and plug-ins need (64 to 512), and
# Paddle's own for unknown devices. It must be the same on all ranks.
_ALIGNMENT = 1024
_STRIDES = "FLAGS_use_stride_kernel"

# In paddle._C_ops: they write their first argument, or each tensor of that list, without a new
# in-place version.
OPTIMIZER_KERNELS = (
    *("adadelta_", "adagrad_", "adam_", "adamax_", "adamw_", "asgd_", "fused_adam_", "lamb_"),
    *("lars_momentum_", "merged_adam_", "merged_momentum_", "momentum_", "nadam_", "radam_"),
    *("rmsprop_", "rprop_", "sgd_"),
)


def _core() -> Any:
    # Not an import: it is called in every step.
    return sys.modules["paddle.base.core"]


def nbytes(tensor: Any) -> int:
    """Return the size of TENSOR in bytes."""
    return int(tensor.size) * int(tensor.element_size())


def states(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the in-place version and the address of each tensor: they change if it is written."""
    return [(tensor.inplace_version, tensor.data_ptr()) for tensor in tensors]


def is_trained(parameter: Any) -> bool:
    """Whether PARAMETER gets gradients of its own; the output of an operator gets none."""
    return not parameter.stop_gradient and bool(parameter.is_leaf)


def on_gradient(parameter: Any, hook: Callable[..., None]) -> None:
    """Call HOOK right after each accumulation of the gradient of PARAMETER."""
    parameter._register_backward_hook(hook)


def make_contiguous(parameters: Sequence[Any]) -> list[Any]:
    """Make gradients of PARAMETERS contiguous before they are accumulated; return the hooks."""
    if not _are_views_strided():
        return []
    # A C function costs less than one of ours. Only scripts' hooks make vectors strided.
    contiguous = tensor_class().contiguous
    return [parameter.register_hook(contiguous) for parameter in parameters if parameter.ndim > 1]


def keep_additions_right(parameters: Sequence[Any]) -> list[Any]:
    """Let gradients of PARAMETERS of a model be accumulated in any layout; return the hooks."""
    # Plug-ins add bare memory, which is wrong for strided gradients; CPUs use the strides. All
    # parameters are where the first one is: a look at each costs 0.5 ms for 300 of them.
    adds_bare = bool(parameters) and parameters[0].place.is_custom_place()
    return make_contiguous(parameters) if adds_bare else []


def _are_views_strided() -> bool:
    """Whether the gradient of a view may be strided: vendors' plug-ins disable that."""
    paddle: Any = sys.modules["paddle"]
    return bool(paddle.get_flags([_STRIDES])[_STRIDES])


def gradients(parameters: Sequence[Any]) -> list[Any]:
    """Return the gradient of each of PARAMETERS, None where there is none."""
    grads: list[Any] = _core().eager.get_all_grads(list(parameters))
    for index, gradient in enumerate(grads):
        if gradient is None and parameters[index].stop_gradient:
            # Paddle omits it while the parameter is frozen, as GANs do for a while.
            grads[index] = parameters[index]._grad_ivar()
    return grads


def crash_if_added_to(parameters: Sequence[Any]) -> bool:
    """Whether Paddle crashes where a backward adds to the gradients of PARAMETERS."""
    return any(
        gradient is not None and gradient.is_selected_rows() and gradient.place.is_custom_place()
        for gradient in gradients(parameters)
    )


def set_gradient(parameter: Any, gradient: Any) -> None:
    """Set the gradient of PARAMETER to a copy of GRADIENT, unnoticed by `parameter.grad =`."""
    parameter._set_grad_ivar(gradient)


def set_master_gradients(parameters: Sequence[Any]) -> None:
    """Replace the gradients of PARAMETERS by copies in float32."""
    _core().eager.set_master_grads(list(parameters))


def keep_memory(parameter: Any) -> None:
    """Let the next backward add to the gradient of PARAMETER in place, though it was cleared."""
    parameter._unset_fake_empty()


def keep_all_memory(parameters: Sequence[Any]) -> None:
    """Do the same for PARAMETERS without a Python call for each."""
    for parameter in parameters:
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


def part(flat: Any, begin: int, end: int, shape: list[int]) -> Any:
    """Return the view of FLAT from BEGIN to END with SHAPE."""
    # `Tensor._slice` wraps without a place, which copies what is not on the default device.
    dense = flat.get_tensor()._slice(begin, end)
    dense._set_dims(shape)
    return tensor_class()(dense, flat.place)


def coalesced(tensors: list[Any]) -> tuple[list[Any], Any]:
    """Return the views of a new flat tensor with copies of TENSORS, and the flat tensor.

    On a device the views are aligned. The gaps are zero, so that sums and casts of the flat tensor
    equal those of TENSORS.
    """
    first = tensors[0]
    # A CPU needs no alignment.
    is_aligned = not first.place.is_cpu_place()
    if not has_kernel("coalesce_tensor", first):
        return _concatenated(tensors, _ALIGNMENT if is_aligned else 1)
    paddle: Any = sys.modules["paddle"]
    views, flat = paddle._C_ops.coalesce_tensor(
        tensors, first.dtype, *_COPIED, is_aligned, _ALIGNMENT, *_FROM_TENSORS
    )
    if is_aligned:
        begin, width = flat.data_ptr(), flat.element_size()
        starts = [(view.data_ptr() - begin) // width for view in views]
        for view, start, following in zip(views, starts, [*starts[1:], flat.size]):
            end = start + view.size
            if end < following:
                part(flat, end, following, [following - end]).zero_()
    return views, flat


def _concatenated(tensors: list[Any], alignment: int) -> tuple[list[Any], Any]:
    """Do the same as `coalesced` without Paddle's operator; ALIGNMENT is in bytes."""
    paddle: Any = sys.modules["paddle"]
    places, pieces, end = [], [], 0
    for tensor in tensors:
        places.append(end)
        pieces.append(tensor.flatten())
        end += tensor.size
        gap = -end % max(1, alignment // tensor.element_size())
        if gap:
            pieces.append(paddle.zeros([gap], tensor.dtype))
            end += gap
    flat = paddle.concat(pieces)
    views = [
        part(flat, place, place + tensor.size, tensor.shape)
        for place, tensor in zip(places, tensors)
    ]
    return views, flat


def has_kernel(operator: str, tensor: Any) -> bool:
    """Whether Paddle has OPERATOR for the device and the dtype of TENSOR.

    Without it Paddle may run the CPU's on device memory and crash.
    """
    kind = str(tensor.place).partition("(")[2].rstrip(")").partition(":")[0]
    dtype = str(tensor.dtype).rpartition(".")[2]
    rows = _kernels().get(operator, ())
    return any(
        row[0].lower() == kind and row[-1] == dtype
        for row in (text.strip("()").split(", ") for text in rows)
    )


@functools.cache
def _kernels() -> dict[str, list[str]]:
    """Return, by operator, the kernels of Paddle: `(CPU, Undefined(AnyLayout), float32)`."""
    kernels: dict[str, list[str]] = _core()._get_registered_phi_kernels("all")
    return kernels


def gradient_attribute() -> Any:
    """Return the descriptor of `Tensor.grad`."""
    return vars(_core().eager.Tensor)["grad"]


def tensor_class() -> Any:
    """Return the class of all tensors of dynamic graphs."""
    return _core().eager.Tensor


def sparse_values(gradient: Any) -> Any:
    """Return the values of a sparse GRADIENT as a tensor that shares their memory."""
    return tensor_class()(gradient.get_selected_rows().get_tensor(), gradient.place)


def set_sparse(gradient: Any, rows: list[int], values: Any) -> None:
    """Set the ROWS of a sparse GRADIENT and their VALUES, whose memory it takes."""
    selected = gradient.get_selected_rows()
    selected.set_rows(rows)
    selected.get_tensor()._share_data_with(values.get_tensor())


def new_sparse_gradient(parameter: Any) -> Any:
    """Give PARAMETER a sparse gradient of one row, and return it; runs a backward."""
    paddle: Any = sys.modules["paddle"]
    with paddle.enable_grad():
        copy = parameter.detach()
        copy.stop_gradient = False
        row = paddle.to_tensor([0], dtype="int64", place=parameter.place)
        # Nothing else in Paddle creates a SelectedRows gradient.
        looked_up = paddle.nn.functional.embedding(row, copy, sparse=True).sum()
        paddle.autograd.backward([looked_up])
    set_gradient(parameter, copy.grad)
    return parameter.grad
