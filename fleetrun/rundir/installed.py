"""The installed Paddles, by folder names, and the owner of the `fleetrun` command.

`importlib.metadata` takes 60 ms.
"""

from __future__ import annotations

import os
import sys
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


def packages(path: Iterable[str], begin: str = "") -> Iterator[Package]:
    """Yield what pip installed in the folders of PATH, in its order, with names that have BEGIN."""
    for folder in dict.fromkeys(path):
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for name in sorted(name for name in entries if name.lower().startswith(begin)):
            # Without a regular expression: compiling one takes longer than this.
            stem, ending = os.path.splitext(name)
            package, _, version = stem.rpartition("-")
            if ending.lower() == ".dist-info" and version[:1].isdecimal():
                yield Package(package.lower().replace("_", "-").replace(".", "-"), version)


def paddles(path: Iterable[str]) -> Iterator[Package]:
    """Yield the packages in the folders of PATH that contain a Paddle."""
    return (
        package
        for package in packages(path, "paddle")
        if f"{package.name}-".startswith("paddlepaddle-")
    )


def paddle() -> Package | None:
    """Return the package of this Python's Paddle."""
    return next(paddles(sys.path), None)


def taken_command(prefix: str) -> str | None:
    """Return a line about the `fleetrun` of the environment PREFIX if it is Paddle's, or missing.

    The package that was installed last owns that name, and `pip uninstall` of Paddle deletes it,
    whosever it is. `fleetrunx` is the same script under a name that no Paddle brings, so a copy of
    it mends the other, without a network.
    """
    command = os.path.join(prefix, "bin", "fleetrun")
    try:
        with open(command, "rb") as file:
            # Without the other, there is nothing to copy.
            if PADDLES not in file.read(4096) or not os.path.exists(f"{command}x"):
                return None
        fault = "is Paddle's launcher now"
    except OSError:
        if not is_lost(prefix):
            return None
        fault = "is missing, as after an uninstalled Paddle"
    return f"{command} {fault}. To get the name back: {mend(prefix)}"


def is_lost(prefix: str) -> bool:
    """Whether the environment PREFIX has `fleetrunx` but no `fleetrun`."""
    folder = os.path.join(prefix, "bin")
    spare, command = (
        os.path.exists(os.path.join(folder, name)) for name in ("fleetrunx", "fleetrun")
    )
    return spare and not command


def mend(prefix: str) -> str:
    """Return the command that makes the `fleetrun` of the environment PREFIX ours again."""
    folder = quote(os.path.join(prefix, "bin"))
    return f"cp {folder}/fleetrunx {folder}/fleetrun"
