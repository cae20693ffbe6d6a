"""File systems of their own in tests, for root."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def mounted(folder: Path, kind: str, options: str = "rw") -> Iterator[Path]:
    """Mount a new file system of KIND in FOLDER, which may be missing."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
