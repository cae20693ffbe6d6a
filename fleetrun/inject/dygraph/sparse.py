"""Averages sparse gradients: every rank gets the rows of all ranks, as in Paddle's reducer."""

from __future__ import annotations

from typing import Any

from ..paddle_api import tensors
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
            tensors.keep_memory(parameter)
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
            with backward.unobserved():
                gradient = tensors.new_sparse_gradient(parameter)
        values = tensors.sparse_values(gradient)[: len(rows)]
        all_rows = _gathered(paddle.to_tensor(rows, dtype="int64"), most, group, nranks)
        all_values = _gathered(values, most, group, nranks)
        chosen = paddle.to_tensor(
            [rank * most + index for rank, count in enumerate(lengths) for index in range(count)]
        )
        averaged = paddle.index_select(all_values, chosen) * (1.0 / nranks)
        chosen_rows: Any = paddle.index_select(all_rows, chosen).tolist()
        tensors.set_sparse(gradient, chosen_rows, averaged)
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
