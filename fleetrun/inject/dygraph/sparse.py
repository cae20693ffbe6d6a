"""Averages sparse gradients: every rank gets the rows of all ranks, as in Paddle's reducer.

Like Paddle, a reducer knows sparse gradients by their layers: those of `nn.Embedding(sparse=True)`.
Others come without notice, perhaps late and not on all ranks, and Paddle's reducer crashes then. So
functions that make them give dense ones where a reducer expects these.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from .. import border, updates
from ..paddle_api import tensors
from . import backward
from .flat_buffer import contiguous_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from ..evidence import Evidence

# What makes the gradient of its argument `weight` sparse, and the argument that asks for it.
_LOOKUPS = {"embedding": "sparse", "hsigmoid_loss": "is_sparse"}
# Marks a parameter of which a reducer expects dense gradients.
_IS_DENSE = "_fleetrun_is_dense"


def expect_dense(parameters: Iterable[Any]) -> None:
    """Let no function make the gradients of PARAMETERS sparse."""
    for parameter in parameters:
        setattr(parameter, _IS_DENSE, True)


class Lookups:
    """Makes gradients of functions dense where a reducer expects that, and reports it to PROOF."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof
        # The parameters, by name, of which gradients were made dense.
        self._names: set[str] = set()

    def patch(self, module: ModuleType) -> None:
        """Patch the module `paddle.nn.functional`."""
        for name, argument in _LOOKUPS.items():
            look_up = getattr(module, name)
            for place in (module, inspect.getmodule(look_up)):
                setattr(place, name, self._dense_if_expected(look_up, argument))

    def _dense_if_expected(self, look_up: Callable[..., Any], argument: str) -> Callable[..., Any]:
        signature = inspect.signature(look_up)

        @functools.wraps(look_up)
        def looking_up(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options).arguments
            weight = given["weight"]
            if given.get(argument) and getattr(weight, _IS_DENSE, False):
                if not self._names:
                    updates.before_update(self._refuse_adam, "the look at sparse gradients")
                self._names.add(weight.name)
                self._proof.note(
                    f"the gradients of {weight.name} are dense, not sparse as {look_up.__name__} is"
                    " asked for: only those of a layer nn.Embedding(sparse=True) are averaged so"
                )
                return look_up(**{**given, argument: False})
            return look_up(*args, **options)

        return looking_up

    def _refuse_adam(self, optimizer: Any) -> None:
        """Raise Disproved if OPTIMIZER updates by sparse gradients otherwise than by dense ones.

        Of Paddle's that can do both, it is Adam alone, with or without `lazy_mode`.
        """
        if getattr(optimizer, "type", "") != "adam":
            return
        for parameter in updates.parameters_of(optimizer):
            if parameter.name in self._names:
                raise border.Disproved(
                    "fleetrun: Adam updates weights by sparse gradients otherwise than by dense"
                    f" ones, and those of {parameter.name} are averaged as dense ones: make it the"
                    " weight of a layer nn.Embedding(sparse=True), or look it up without sparse."
                )


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
    group.all_gather_into_tensor(gathered, padded, True).wait()
    return gathered
