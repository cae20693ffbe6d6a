"""Many gradients in one piece of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .communicators import Lane

# Copy, fill, keep, fill with, align, to, element size, shapes, ranges.
_COPIED: tuple[Any, ...] = (True, False, False, 0.0, False, -1, -1, [], [])


class Block:
    """The memory of several gradients, which STAYS theirs from one backward to the next."""

    def __init__(self, parameters: Sequence[Any], *, stays: bool = True) -> None:
        self._parameters = parameters
        self._stays = stays
        self._flat: Any = None
        self._addresses: list[int] = []

    def prepare(self) -> None:
        """Let the next backward add to the gradients where they are, if they are still here.

        They are zeros then, or what is accumulated. Without this word, Paddle puts new tensors in
        the place of gradients that were cleared.
        """
        if self._flat is None:
            return
        if _addresses(self._parameters) != self._addresses:
            # They were set to None, or replaced.
            self._flat = None
            return
        for parameter in self._parameters:
            parameter._unset_fake_empty()

    def gather(self) -> tuple[Any, list[tuple[Any, Any]]]:
        """Move the gradients here, as far as they are not, so that they are views of one tensor.

        Returns that tensor, and for each parameter without a gradient where its own would be. What
        is done to the tensor is done to the gradients: nothing has to be copied back.
        """
        if self._flat is not None and _addresses(self._parameters) == self._addresses:
            return self._flat, []
        # Or backward has put new tensors in their place after all: what is here is old.
        flat, absent = _gathered(self._parameters)
        stays = self._stays and not absent and len(self._parameters) > 1
        self._flat = flat if stays else None
        self._addresses = _addresses(self._parameters) if stays else []
        return flat, absent


def _addresses(parameters: Sequence[Any]) -> list[int]:
    from paddle.base import core

    eager: Any = core.eager
    gradients = eager.get_all_grads(list(parameters))
    return [0 if each is None else each.data_ptr() for each in gradients]


def contiguous_gradient(parameter: Any) -> Any:
    """Return the dense gradient of PARAMETER, laid out as its shape says; None if there is none.

    The gradient of a weight that is used transposed has the layout of the transposed weight.
    Whoever takes its memory for the rows of its shape mixes up its numbers, as Paddle's own
    reducer does, and gloo's allreduce in Paddle 2.6.2; that of 3.3.1 refuses it.
    """
    gradient = parameter.grad
    if gradient is None or gradient.is_contiguous():
        return gradient
    # Paddle's `contiguous` works in place; one that returns a copy would be no less right.
    parameter._set_grad_ivar(gradient.contiguous())
    return parameter.grad


def _gathered(parameters: Sequence[Any]) -> tuple[Any, list[tuple[Any, Any]]]:
    import paddle

    with paddle.no_grad():
        gradients = [contiguous_gradient(parameter) for parameter in parameters]
        if len(gradients) == 1 and gradients[0] is not None:
            return gradients[0], []
        sources = [
            paddle.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients)
        ]
        views, flat = _joined(sources)
        absent = []
        for parameter, gradient, view in zip(parameters, gradients, views):
            if gradient is None:
                absent.append((parameter, view))
            else:
                view._share_buffer_to(gradient)
    return flat, absent


def _joined(tensors: list[Any]) -> tuple[list[Any], Any]:
    """Return views of a new flat tensor with what TENSORS hold, and it."""
    import paddle

    if tensors[0].dtype in (paddle.float32, paddle.float64) or not tensors[0].place.is_cpu_place():
        ops: Any = paddle
        views, flat = ops._C_ops.coalesce_tensor(tensors, tensors[0].dtype, *_COPIED)
        return views, flat
    # That operator has no other types on CPUs.
    flat = paddle.concat([tensor.flatten() for tensor in tensors])
    views, begin = [], 0
    for tensor in tensors:
        view = flat._slice(begin, begin + tensor.size)
        view.get_tensor()._set_dims(tensor.shape)
        views.append(view)
        begin += tensor.size
    return views, flat


def scale(tensor: Any, by: float) -> None:
    """Multiply TENSOR, in its place."""
    import paddle

    with paddle.no_grad():
        tensor.scale_(by)


def sum_of(numbers: Sequence[int], lane: Lane) -> list[int]:
    """Return the sums of NUMBERS over the ranks."""
    import paddle

    tensor = paddle.to_tensor(list(numbers), dtype="int32")
    pending = lane.issue(tensor)
    lane.calls -= 1
    if pending is not None:
        pending.wait()
    return [int(number) for number in tensor.numpy()]
