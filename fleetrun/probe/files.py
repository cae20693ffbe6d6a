"""Small files and folders that may not be there."""

from __future__ import annotations

import os

from fleetrun.run import proc


def names(folder: str) -> tuple[str, ...]:
    """List what FOLDER holds, in order; nothing if it is not there."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def text(path: str) -> str:
    """Read a small file's text; nothing if it cannot be read."""
    return proc.content(path).decode("ascii", errors="replace")
