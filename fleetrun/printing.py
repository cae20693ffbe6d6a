"""Prints the output of commands and remarks; colours fleetrun's own lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from fleetrun.errors import EnvironmentFault
from fleetrun.text import visible, visible_lines

AUTO, ALWAYS, NEVER = "auto", "always", "never"
NAME = "fleetrun: "
_BOLD, _FAULT, _END = "\x1b[1m", "\x1b[1;31m", "\x1b[0m"


def error_columns() -> int:
    """Return the columns of the terminal on standard error; 0: it is none."""
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        return 0


def is_colored_stream(choice: str, environ: Mapping[str, str], stream: TextIO | None) -> bool:
    """Whether to colour output to STREAM; None: it is closed."""
    return is_color_wanted(choice, environ, is_terminal=stream is not None and stream.isatty())


def is_color_wanted(choice: str, environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether to colour, by --color, $NO_COLOR and $TERM.

    >>> is_color_wanted("auto", {"TERM": "xterm"}, is_terminal=True)
    True
    >>> is_color_wanted("auto", {"TERM": "xterm", "NO_COLOR": "1"}, is_terminal=True)
    False
    """
    if choice in {ALWAYS, NEVER}:
        return choice == ALWAYS
    return (
        is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") not in {"", "dumb"}
    )


def message_prefix(*, is_coloured: bool, is_fault: bool = False) -> str:
    """Return the prefix of fleetrun's own lines."""
    if not is_coloured:
        return NAME
    return f"{_FAULT if is_fault else _BOLD}{NAME.rstrip()}{_END} "


# -- output ---------------------------------------------------------------------------------------


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
    if sys.stdout is None:
        raise EnvironmentFault("Standard output is closed, and the requested output goes there.")
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EnvironmentFault(f"Standard output cannot be written ({error.strerror}).") from None
