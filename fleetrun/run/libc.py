"""Calls of the C library that Python does not offer."""

from __future__ import annotations

import _ctypes  # `ctypes` takes 3 ms to import, this one a half
import os
from contextlib import suppress

from fleetrun.run import proc

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

# None: what this process has loaded.
_loaded = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
_prctl = _ctypes.dlsym(_loaded, "prctl")


def prctl(option: int, argument: int | bytes) -> None:
    """Set an attribute of this process; a kernel that does not know OPTION ignores it."""
    _ctypes.call_function(_prctl, (option, argument, 0, 0, 0))


def set_command(text: bytes) -> None:
    """Make `ps` show TEXT, as far as it fits, as this process's command line.

    Nothing changes if the kernel does not let a process write its own memory this way.
    """
    start, end = map(int, proc.content("/proc/self/stat").rpartition(b")")[2].split()[45:47])
    with suppress(OSError):
        # The first rank waits for this, and Python's own files take half as long again.
        memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(memory, text[: end - start - 1].ljust(end - start, b"\0"), start)
        finally:
            os.close(memory)
