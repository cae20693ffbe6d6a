"""Identifies the script or program of a job, so that hosts can prove to have it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from fleetrun.errors import FleetrunError
from fleetrun.host import scripts
from fleetrun.model import Script
from fleetrun.plan.command import CHECK, is_python

# How much of a digest is shown.
_DIGITS = 12
# How much of a file is read; larger ones also differ in size.
_MOST_READ = 64 << 20


def identity(script: Script, cwd: str, environ: Mapping[str, str]) -> str:
    """Return what identifies the files of SCRIPT; empty if they cannot be read."""
    if script.target == CHECK:
        return CHECK
    try:
        return "\0".join(map(_digest_of, _files(script, cwd, environ))) or script.target
    except (FleetrunError, OSError):
        return ""


def _files(script: Script, cwd: str, environ: Mapping[str, str]) -> list[str]:
    """Return the files that SCRIPT runs, as far as that is known in advance."""
    if script.form != "file":
        here = os.path.join(cwd, script.target.replace(".", "/"))
        return [path for path in (f"{here}.py", f"{here}/__main__.py") if os.path.isfile(path)]
    paths = [os.path.join(cwd, scripts.find(script, cwd, environ) or "")]
    if not is_python(script) and script.args:
        # If the program is a shell, its first argument is the script.
        first = os.path.join(cwd, script.args[0])
        paths += [first] if os.path.isfile(first) else []
    return paths


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return hashlib.sha256(b"%d\0" % size + file.read(_MOST_READ)).hexdigest()


def digest(text: str) -> str:
    """Return a short digest of TEXT."""
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGITS]
