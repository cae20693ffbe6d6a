"""The Paddles that are installed, by the names of folders: `importlib.metadata` takes 60 ms."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FOLDER = re.compile(r"(paddlepaddle(?:[-_.]\w+)*)-([0-9][^-]*)\.dist-info", re.IGNORECASE)


class Package(NamedTuple):
    """An installed package that brings a Paddle: `name` as in `paddlepaddle-gpu`."""

    name: str
    version: str

    def __str__(self) -> str:
        """Return it as `paddlepaddle-gpu 3.3.1`."""
        return f"{self.name} {self.version}"


def paddles(path: Iterable[str]) -> Iterator[Package]:
    """Yield the Paddles in the folders of PATH, in its order."""
    for folder in dict.fromkeys(path):
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for name in sorted(entries):
            found = _FOLDER.fullmatch(name)
            if found:
                yield Package(found[1].lower().replace("_", "-"), found[2])


def paddle() -> Package | None:
    """Return the first of them for this Python."""
    return next(paddles(sys.path), None)
