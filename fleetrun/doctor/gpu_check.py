"""Checks that Paddle computes on the job's GPUs, in processes that may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.plan import devices
from fleetrun.postmortem import causes

_CHECK = "Paddle on the GPUs"
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.path.join(_FOLDER, "inject", "compute_check.py")
# The program has its own timeout for each check.
_TIMEOUT_S = 400.0
# The consequences of a missing library.
_ENDS = {
    "libnccl": "training on several GPUs ends at its start",
    "libcudnn": "the first convolution ends the job",
}
_SUM = "sum of the ranks"


def check(job: CheckedJob) -> Iterator[Finding]:
    """Let Paddle compute on at most two of the job's GPUs, if it can use any."""
    if job.kind != "gpu" or not job.devices or job.paddle is None or not job.paddle.cuda:
        return
    if job.cuda is None or job.cuda.trouble or job.cuda.code:
        return
    if job.log is not None:
        job.log("Trying Paddle on the GPUs, which takes some seconds.")
    # With several instances (MIG) CUDA shows only one to a process.
    gpus = job.devices[: 1 if any(gpu.startswith("MIG-") for gpu in job.devices) else 2]
    environ = {
        devices.ORDER: devices.DRIVERS_ORDER,
        **job.variables,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    yield from compute(sys.executable, [str(place) for place in range(len(gpus))], environ)


def compute(python: str, words: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Let the Paddle of PYTHON compute on the GPUs WORDS, numbered as in CUDA, and judge it."""
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
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        report: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as trouble:
        yield _untried(str(trouble), python)
    except ValueError:
        yield _untried(last[0], python)
    else:
        yield from judge(report, python)


def _untried(trouble: str, python: str) -> Finding:
    means = "only a training will show whether it works"
    return warning(_CHECK, f"the test could not run: {trouble}", means, f"{python} {PROGRAM}")


def judge(report: Mapping[str, Any], python: str) -> Iterator[Finding]:
    """Judge the REPORT of the program, run by PYTHON."""
    libraries, gpus, failure = report["libraries"], report["devices"], report["failed"]
    command = f"{python} {PROGRAM}"
    for library, package in libraries:
        fix = f"find / -name '{library}*' 2>/dev/null  # put its folder into LD_LIBRARY_PATH"
        if package:
            fix = f"{python} -m pip install '{package}' && {command} --link"
        means = _ENDS.get(library.partition(".so")[0], "code that needs it ends the job")
        yield error("Paddle's libraries", f"Paddle needs {library}, which is missing", means, fix)
    if failure is None:
        if not libraries:
            computed = "a product, a convolution"
            computed += f" and a sum of {len(gpus)} ranks" if gpus[1:] else ""
            yield ok(_CHECK, f"{computed} on {', '.join(gpus)}")
        return
    words, step = failure["words"], failure["step"]
    if any(library in words for library, _ in libraries):
        return
    cause = causes.recognise(words)
    last = words.strip().splitlines()[-1:] or ["no output"]
    means, fix = "training fails there, too", f"{command}  # shows its output"
    if step == _SUM:
        means = "training on several GPUs does not work"
        fix = "--env NCCL_P2P_DISABLE=1  # does it work then? And --env NCCL_DEBUG=INFO says more"
    seen = f"{step} on {failure['device']} {failure['how']}: {last[0]}"
    yield error(_CHECK, seen, means if cause is None else cause.sentence, fix)
