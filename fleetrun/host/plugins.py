"""Signs that the ranks' Paddle has plug-ins for devices of their own; a plain launch has none.

Only Paddle knows their devices; `counted` asks it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.host import files, scripts
from fleetrun.model import Facts, Request
from fleetrun.plan import command, environment, kinds, origin

# Paddle looks for plug-ins in this folder beside its own.
_FOLDER = "paddle_custom_device"
# A longer first line does not name an interpreter.
_FIRST_LINE = 256


class Signs(NamedTuple):
    """The ranks' Python and variables, and the folder of its plug-ins ("" if there is none).

    `files` has the number of device files of each kind.
    """

    python: str
    environ: Mapping[str, str]
    root: str
    files: Mapping[str, int]


def find(request: Request, facts: Facts) -> Signs:
    """Look for signs on this host, of which FACTS have the device files."""
    shared = {**facts.environ, **dict(request.env)}
    environ = {name: text for name, text in shared.items() if not environment.is_identity(name)}
    python = _ranks_python(request, facts, environ)
    return Signs(python, environ, _root(python, environ), facts.device_counts)


def is_worth_asking(request: Request, signs: Signs) -> bool:
    """Whether Paddle may have devices that only it knows, and REQUEST may want them."""
    kind = request.device_kind
    if request.nproc_per_node == "cpu" or kind == "cpu":
        return False
    if request.backend == "gloo" and request.devices is None:
        return False
    has_files = any(kind not in kinds.BUILT_IN for kind in signs.files)
    return is_named(request) or signs.root != "" or has_files


def is_named(request: Request) -> bool:
    """Whether REQUEST names a kind that plug-ins provide, other than by an unknown option."""
    kind = request.device_kind
    if kind is None or kind in {"cpu", *kinds.BUILT_IN}:
        return False
    return kind in kinds.VENDORS or origin.is_given(request, "device_kind")


def libraries(folder: str) -> list[str]:
    """Return the plug-ins in FOLDER."""
    return [os.path.join(folder, name) for name in files.names(folder) if ".so" in name]


def _root(python: str, environ: Mapping[str, str]) -> str:
    """Return the folder of plug-ins that the Paddle of PYTHON loads; empty if there is none."""
    given = environ.get(kinds.ROOT)
    if given is not None:
        return given if libraries(given) else ""
    folders = (os.path.join(folder, _FOLDER) for folder in _packages(python))
    return next((folder for folder in folders if libraries(folder)), "")


def _packages(python: str) -> list[str]:
    """Return the folders with PYTHON's packages."""
    if python == sys.executable:
        return sys.path
    prefix = os.path.dirname(os.path.dirname(python))
    folders = []
    for lib in (os.path.join(prefix, "lib"), os.path.join(prefix, "local", "lib")):
        versions = [name for name in files.names(lib) if name.startswith("python3")]
        packages = ("site-packages", "dist-packages")
        folders += [os.path.join(lib, name, package) for name in versions for package in packages]
    return folders


def _ranks_python(request: Request, facts: Facts, environ: Mapping[str, str]) -> str:
    """Return the Python that runs the ranks, as far as their command tells."""
    if command.is_python(request.script):
        return facts.python
    program = facts.program or request.script.target
    # A shell script most likely says `python`.
    named = [program, _interpreter(program, facts.cwd)]
    pythons = [name for name in named if os.path.basename(name).startswith("python")]
    for name in pythons or ("python", "python3"):
        python = scripts.which(name, facts.cwd, environ)
        if python is not None:
            return python
    return facts.python


def _interpreter(program: str, cwd: str) -> str:
    """Return the interpreter in the first line of the script PROGRAM; empty if there is none."""
    try:
        with open(os.path.join(cwd, program), "rb") as file:
            first = file.readline(_FIRST_LINE).decode(errors="replace")
    except OSError:
        return ""
    words = first[2:].split() if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0] if words else ""
