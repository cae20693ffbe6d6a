"""Records which tensors the methods of tensors write."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Callable

# Methods that write without a new in-place version.
_WRITING_METHODS = ("set_value", "copy_")
# Marks these methods once they are patched.
_RECORDS = "_fleetrun_records"
# Sets that collect the ids of written tensors, by the set's own id.
_recorders: dict[int, set[int]] = {}


def watch_writes() -> None:
    """Patch the writing methods of tensors to record their calls, once."""
    kind = tensors.tensor_class()
    for name in _WRITING_METHODS:
        if hasattr(kind, name) and not hasattr(getattr(kind, name), _RECORDS):
            setattr(kind, name, _recorded(getattr(kind, name)))


def record_writes(written: set[int]) -> None:
    """Add the ids of tensors to WRITTEN as they are written, until `end_record`."""
    _recorders[id(written)] = written


def end_record(written: set[int]) -> None:
    """Stop recording in WRITTEN."""
    _recorders.pop(id(written), None)


def _recorded(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def writing(tensor: Any, *args: Any, **options: Any) -> Any:
        for ids in _recorders.values():
            ids.add(id(tensor))
        return write(tensor, *args, **options)

    setattr(writing, _RECORDS, True)
    return writing
