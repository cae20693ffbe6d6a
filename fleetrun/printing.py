"""Prints the output of commands and remarks, and explains why that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from fleetrun.colors import NAME
from fleetrun.errors import EnvironmentFault
from fleetrun.plan.visible import visible, visible_lines


def put(text: str) -> int:
    """Print TEXT at once, so that a closed pipe is noticed here, and return the exit code 0.

    Names that are not valid text are printed byte by byte, whatever the locale.
    """
    write(text.encode(errors="surrogateescape"))
    return 0


def say(text: str) -> int:
    """Print TEXT as lines with control characters made visible; return 0."""
    return put(f"{visible_lines(text)}\n")


def remark(text: str) -> None:
    """Print TEXT as a line of fleetrun's own on standard error, unless that is closed."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"{NAME}{visible(text)}", file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """Print TEXT as `say` does, but on standard error, unless that is closed."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(visible_lines(text), file=sys.stderr, flush=True)


def write(piece: bytes) -> None:
    """Print PIECE at once; BrokenPipeError without a reader, EnvironmentFault if that fails."""
    out = _out()
    with _explained():
        out.flush()
        out.buffer.write(piece)
        out.flush()


def _out() -> TextIO:
    if sys.stdout is None:
        raise EnvironmentFault("Standard output is closed, and the requested output goes there.")
    return sys.stdout


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of writing standard output, but not of `| head`, into EnvironmentFault."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EnvironmentFault(f"Standard output cannot be written ({error.strerror}).") from None
