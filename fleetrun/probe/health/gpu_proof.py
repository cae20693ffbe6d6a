"""Lets Paddle compute on GPUs, in processes that may crash or hang, and reads what came of it."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

from fleetrun.doctor.facts import GpuFailure, GpuProof
from fleetrun.postmortem import causes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.join(_FOLDER, "inject", "compute_check.py")
# The program has its own, for each question.
_TIMEOUT_S = 400.0


def read(python: str, words: Sequence[str], environ: Mapping[str, str]) -> GpuProof:
    """Return what the Paddle of PYTHON did on the GPUs WORDS, numbers in the order of CUDA."""
    asked = GpuProof(tuple(words), program=PROGRAM)
    try:
        done = subprocess.run(
            [python, PROGRAM, *words],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return asked._replace(trouble=str(error))
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return asked._replace(trouble=last[0])
    failed = found["failed"]
    known = None if failed is None else causes.recognise(failed["words"])
    return asked._replace(
        devices=tuple(found["devices"]),
        libraries=tuple((name, package) for name, package in found["libraries"]),
        failure=None
        if failed is None
        else GpuFailure(**failed, meaning="" if known is None else known.sentence),
    )
