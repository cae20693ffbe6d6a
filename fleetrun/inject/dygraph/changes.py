"""Counts casts, freezes and unfreezes, which change the set or the dtypes of gradients.

Examining each parameter in each step would cost more than everything else a reducer does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..import_hooks import watch_method

if TYPE_CHECKING:
    from types import ModuleType

# How many times layers were cast or moved, and parameters frozen or unfrozen so far. A variable, as
# each step reads it.
count = 0
# `trainable` sets it, too.
_FROZEN = "stop_gradient"


def patch_layers(module: ModuleType) -> None:
    """Patch the module `paddle.nn.layer.layers`."""
    cls: Any = module.Layer
    # `to`, `float16` and `paddle.amp.decorate` call the first one.
    for name in ("_to_impl", "astype"):
        watch_method(cls, name, before=_count)


def patch_parameters(framework: ModuleType) -> None:
    """Patch the module `paddle.base.framework`."""
    cls: Any = framework.EagerParamBase
    write = cls.__setattr__

    @functools.wraps(write)
    def __setattr__(parameter: Any, name: str, value: Any) -> None:
        global count  # one Paddle
        if name == _FROZEN:
            count += 1
        write(parameter, name, value)

    cls.__setattr__ = __setattr__


def _count(_layer: Any) -> None:
    global count  # one Paddle
    count += 1
