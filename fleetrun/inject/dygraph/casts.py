"""Counts the casts of layers, after which gradients may have other dtypes than their buckets."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_count = 0


def count() -> int:
    """Return how many layers have been cast or moved so far, of all models of this process."""
    return _count


def patch(module: ModuleType) -> None:
    """Patch the module `paddle.nn.layer.layers`."""
    cls: Any = module.Layer
    # `to`, `float16` and `paddle.amp.decorate` come to the first one.
    cls._to_impl = _counted(cls._to_impl)
    cls.astype = _counted(cls.astype)


def _counted(cast: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(cast)
    def counted(*args: Any, **options: Any) -> Any:
        global _count  # one Paddle
        _count += 1
        return cast(*args, **options)

    return counted
