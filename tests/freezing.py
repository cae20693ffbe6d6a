"""Many objects that stay, made while no garbage is collected."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def frozen() -> Iterator[None]:
    """Collect no garbage meanwhile, nor ever what is there at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
