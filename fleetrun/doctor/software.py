"""Checks of the programs on PATH and the installed Paddle, by their files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder

from fleetrun import __version__
from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host import paddles
from fleetrun.plan import modes
from fleetrun.run import proc
from fleetrun.rundir import installed

_INSTALL = "scripts/setup  # or pip install paddlepaddle-gpu of a fitting CUDA"


def command(job: CheckedJob, prefix: str = sys.prefix) -> Iterator[Finding]:
    """Check which `fleetrun` a shell starts; PREFIX is our environment."""
    check, first = "fleetrun on PATH", shutil.which("fleetrun", path=job.environ.get("PATH"))
    ours = f'export PATH="{prefix}/bin:$PATH"  # or {sys.executable} -m fleetrun'
    if first is None:
        fix = installed.mend(prefix) if installed.is_lost(prefix) else ours
        yield warning(check, "there is none", "scripts that call `fleetrun` fail", fix)
        return
    # The folder above bin, its environment.
    environment = os.path.dirname(os.path.dirname(os.path.abspath(first)))
    text = proc.content(first)
    if installed.PADDLES in text and installed.OURS not in text:
        yield error(
            check,
            f"the first is Paddle's own: {first} (Paddle's wheel brings it, and overwrites ours "
            "when it is installed later)",
            "`fleetrun` starts Paddle's launcher, which ignores most options",
            installed.mend(prefix) if environment == prefix else ours,
        )
    elif environment != prefix:
        seen = f"{first} is of another environment than this one ({prefix})"
        yield warning(check, seen, "what was checked here is not what `fleetrun` starts", ours)
    else:
        yield ok(check, f"{first}, version {__version__}")


def paddle(job: CheckedJob, path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Check the Paddle in the folders of PATH (default: our Python's), and what it imports."""
    folders = sys.path if path is None else path
    pip, build, driver = f"{sys.executable} -m pip install", job.paddle, job.driver
    packages = list(installed.paddles(folders))
    if len({package.name for package in packages}) > 1:
        yield error(
            "Paddle packages",
            f"{' and '.join(map(str, packages))} are installed over each other",
            "their files are mixed; what runs is the one that was installed last, if any",
            "pip uninstall -y paddlepaddle paddlepaddle-gpu; pip install paddlepaddle-gpu",
        )
    if build is None:
        means = "scripts that import Paddle fail, unless --env gives them a PYTHONPATH"
        yield warning("Paddle", f"{sys.executable} has none", means, _INSTALL)
        return
    seen = f"{build.version} {f'for CUDA {build.cuda}' if build.cuda else 'for CPUs'}"
    feature = modes.BY_WORD[job.request.run_mode].feature
    if feature is not None and paddles.lacks(build, feature.symbol):
        means = f"the job needs {feature.name}, which this build lacks"
        yield error("Paddle", seen, means, "pip install paddlepaddle==2.6.2")
    elif driver is not None and driver.gpus and not build.cuda:
        means = f"the {len(driver.gpus)} GPUs of this host stay idle"
        yield error("Paddle", seen, means, f"{_INSTALL}; or --nproc_per_node=cpu")
    else:
        yield ok("Paddle", seen)
    if PathFinder.find_spec("setuptools", path) is None:
        seen = f"{sys.executable} has none (Python 3.12 and later no longer bring it)"
        yield error("setuptools", seen, "`import paddle` fails", f"{pip} setuptools")
    names = {package.name: package.version for package in installed.packages(folders, "protobuf")}
    protobuf = names.get("protobuf", "")
    # Seen with 2.6.2, whose wheel does not limit it.
    if build.version.startswith("2.") and version(protobuf) >= (7, 0):
        yield error(
            "protobuf",
            f"{protobuf}, which Paddle {build.version} predates",
            "fleet.init and DistributedStrategy raise: a field \"has no attribute 'label'\"",
            f"{pip} 'protobuf>=4.21,<5'",
        )
    newest = None if driver is None else driver.cuda
    if driver is not None and newest is not None and version(build.cuda)[0] > newest[0]:
        yield error(
            "driver for Paddle",
            f"driver {driver.driver} runs CUDA up to {newest[0]}.{newest[1]}, Paddle was built "
            f"with {build.cuda}",
            "Paddle finds no usable GPU",
            f"install a newer driver, or a Paddle for CUDA {newest[0]}: {_INSTALL}",
        )


def version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version.

    >>> version("12.9"), version("13"), version("")
    ((12, 9), (13, 0), (0, 0))
    """
    numbers = [int(part) for part in text.split(".") if part.isdigit()]
    major, minor, *_ = [*numbers, 0, 0]
    return major, minor
