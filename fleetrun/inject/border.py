"""Keeps failures of code that only watches away from the training.

Functions that count, compare and report are called through `watching`. If one raises, a remark is
printed, the function is skipped from then on, and the training continues. Only a `Disproved`, the
result of a check, ends the rank.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = TypeVar("Function", bound=Callable[..., Any])

_remark_callbacks: list[Callable[[str], None]] = []
# The names of functions that have failed.
_remarked: set[str] = set()


class Disproved(RuntimeError):
    """A check has proved that the ranks train wrongly."""


def on_remark(callback: Callable[[str], None]) -> None:
    """Call CALLBACK with a sentence if a watching function fails."""
    _remark_callbacks.append(callback)


def watching(what: str, otherwise: Any = None) -> Callable[[Function], Function]:
    """Wrap a function that only watches, so that it never ends the training; WHAT names it.

    Once it has raised, it is not called again, and its callers get OTHERWISE.
    """

    def wrap(function: Function) -> Function:
        is_left_out = False

        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            nonlocal is_left_out
            if is_left_out:
                return otherwise
            try:
                return function(*args, **options)
            except Disproved:
                raise
            except Exception as error:
                is_left_out = True
                _remark(what, error)
                return otherwise

        return watched  # type: ignore[return-value]

    return wrap


def _remark(what: str, error: Exception) -> None:
    if what in _remarked:
        return
    _remarked.add(what)
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    # Paddle's own errors end with the cause, after a C++ stack.
    why = next((line for line in lines if line.startswith("(")), (lines or [""])[0])
    text = f"{what} has failed and is skipped: {type(error).__name__}: {why}"
    for callback in _remark_callbacks:
        callback(text)
