"""Files of the run directory that a training process writes as a whole."""

from __future__ import annotations

import os


def write(path: str, text: str) -> None:
    """Let TEXT appear as the file PATH in one step, or raise OSError."""
    draft = f"{path}.{os.getpid()}"
    # Private from the first byte, and never through a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)
