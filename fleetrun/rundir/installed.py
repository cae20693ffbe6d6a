"""The installed Paddles, for which `importlib.metadata` takes 60 ms, and whose `fleetrun` is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from shlex import quote
from typing import NamedTuple

# The scripts that pip writes hold the module they call; both launchers have theirs.
OURS, PADDLES = b"fleetrun.__main__", b"paddle.distributed"


class Package(NamedTuple):
    """An installed package: `name` as in `paddlepaddle-gpu`."""

    name: str
    version: str

    def __str__(self) -> str:
        """Return it as `paddlepaddle-gpu 3.3.1`."""
        return f"{self.name} {self.version}"


def packages(path: Iterable[str], begin: str) -> Iterator[Package]:
    """Yield what pip installed in the folders of PATH, in its order, with names that have BEGIN."""
    for folder in dict.fromkeys(path):
        for name in sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else ():
            package, _, version = name.removesuffix(".dist-info").rpartition("-")
            if name.lower().startswith(begin) and name.endswith(".dist-info"):
                yield Package(package.lower().replace("_", "-"), version)


def paddles(path: Iterable[str]) -> Iterator[Package]:
    """Yield the packages in the folders of PATH that contain a Paddle."""
    names = packages(path, "paddlepaddle")
    return (package for package in names if f"{package.name}-".startswith("paddlepaddle-"))


def is_lost(prefix: str) -> bool:
    """Whether the environment PREFIX has `fleetrunx` but no `fleetrun`."""
    command = os.path.join(prefix, "bin", "fleetrun")
    return os.path.exists(f"{command}x") and not os.path.exists(command)


def mend(prefix: str) -> str:
    """Return the command that makes the `fleetrun` of the environment PREFIX ours again."""
    folder = quote(os.path.join(prefix, "bin"))
    return f"cp {folder}/fleetrunx {folder}/fleetrun"
