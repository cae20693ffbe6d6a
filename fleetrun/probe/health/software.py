"""The programs of PATH and the installed Paddles, by their files, for a check-up."""

# pathlib offers nothing more here, and paths arrive as texts.

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder

from fleetrun import __version__, modes
from fleetrun.doctor.facts import Build, Command, Software
from fleetrun.probe import paddles
from fleetrun.records import installed
from fleetrun.run import proc

_SETTING = re.compile(r"^(\w+)\s*=\s*'([^']*)'", re.MULTILINE)
# A class that Paddle's library has only with gloo.
_GLOO = b"ProcessGroupGloo\0"


def read(environ: Mapping[str, str], *, path: Sequence[str] = ()) -> Software:
    """Return ENVIRON's programs, and what our Python finds in PATH (default: its own)."""
    folders = path or sys.path
    return Software(
        python=sys.executable,
        python_version=platform.python_version(),
        prefix=sys.prefix,
        fleetrun=__version__,
        activated=environ.get("VIRTUAL_ENV", "") or environ.get("CONDA_PREFIX", ""),
        commands=tuple(_commands(environ.get("PATH", os.defpath))),
        build=_build(folders),
        packages=tuple(map(str, installed.paddles(folders))),
        has_setuptools=PathFinder.find_spec("setuptools", folders) is not None,
        protobuf=next((p.version for p in installed.packages(folders) if p.name == "protobuf"), ""),
        has_command=os.path.exists(os.path.join(sys.prefix, "bin", "fleetrun")),
        is_command_lost=installed.is_lost(sys.prefix),
    )


def _commands(path: str) -> Iterable[Command]:
    """Yield each distinct fleetrun on PATH."""
    known_paths = set()
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder, "fleetrun")
        if not (os.path.isfile(candidate) and os.access(candidate, os.X_OK)):
            continue
        real = os.path.realpath(candidate)
        if real in known_paths:
            continue
        known_paths.add(real)
        text = proc.content(candidate)
        kind = "paddle's" if installed.PADDLES in text else "other"
        if installed.OURS in text:
            kind = "ours"
        # The folder above bin, its environment.
        yield Command(candidate, kind, os.path.dirname(os.path.dirname(os.path.abspath(candidate))))


def _build(path: Sequence[str]) -> Build | None:
    """Return the Paddle that `import paddle` would find on PATH."""
    root, text = paddles.installed(path)
    if not root:
        return None
    reported = {
        name: "" if value in {"False", "0"} else value for name, value in _SETTING.findall(text)
    }
    parts: dict[str, bool] = {}
    constants = paddles.constants(root)
    if constants is not None:
        features = [mode.feature for mode in modes.MODES if mode.feature is not None]
        parts = {feature.name: feature.symbol in constants for feature in features}
        parts["gloo"] = _GLOO in constants
    return Build(
        version=reported.get("full_version", "?"),
        folder=root,
        cuda=reported.get("cuda_version", ""),
        cudnn=reported.get("cudnn_version", ""),
        nccl=reported.get("nccl_version", ""),
        parts=parts,
    )
