"""Makes Paddle 3 functions that its static fleet calls work on programs of the legacy IR.

Static fleet of 3.3.1 supports the legacy IR only. Some functions that its optimizers call
(clipping, amp, LocalSGD) support only the new IR (PIR). While fleet minimizes, these functions
append the operators that Paddle 2 appended; Paddle 3 still has the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The operator of each function, and its attributes.
_OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "any": ("reduce_any", {"dim": [0], "keep_dim": False, "reduce_all": True}),
    "ceil": ("ceil", {}),
    "logical_not": ("logical_not", {}),
    "maximum": ("elementwise_max", {"axis": -1}),
    "minimum": ("elementwise_min", {"axis": -1}),
    "sqrt": ("sqrt", {}),
}


@contextlib.contextmanager
def functions() -> Iterator[None]:
    """Let the functions append to legacy programs while the context is open."""
    paddle: Any = sys.modules["paddle"]
    if paddle.__version__.startswith("2."):
        yield
        return
    originals = {name: getattr(paddle, name) for name in _OPERATORS}
    for name, function in originals.items():
        setattr(paddle, name, _writing(function, *_OPERATORS[name]))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(paddle, name, function)


def _writing(function: Callable[..., Any], kind: str, attrs: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def write(*args: Any, **kwargs: Any) -> Any:
        paddle: Any = sys.modules["paddle"]
        operands = dict(zip(("x", "y"), args), **kwargs)
        legacy = paddle.base.framework.Variable
        if not all(isinstance(operand, legacy) for operand in operands.values()):
            # Not ours, or a wrong call, which the function itself reports.
            return function(*args, **kwargs)
        writer = paddle.base.layer_helper.LayerHelper(kind)
        out = writer.create_variable_for_type_inference(dtype=operands["x"].dtype)
        inputs = {name.upper(): operand for name, operand in operands.items()}
        writer.append_op(type=kind, inputs=inputs, outputs={"Out": out}, attrs=attrs)
        return out

    return write
