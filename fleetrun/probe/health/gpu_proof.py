"""Lets Paddle compute on GPUs, in processes that may crash or hang, and reads the results."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence

from fleetrun.doctor.facts import GpuFailure, GpuProof
from fleetrun.postmortem import causes

_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.join(_FOLDER, "inject", "compute_check.py")
# The program has its own timeout for each check.
_TIMEOUT_S = 400.0


def read(python: str, words: Sequence[str], environ: Mapping[str, str]) -> GpuProof:
    """Let the Paddle of PYTHON compute on the GPUs WORDS, numbered as in CUDA."""
    proof = GpuProof(tuple(words), program=PROGRAM)
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
        return proof._replace(trouble=str(error))
    try:
        report = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return proof._replace(trouble=last[0])
    failed = report["failed"]
    cause = None if failed is None else causes.recognise(failed["words"])
    return proof._replace(
        devices=tuple(report["devices"]),
        libraries=tuple((name, package) for name, package in report["libraries"]),
        failure=None
        if failed is None
        else GpuFailure(**failed, meaning="" if cause is None else cause.sentence),
    )
