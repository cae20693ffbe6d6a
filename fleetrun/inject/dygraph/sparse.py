"""Averages sparse gradients: every rank gets the rows of all ranks, as in Paddle's reducer."""

from __future__ import annotations

from typing import Any

from . import backward
from .flat_buffer import contiguous_gradient


def average(parameter: Any, group: Any, nranks: int) -> int:
    """Average the gradient of PARAMETER over the NRANKS ranks of the ProcessGroup GROUP.

    Returns the number of collectives. Changes nothing if no rank has a gradient. A rank without one
    gets the rows of the others.
    """
    import paddle
    from paddle.base.core import ReduceOp

    gradient = parameter.grad
    with paddle.no_grad():
        if gradient is not None and not gradient.is_selected_rows():
            # The weight of the sparse layer is also used elsewhere.
            gradient = contiguous_gradient(parameter)
            gradient.scale_(1.0 / nranks)
            group.all_reduce(gradient, ReduceOp.SUM, True).wait()
            return 1
        rows = [] if gradient is None else list(gradient.rows())
        counts = paddle.zeros([nranks], dtype="int32")
        counts[group.rank()] = len(rows)
        group.all_reduce(counts, ReduceOp.SUM, True).wait()
        lengths = [int(count) for count in counts.numpy()]
        most = max(lengths)
        if not most:
            return 1
        if gradient is None:
            gradient = _new_sparse_gradient(parameter, paddle)
        held = gradient.get_selected_rows()
        values = paddle.base.core.eager.Tensor(held.get_tensor())[: len(rows)]
        all_rows = _gathered(paddle.to_tensor(rows, dtype="int64"), most, group, nranks)
        all_values = _gathered(values, most, group, nranks)
        chosen = paddle.to_tensor(
            [rank * most + index for rank, count in enumerate(lengths) for index in range(count)]
        )
        averaged = paddle.index_select(all_values, chosen) * (1.0 / nranks)
        held.set_rows(paddle.index_select(all_rows, chosen).tolist())
        held.get_tensor()._share_data_with(averaged.get_tensor())
    return 3


def _gathered(own: Any, most: int, group: Any, nranks: int) -> Any:
    """Return the tensors OWN of all ranks, each padded to MOST rows, along the first axis."""
    import paddle

    padded = paddle.zeros([most, *own.shape[1:]], dtype=own.dtype)
    if own.shape[0]:
        padded[: own.shape[0]] = own
    gathered = paddle.zeros([nranks * most, *own.shape[1:]], dtype=own.dtype)
    group.all_gather(gathered, padded, True).wait()
    return gathered


def _new_sparse_gradient(parameter: Any, paddle: Any) -> Any:
    """Give PARAMETER a sparse gradient of one row, and return it; the caller replaces the row."""
    with paddle.enable_grad():
        copy = parameter.detach()
        copy.stop_gradient = False
        row = paddle.zeros([1], dtype="int64")
        # Nothing else in Paddle creates a SelectedRows gradient.
        looked_up = paddle.nn.functional.embedding(row, copy, sparse=True).sum()
        backward.run_unobserved([looked_up], [], False)
    parameter._set_grad_ivar(copy.grad)
    return parameter.grad
