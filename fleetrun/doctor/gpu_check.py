"""A test computation of Paddle on the GPUs, in processes that may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.doctor.software import Build
from fleetrun.postmortem import causes


class GpuFailure(NamedTuple):
    """Where a test computation failed: device, step, how it ended, and its last words."""

    device: str
    step: str
    how: str
    words: str
    # A known explanation of these words; empty: none.
    meaning: str = ""


class GpuProof(NamedTuple):
    """A test computation of Paddle: the libraries it could not load, and its first failure.

    `trouble` says why there was none.
    """

    devices: tuple[str, ...]
    # Each with the pip package that contains it; empty: none.
    libraries: tuple[tuple[str, str], ...] = ()
    failure: GpuFailure | None = None
    trouble: str = ""
    # The program that did it, which can also link libraries.
    program: str = ""


_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
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


_CHECK = "Paddle on the GPUs"
# The consequences of a missing library.
_ENDS = {
    "libnccl": "training on several GPUs ends at its start",
    "libcudnn": "the first convolution ends the job",
}
_SUM = "sum of the ranks"


def judge(proof: GpuProof, build: Build, python: str) -> Iterator[Finding]:
    """Yield the findings of PROOF about BUILD, the Paddle of PYTHON."""
    if proof.trouble:
        yield warning(
            _CHECK,
            f"the test could not run: {proof.trouble}",
            "only a training will show whether it works",
            f"{python} {proof.program}",
        )
        return
    for library, package in proof.libraries:
        yield _library(library, package, build, f"{python} {proof.program}")
    failure = proof.failure
    if failure is None:
        if not proof.libraries:
            computed = "a product, a convolution"
            computed += f" and a sum of {len(proof.devices)} ranks" if proof.devices[1:] else ""
            yield ok(_CHECK, f"{computed} on {', '.join(proof.devices)}")
        return
    if any(library in failure.words for library, _ in proof.libraries):
        return
    last = failure.words.strip().splitlines()[-1:] or ["no output"]
    means = failure.meaning or "training fails there, too"
    fix = f"{python} {proof.program}  # shows its output"
    if failure.step == _SUM:
        means = failure.meaning or "training on several GPUs does not work"
        fix = "--nccl P2P_DISABLE=1  # does it work then? And --nccl DEBUG=INFO says more"
    yield error(_CHECK, f"{failure.step} on {failure.device} {failure.how}: {last[0]}", means, fix)


def _library(library: str, package: str, build: Build, command: str) -> Finding:
    """Return the finding that LIBRARY is missing, with the command that installs and links it."""
    python = command.partition(" ")[0]
    fix = f"find / -name '{library}*' 2>/dev/null  # put its folder into LD_LIBRARY_PATH"
    if package:
        fix = f"{python} -m pip install '{package}' && {command} --link"
    return error(
        "Paddle's libraries",
        f"Paddle {build.version} needs {library}, which is not found here",
        _ENDS.get(library.partition(".so")[0], "code that needs it ends the job"),
        fix,
    )
