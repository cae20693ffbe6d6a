"""Prints the output of commands and remarks; says whether to colour it."""

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


def error_columns() -> int:
    """Return the columns of the terminal on standard error; 0: it is none."""
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        return 0


def is_color_wanted(choice: str, environ: Mapping[str, str], stream: TextIO | None) -> bool:
    """Whether to colour STREAM (None: closed), by --color, $NO_COLOR and $TERM.

    >>> [is_color_wanted(choice, {}, None) for choice in (ALWAYS, AUTO)]
    [True, False]
    """
    if choice in {ALWAYS, NEVER} or stream is None or environ.get("NO_COLOR"):
        return choice == ALWAYS
    return stream.isatty() and environ.get("TERM", "") not in {"", "dumb"}


def say(text: str) -> int:
    """Print TEXT as lines with control characters made visible; return 0."""
    return put(f"{visible_lines(text)}\n")


def remark(text: str) -> None:
    """Print TEXT as a line of fleetrun's own on standard error, unless that is closed."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"{NAME}{visible(text)}", file=sys.stderr, flush=True)


def put(text: str | bytes) -> int:
    """Print TEXT at once, whatever the locale, and return the exit code 0.

    Raises BrokenPipeError without a reader, and EnvironmentFault if it cannot be printed.
    """
    piece = text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
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
    return 0


def flush() -> None:
    """Print what standard output and error still hold, unless they are closed or unread."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
