"""Checks of the programs on PATH, our Python and the installed Paddle, by their files."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder

from fleetrun import __version__
from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host import paddles
from fleetrun.host.nvml import Survey
from fleetrun.host.paddles import InstalledPaddle
from fleetrun.plan import modes
from fleetrun.run import proc
from fleetrun.rundir import installed

_INSTALL = "scripts/setup  # or pip install paddlepaddle-gpu of a fitting CUDA"


def command(job: CheckedJob, prefix: str = sys.prefix) -> Iterator[Finding]:
    """Check which `fleetrun` a shell starts; PREFIX is our environment."""
    check, paths = "fleetrun on PATH", _commands(job.environ.get("PATH", os.defpath))
    ours = f'export PATH="{prefix}/bin:$PATH"'
    if not paths:
        module = f"{sys.executable} -m fleetrun"
        fix = f"{module}  # or `{sys.executable} -m pip install FOLDER` of fleetrun"
        if installed.is_lost(prefix):
            fix = installed.mend(prefix)
        elif os.path.exists(os.path.join(prefix, "bin", "fleetrun")):
            fix = f"{ours}  # or `{module}`"
        yield warning(check, "there is none", "scripts that call `fleetrun` fail", fix)
        return
    first, *later = paths
    # The folder above bin, its environment.
    environment = os.path.dirname(os.path.dirname(os.path.abspath(first)))
    before = f", before {', '.join(later)}" if later else ""
    text = proc.content(first)
    if installed.PADDLES in text and installed.OURS not in text:
        yield error(
            check,
            f"the first is Paddle's own: {first}{before} (Paddle's wheel brings it, and overwrites "
            "ours when it is installed later)",
            "`fleetrun` starts Paddle's launcher, which ignores most options",
            installed.mend(prefix) if environment == prefix else ours,
        )
    elif later:
        yield warning(
            check,
            f"there are {len(paths)}: a shell starts {first}{before}",
            "an upgrade of one changes nothing for the other, and hosts may differ",
            "hash -r; type -a fleetrun  # remove the wrong one",
        )
    elif environment != prefix:
        seen = f"{first} is of another environment than this one ({prefix})"
        yield warning(check, seen, "what was checked here is not what `fleetrun` starts", ours)
    else:
        yield ok(check, f"{first}, version {__version__}")


def _commands(path: str) -> list[str]:
    """Return each distinct fleetrun in the folders of PATH."""
    paths: dict[str, str] = {}
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder, "fleetrun")
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            paths.setdefault(os.path.realpath(candidate), candidate)
    return list(paths.values())


def python(job: CheckedJob, prefix: str = sys.prefix) -> Iterator[Finding]:
    """Check that the activated environment is ours, PREFIX."""
    seen = f"{sys.executable}, {platform.python_version()}"
    activated = job.environ.get("VIRTUAL_ENV", "") or job.environ.get("CONDA_PREFIX", "")
    if not activated or activated.rstrip("/") == prefix.rstrip("/"):
        yield ok("Python", seen)
        return
    yield warning(
        "Python",
        f"{seen}, although {activated} is activated",
        "ranks run on the Python of fleetrun, without what is installed in the other",
        f"{activated}/bin/python -m pip install FOLDER  # of fleetrun; use that one",
    )


def paddle(job: CheckedJob, path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Check the Paddle in the folders of PATH (default: our Python's), and what it imports."""
    folders = sys.path if path is None else path
    paddles_here = list(installed.paddles(folders))
    if len({package.name for package in paddles_here}) > 1:
        yield error(
            "Paddle packages",
            f"{' and '.join(map(str, paddles_here))} are installed over each other",
            "their files are mixed; what runs is the one that was installed last, if any",
            "pip uninstall -y paddlepaddle paddlepaddle-gpu; pip install paddlepaddle-gpu",
        )
    gpus = () if job.driver is None else job.driver.gpus
    if job.paddle is None:
        yield warning(
            "Paddle",
            f"{sys.executable} has none",
            "scripts that import Paddle fail, unless --env gives them a PYTHONPATH",
            _INSTALL if gpus else f"{sys.executable} -m pip install paddlepaddle",
        )
        return
    yield _build(job, job.paddle)
    if PathFinder.find_spec("setuptools", path) is None:
        yield error(
            "setuptools",
            f"{sys.executable} has none (Python 3.12 and later no longer bring it)",
            "`import paddle` fails",
            f"{sys.executable} -m pip install setuptools",
        )
    names = {package.name: package.version for package in installed.packages(folders, "protobuf")}
    protobuf = names.get("protobuf", "")
    # Seen with 2.6.2, whose wheel does not limit it.
    if job.paddle.version.startswith("2.") and version(protobuf) >= (7, 0):
        yield error(
            "protobuf",
            f"{protobuf}, which Paddle {job.paddle.version} predates",
            "fleet.init and DistributedStrategy raise: a field \"has no attribute 'label'\"",
            f"{sys.executable} -m pip install 'protobuf>=4.21,<5'",
        )
    if job.paddle.cuda and job.driver is not None and job.driver.cuda is not None:
        yield _driver(job.paddle, job.driver, job.driver.cuda)


def _build(job: CheckedJob, build: InstalledPaddle) -> Finding:
    """Check that BUILD has what the job and the GPUs need."""
    libraries = [
        f"{name} {number}"
        for name, number in (("cuDNN", build.cudnn), ("NCCL", build.nccl))
        if number
    ]
    seen = f"{build.version} {f'for CUDA {build.cuda}' if build.cuda else 'for CPUs'}"
    seen += f" ({', '.join(libraries)})" if libraries else ""
    feature = modes.BY_WORD[job.request.run_mode].feature
    if feature is not None and paddles.lacks(build, feature.symbol):
        means = f"the job needs {feature.name}, which this build lacks"
        return error("Paddle", seen, means, "pip install paddlepaddle==2.6.2")
    if job.driver is not None and job.driver.gpus and not build.cuda:
        means = f"the {len(job.driver.gpus)} GPUs of this host stay idle"
        return error("Paddle", seen, means, f"{_INSTALL}; or --nproc_per_node=cpu")
    return ok("Paddle", seen)


def _driver(build: InstalledPaddle, driver: Survey, cuda: tuple[int, int]) -> Finding:
    """Check that DRIVER, which runs CUDA up to CUDA, is new enough for BUILD."""
    check, newest = "driver for Paddle", f"{cuda[0]}.{cuda[1]}"
    seen = f"driver {driver.driver} runs CUDA up to {newest}, Paddle was built with {build.cuda}"
    fix = f"install a newer driver, or a Paddle for CUDA {newest}: {_INSTALL}"
    if version(build.cuda)[0] > cuda[0]:
        return error(check, seen, "Paddle finds no usable GPU", fix)
    if version(build.cuda) > cuda:
        means = "it runs by CUDA's minor version compatibility; what is compiled later may not"
        return warning(check, seen, means, fix)
    return ok(check, seen)


def version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version.

    >>> version("12.9"), version("13"), version("")
    ((12, 9), (13, 0), (0, 0))
    """
    numbers = [int(part) for part in text.split(".") if part.isdigit()]
    major, minor, *_ = [*numbers, 0, 0]
    return major, minor
