"""Sparse gradients: every rank gets the rows of all, as from Paddle's own reducer."""

from __future__ import annotations

from typing import Any

from . import backward, coalesced


def average(parameter: Any, group: Any, nranks: int) -> None:
    """Average the gradient of PARAMETER over the NRANKS ranks of GROUP, if any rank has one."""
    import paddle
    from paddle.base.core import ReduceOp

    gradient = parameter.grad
    with paddle.no_grad():
        if gradient is not None and not gradient.is_selected_rows():
            # The layer is sparse, but the weight is used elsewhere, too.
            gradient = coalesced.contiguous_gradient(parameter)
            gradient.scale_(1.0 / nranks)
            group.all_reduce(gradient, ReduceOp.SUM, True).wait()
            return
        rows = [] if gradient is None else list(gradient.rows())
        counts = paddle.zeros([nranks], dtype="int32")
        counts[group.rank()] = len(rows)
        group.all_reduce(counts, ReduceOp.SUM, True).wait()
        lengths = [int(count) for count in counts.numpy()]
        most = max(lengths)
        if not most:
            return
        if gradient is None:
            gradient = _empty_like(parameter, paddle)
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


def _gathered(own: Any, most: int, group: Any, nranks: int) -> Any:
    """Return what all ranks have, each padded to MOST rows."""
    import paddle

    padded = paddle.zeros([most, *own.shape[1:]], dtype=own.dtype)
    if own.shape[0]:
        padded[: own.shape[0]] = own
    gathered = paddle.zeros([nranks * most, *own.shape[1:]], dtype=own.dtype)
    group.all_gather(gathered, padded, True).wait()
    return gathered


def _empty_like(parameter: Any, paddle: Any) -> Any:
    """Give PARAMETER a sparse gradient of one row, whose place others take; and return it."""
    with paddle.enable_grad():
        copy = parameter.detach()
        copy.stop_gradient = False
        row = paddle.zeros([1], dtype="int64")
        # Paddle makes sparse tensors of this kind nowhere else.
        looked_up = paddle.nn.functional.embedding(row, copy, sparse=True).sum()
        backward.run_unseen([looked_up], [], False)
    parameter._set_grad_ivar(copy.grad)
    return parameter.grad
