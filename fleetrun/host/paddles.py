"""The Paddle that is installed, by its files: importing it would take seconds."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from fleetrun.run import proc

_LIBRARIES = ("base/libpaddle.so", "fluid/libpaddle.so")
_SETTING = re.compile(r"^(\w+)\s*=\s*'([^']*)'", re.MULTILINE)


class InstalledPaddle(NamedTuple):
    """An installed Paddle; its versions of CUDA and so on are "" if it was built without."""

    version: str
    folder: str
    cuda: str = ""
    hip: str = ""


def find(path: Sequence[str]) -> InstalledPaddle | None:
    """Return the Paddle that `import paddle` would find on PATH."""
    for folder in path:
        root = os.path.join(folder, "paddle")
        text = proc.content(os.path.join(root, "version", "__init__.py")).decode(errors="replace")
        if text:
            told = dict(_SETTING.findall(text))
            has = {name: "" if value in {"False", "0"} else value for name, value in told.items()}
            return InstalledPaddle(
                version=told.get("full_version", "?"),
                folder=root,
                cuda=has.get("cuda_version", ""),
                hip=has.get("hip_version", ""),
            )
    return None


def lacks(paddle: InstalledPaddle, symbol: bytes) -> bool:
    """Whether the library of PADDLE certainly lacks the text SYMBOL."""
    paths = [os.path.join(paddle.folder, name) for name in _LIBRARIES]
    path = next(filter(os.path.exists, paths), "")
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(symbol) < 0
    except (OSError, ValueError):
        return False
