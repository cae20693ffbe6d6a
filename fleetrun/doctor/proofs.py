"""Findings about Paddle's test computation on GPUs; pure."""

from __future__ import annotations

from collections.abc import Iterator

from fleetrun.doctor.facts import Build, GpuProof
from fleetrun.doctor.findings import Finding, error, ok, warning

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
