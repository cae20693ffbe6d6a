"""Calls of the C library that Python does not offer."""

from __future__ import annotations

import ctypes
import os
import sys

from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
# Modes of `fallocate`: remove a range, or free its space and keep the file's length.
COLLAPSE_RANGE = 0x08
PUNCH_HOLE = 0x02 | 0x01

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int | bytes) -> None:
    """Set an attribute of this process; a kernel that does not know OPTION ignores it."""
    if isinstance(argument, bytes):
        _libc.prctl(option, ctypes.c_char_p(argument), 0, 0, 0)
    else:
        _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def set_command(text: bytes) -> None:
    """Make `ps` show TEXT, as far as it fits, as this process's command line."""
    with open("/proc/self/stat", "rb") as file:
        start, end = (int(word) for word in file.read().rpartition(b")")[2].split()[45:47])
    if start:
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Apply MODE to a range of the file FD; raises OSError if that is not supported."""
    if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def signalfd(signums: Iterable[int]) -> int:
    """Return a non-blocking signalfd for SIGNUMS, which must be blocked."""
    # A `sigset_t` of 1024 bits, the first for signal 1.
    mask = sum(1 << (signum - 1) for signum in signums).to_bytes(128, sys.byteorder)
    fd: int = _libc.signalfd(-1, ctypes.c_char_p(mask), os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd
