"""Prints long texts on a terminal: coloured if requested, and paged if they do not fit."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from fleetrun.printing import colored_page, is_color_wanted, put


def page(text: str, choice: str, environ: Mapping[str, str]) -> int:
    """Print TEXT, in colour if requested, through a pager if the terminal is too small."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    shown = text
    if is_color_wanted(choice, environ, is_terminal=is_terminal):
        shown = colored_page(text)
    if is_terminal and sys.stdin.isatty() and _is_long(text):
        for pager in _pagers(environ):
            if _paged(shown, pager, environ):
                return 0
    return put(shown)


def _is_long(text: str) -> bool:
    # The shell's prompt takes a line.
    return text.count("\n") >= os.get_terminal_size(sys.stdout.fileno()).lines


def _pagers(environ: Mapping[str, str]) -> list[str]:
    """Return the pagers to try, in order; none on a dumb terminal."""
    if environ.get("TERM", "") in {"", "dumb"}:
        return []
    requested = environ.get("PAGER")
    if requested is None:
        return ["less", "more"]
    return [] if requested.strip() in {"", "cat"} else [requested]


def _paged(text: str, pager: str, environ: Mapping[str, str]) -> bool:
    """Show TEXT by the shell command PAGER; False if there is no such command."""
    # As git does: quit if it fits, keep colours, leave the screen as it was.
    with_colors = {**environ, "LESS": environ.get("LESS", "FRX")}
    # The pager handles Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(["sh", "-c", pager], stdin=subprocess.PIPE, env=with_colors)  # noqa: S607
        process.communicate(text.encode(errors="surrogateescape"))
    finally:
        signal.signal(signal.SIGINT, before)
    # The shell's exit codes for a command that cannot be run.
    return process.returncode not in {126, 127}
