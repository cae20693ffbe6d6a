"""Lends Paddle 3's fleet the functions that it calls and that cannot write older programs any more.

Static fleet of 3.3.1 works with the older representation of programs only, but some functions that
its own optimizers call (clipping, amp, LocalSGD) know only the newer one. While fleet minimizes,
these write the operators that Paddle 2 wrote; kernels for them are in Paddle 3, too.
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
    """Let the functions write into older programs until the end of the block."""
    paddle: Any = sys.modules["paddle"]
    if paddle.__version__.startswith("2."):
        yield
        return
    kept = {name: getattr(paddle, name) for name in _OPERATORS}
    for name, function in kept.items():
        setattr(paddle, name, _writing(function, *_OPERATORS[name]))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(paddle, name, function)


def _writing(function: Callable[..., Any], kind: str, attrs: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def write(*words: Any, **named: Any) -> Any:
        paddle: Any = sys.modules["paddle"]
        operands = dict(zip(("x", "y"), words), **named)
        older = paddle.base.framework.Variable
        if not all(isinstance(operand, older) for operand in operands.values()):
            # Or it was called with more than operands, and says itself what is wrong.
            return function(*words, **named)
        writer = paddle.base.layer_helper.LayerHelper(kind)
        out = writer.create_variable_for_type_inference(dtype=operands["x"].dtype)
        inputs = {name.upper(): operand for name, operand in operands.items()}
        writer.append_op(type=kind, inputs=inputs, outputs={"Out": out}, attrs=attrs)
        return out

    return write
