"""Averages sparse gradients: every rank gets the rows of all ranks, as in Paddle's reducer.

Like Paddle, a reducer knows sparse gradients by their layers: those of `nn.Embedding(sparse=True)`.
Others appear unannounced, perhaps late and not on all ranks, and crash Paddle's reducer. So the
functions that produce them return dense ones where a reducer expects those.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from .. import border, updates
from ..import_hooks import in_place_of
from ..paddle_api import tensors
from . import backward
from .flat_buffer import contiguous_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from ..evidence import Evidence

# Functions that make the gradient of `weight` sparse, and the argument that requests it.
_LOOKUPS = {"embedding": "sparse", "hsigmoid_loss": "is_sparse"}
# Marks a parameter whose gradients a reducer expects to be dense.
_IS_DENSE = "_fleetrun_is_dense"


def expect_dense(parameters: Iterable[Any]) -> None:
    """Let no function make the gradients of PARAMETERS sparse."""
    for parameter in parameters:
        setattr(parameter, _IS_DENSE, True)


class Lookups:
    """Makes gradients dense where a reducer expects that, and reports it to PROOF."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof
        # The names of parameters whose gradients were made dense.
        self._names: set[str] = set()

    def patch(self, module: ModuleType) -> None:
        """Patch the module `paddle.nn.functional`."""
        for name, argument in _LOOKUPS.items():
            look_up = getattr(module, name)
            for place in (module, inspect.getmodule(look_up)):
                self._make_dense_if_expected(place, name, argument)

    def _make_dense_if_expected(self, place: Any, name: str, argument: str) -> None:
        signature = inspect.signature(getattr(place, name))

        @in_place_of(place, name)
        def looking_up(look_up: Callable[..., Any], *args: Any, **options: Any) -> Any:
            arguments = signature.bind(*args, **options).arguments
            weight = arguments["weight"]
            if arguments.get(argument) and getattr(weight, _IS_DENSE, False):
                if not self._names:
                    updates.before_update(self._refuse_adam, "the check of sparse gradients")
                self._names.add(weight.name)
                self._proof.note(
                    f"the gradients of {weight.name} are dense, although {look_up.__name__} was"
                    " called for sparse ones: ranks average sparse gradients of"
                    " nn.Embedding(sparse=True) layers only"
                )
                return look_up(**{**arguments, argument: False})
            return look_up(*args, **options)

    def _refuse_adam(self, optimizer: Any) -> None:
        """Raise Disproved if OPTIMIZER treats sparse gradients unlike dense ones.

        Of Paddle's optimizers only Adam does, with or without `lazy_mode`.
        """
        if getattr(optimizer, "type", "") != "adam":
            return
        for parameter in updates.parameters_of(optimizer):
            if parameter.name in self._names:
                raise border.Disproved(
                    "fleetrun: Adam updates weights differently with sparse gradients than with"
                    f" dense ones, and those of {parameter.name} are averaged as dense ones: make"
                    " it the weight of an nn.Embedding(sparse=True) layer, or look it up with"
                    " sparse=False."
                )


def average(parameter: Any, group: Any, nranks: int) -> int:
    """Average the gradient of PARAMETER over the NRANKS ranks of the ProcessGroup GROUP.

    Return the number of collectives. A rank without a gradient gets the rows of the others; if no
    rank has one, nothing changes.
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
        # Not by assignment to an element: Paddle crashes there with some plug-ins.
        counts = paddle.to_tensor(
            [len(rows) * (rank == group.rank()) for rank in range(nranks)], dtype="int32"
        )
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

    padded = own
    if own.shape[0] < most:
        absent = paddle.zeros([most - own.shape[0], *own.shape[1:]], dtype=own.dtype)
        padded = paddle.concat([own, absent]) if own.shape[0] else absent
    gathered = paddle.zeros([nranks * most, *own.shape[1:]], dtype=own.dtype)
    group.all_gather_into_tensor(gathered, padded, True).wait()
    return gathered
