"""Calls of the C library that Python does not offer."""

from __future__ import annotations

import ctypes

from fleetrun.run import proc

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

# None: what this process has loaded.
_libc = ctypes.CDLL(None)


def prctl(option: int, argument: int | bytes) -> None:
    """Set an attribute of this process; a kernel that does not know OPTION ignores it."""
    _libc.prctl(option, argument, 0, 0, 0)


def set_command(text: bytes) -> None:
    """Make `ps` show TEXT, as far as it fits, as this process's command line."""
    start, end = map(int, proc.fields("self")[45:47])
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)
