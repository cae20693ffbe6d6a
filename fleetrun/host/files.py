"""Small files and folders that may not exist."""

from __future__ import annotations

import os

from fleetrun.run import proc


def names(folder: str) -> tuple[str, ...]:
    """List FOLDER, sorted; empty if it does not exist."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def text(path: str) -> str:
    """Read a small text file; empty if that fails."""
    return proc.content(path).decode("ascii", errors="replace")
