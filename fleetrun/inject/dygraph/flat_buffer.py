"""The gradients of a bucket in one flat tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Sequence


class FlatBuffer:
    """A flat tensor whose views are the gradients of PARAMETERS.

    With REUSE the same memory serves the next backward if the gradients are still in it.
    """

    def __init__(self, parameters: Sequence[Any], *, reuse: bool = True) -> None:
        self._parameters = parameters
        self._reuse = reuse
        self._flat: Any = None
        self._addresses: list[int] = []

    def prepare(self) -> None:
        """Make the next backward accumulate into the views if the gradients are still there.

        Their values are zeros or what was accumulated so far. Otherwise Paddle would allocate new
        tensors for cleared gradients.
        """
        if self._flat is None:
            return
        if _addresses(self._parameters) != self._addresses:
            # The script has set them to None, or replaced them.
            self._flat = None
            return
        tensors.keep_all_memory(self._parameters)

    def gather(self) -> tuple[Any, list[tuple[Any, Any]]]:
        """Make the gradients views of one flat tensor; return that tensor and the absent ones.

        Absent are the parameters without a gradient, each with its view (zeros). An operation on
        the tensor is one on the gradients, so nothing is copied back.
        """
        if self._flat is not None and _addresses(self._parameters) == self._addresses:
            return self._flat, []
        flat, absent = _flattened(self._parameters)
        is_kept = self._reuse and not absent and len(self._parameters) > 1
        self._flat = flat if is_kept else None
        self._addresses = _addresses(self._parameters) if is_kept else []
        return flat, absent


def _addresses(parameters: Sequence[Any]) -> list[int]:
    return [
        0 if gradient is None else gradient.data_ptr() for gradient in tensors.gradients(parameters)
    ]


def contiguous_gradient(parameter: Any) -> Any:
    """Return the dense gradient of PARAMETER in row-major layout; None if there is none.

    The gradient of a weight that is used transposed has the transposed layout. Code that assumes
    rows mixes up its values: Paddle's own reducer does, and gloo's allreduce in Paddle 2.6.2; that
    of 3.3.1 refuses it.
    """
    gradient = parameter.grad
    if gradient is None or gradient.is_contiguous():
        return gradient
    # Paddle's `contiguous` works in place; one that returned a copy would be right, too.
    # `parameter.grad =` would copy once more.
    tensors.set_gradient(parameter, gradient.contiguous())
    return parameter.grad


def _flattened(parameters: Sequence[Any]) -> tuple[Any, list[tuple[Any, Any]]]:
    import paddle

    with paddle.no_grad():
        gradients = [contiguous_gradient(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients):
            if gradient is not None:
                # `clear_grad` marks it as empty until this rank computes it: the next one would
                # replace it, and what the other ranks give it now would be lost.
                tensors.keep_memory(parameter)
        dtype = _common_dtype(parameters, gradients)
        if len(gradients) == 1:
            # Without gaps, also on a rank that has no gradient of it.
            if gradients[0] is not None:
                return gradients[0], []
            flat = paddle.zeros(parameters[0].shape, dtype)
            return flat, [(parameters[0], flat)]
        if any(gradient is not None and gradient.dtype != dtype for gradient in gradients):
            tensors.set_master_gradients(parameters)
            gradients = [parameter.grad for parameter in parameters]
        sources = [
            paddle.zeros(parameter.shape, dtype) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients)
        ]
        views, flat = tensors.coalesced(sources)
        absent = []
        for parameter, gradient, view in zip(parameters, gradients, views):
            if gradient is None:
                absent.append((parameter, view))
            else:
                tensors.share_memory(view, gradient)
    return flat, absent


def _common_dtype(parameters: Sequence[Any], gradients: Sequence[Any]) -> Any:
    """Return the dtype in which GRADIENTS are reduced: fp32 if any of them has it, else their own.

    Mixed precision with `master_grad=True` leaves merged gradients in fp32, while parameters and
    new gradients have 16 bits.
    """
    import paddle

    dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
    return paddle.float32 if paddle.float32 in dtypes else parameters[0].dtype
