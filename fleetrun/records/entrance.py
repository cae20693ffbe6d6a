"""Redirects other programs' launches to us: the options of `fleetrun exec`, its .pth file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault
from fleetrun.records.variables import EXEC_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "fleetrun-exec.pth"
_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "entrance")
# Every Python of the environment runs this when it starts. It imports nothing of fleetrun before it
# is needed; and a fault, such as a removed fleetrun, must not disturb that Python.
_SOURCE = """
def load():
    sys.path.insert(0, {folder!r})
    try:
        import _fleetrun_entrance
        _fleetrun_entrance.begin()
    except Exception:
        pass
class Wait:
    def find_spec(self, name, path=None, target=None):
        if name == "paddle.distributed":
            sys.meta_path = [each for each in sys.meta_path if each is not self]
            load()
words = getattr(sys, "orig_argv", ["paddle.distributed"])
if any("paddle.distributed" in word or word[-8:] == "fleetrun" for word in words):
    load()
else:
    sys.meta_path.insert(0, Wait())
"""


def options(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that `fleetrun exec` was given, as words of a command line."""
    text = environ.get(EXEC_OPTIONS)
    if not text:
        return ()
    import json  # few launches are below `fleetrun exec`

    words = json.loads(text)
    return tuple(map(str, words))


def path() -> str:
    """Return the path of the .pth file in this Python's environment."""
    import sysconfig  # it loads threading from Python 3.13 on

    return os.path.join(sysconfig.get_path("purelib"), _NAME)


def installed() -> tuple[str, bool]:
    """Return the .pth file in this Python's environment (empty: none), and whether it is ours."""
    try:
        with open(path(), encoding="utf-8") as stream:
            return path(), repr(_FOLDER) in stream.read().replace("\\'", "'")
    except OSError:
        return "", False


def install() -> str:
    """Write the .pth file and return its path; raises EnvironmentFault if that fails."""
    file = path()
    try:
        with open(file, "w", encoding="utf-8") as stream:
            source = _SOURCE.format(folder=_FOLDER)
            stream.write(f"import sys; exec({source!r}, {{'sys': sys}})\n")
    except OSError as error:
        raise EnvironmentFault(f"exec: {file} cannot be written ({error.strerror}).") from None
    _record(file)
    return file


def uninstall() -> str | None:
    """Remove the .pth file and return its path; None if there is none."""
    file = path()
    try:
        os.unlink(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnvironmentFault(f"exec: {file} cannot be removed ({error.strerror}).") from None
    return file


def _record(file: str) -> None:
    """Add FILE to pip's record of fleetrun, so that `pip uninstall` removes it, too."""
    from importlib import metadata  # only to install

    try:
        files = metadata.distribution("fleetrun").files or ()
    except metadata.PackageNotFoundError:
        # It runs from a checkout, which pip does not know.
        return
    name = os.path.basename(file)
    for record in files:
        if record.name != "RECORD":
            continue
        with open(record.locate(), "r+", encoding="utf-8") as stream:
            if not any(line.startswith(f"{name},") for line in stream):
                stream.write(f"{name},,\n")
