"""Checks of the programs on PATH, our Python and the installed Paddle, by their files."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import NamedTuple

from fleetrun import __version__
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.doctor.nvidia import Gpu, Gpus
from fleetrun.host import paddles
from fleetrun.plan import modes
from fleetrun.run import proc
from fleetrun.rundir import installed


class Command(NamedTuple):
    """A program on PATH: `kind` is ours, paddle's or other; `prefix` is its environment."""

    path: str
    kind: str
    prefix: str = ""


class Build(NamedTuple):
    """An installed Paddle, by its files."""

    version: str
    folder: str
    # The versions it was built with; empty: without.
    cuda: str = ""
    cudnn: str = ""
    nccl: str = ""
    # Parts that some builds lack -> whether this one has them; absent: unknown.
    parts: Mapping[str, bool] = {}


class Software(NamedTuple):
    """The programs of a host: our Python, those on PATH, and the installed Paddles."""

    python: str
    python_version: str
    prefix: str
    fleetrun: str
    # The environment that is activated ($VIRTUAL_ENV, $CONDA_PREFIX); empty: none.
    activated: str
    # In the order of PATH.
    commands: tuple[Command, ...]
    # None: no Paddle is installed for our Python.
    build: Build | None
    # Installed packages that contain Paddle: paddlepaddle, paddlepaddle-gpu.
    packages: tuple[str, ...] = ()
    # Paddle imports setuptools and its wheels do not always bring it; the version of protobuf
    # (empty: unknown).
    has_setuptools: bool = True
    protobuf: str = ""
    # Whether the environment has a `fleetrun`; or just `fleetrunx`, as after an uninstalled Paddle.
    has_command: bool = True
    is_command_lost: bool = False


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
        commands=tuple(_programs(environ.get("PATH", os.defpath))),
        build=_build(folders),
        packages=tuple(map(str, installed.paddles(folders))),
        has_setuptools=PathFinder.find_spec("setuptools", folders) is not None,
        protobuf=next((p.version for p in installed.packages(folders) if p.name == "protobuf"), ""),
        has_command=os.path.exists(os.path.join(sys.prefix, "bin", "fleetrun")),
        is_command_lost=installed.is_lost(sys.prefix),
    )


def _programs(path: str) -> Iterable[Command]:
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


# The first CUDA version with support for a compute capability, newest first; from the release notes
# of the CUDA toolkits.
_FIRST_CUDA = (
    ((10, 0), (12, 8)),
    ((8, 9), (11, 8)),
    ((8, 6), (11, 1)),
    ((8, 0), (11, 0)),
    ((7, 5), (10, 0)),
    ((7, 0), (9, 0)),
)
# The oldest compute capability that a major version of CUDA supports; same source.
_OLDEST_GPU = {13: (7, 5), 12: (5, 0), 11: (3, 5)}
_INSTALL = "scripts/setup  # or pip install paddlepaddle-gpu of a fitting CUDA"


def judge(
    software: Software, gpus: Gpus, *, feature: str | None = None, is_proven: bool = False
) -> Iterator[Finding]:
    """Yield the findings about SOFTWARE with GPUS; the job needs the part FEATURE of Paddle.

    IS_PROVEN: its kernels have run on these GPUs.
    """
    yield from _commands(software)
    yield _python(software)
    yield from _packages(software.packages)
    build = software.build
    if build is None:
        yield warning(
            "Paddle",
            f"{software.python} has none",
            "scripts that import Paddle fail, unless --env gives them a PYTHONPATH",
            _INSTALL if gpus.gpus else f"{software.python} -m pip install paddlepaddle",
        )
        return
    yield _paddle(build, gpus, feature)
    yield from _imports(software, build)
    if build.cuda and gpus.cuda is not None:
        yield _driver(build, gpus.driver, gpus.cuda)
    if build.cuda and not is_proven:
        yield from _capabilities(build, gpus.gpus)
    if build.parts.get("gloo") is False:
        yield error(
            "gloo",
            f"the Paddle {build.version} here was built without it",
            "ranks on CPUs cannot talk to each other",
            "pip install --force-reinstall paddlepaddle",
        )


def _commands(software: Software) -> Iterator[Finding]:
    """Yield the findings about the fleetrun that a shell starts."""
    check = "fleetrun on PATH"
    commands = software.commands
    if not commands:
        yield warning(
            check,
            "there is none",
            "scripts that call `fleetrun` fail",
            _way_to_command(software),
        )
        return
    first = commands[0]
    later = ", ".join(command.path for command in commands[1:])
    if first.kind == "paddle's":
        yield error(
            check,
            f"the first is Paddle's own: {first.path}"
            + (f", before {later}" if later else "")
            + " (Paddle's wheel brings it, and overwrites ours when it is installed later)",
            "`fleetrun` starts Paddle's launcher, which ignores most options",
            installed.mend(first.prefix)
            if first.prefix == software.prefix
            else f'export PATH="{software.prefix}/bin:$PATH"',
        )
    elif len(commands) > 1:
        yield warning(
            check,
            f"there are {len(commands)}: a shell starts {first.path}, before {later}",
            "an upgrade of one changes nothing for the other, and hosts may differ",
            "hash -r; type -a fleetrun  # remove the wrong one",
        )
    elif first.prefix != software.prefix:
        yield warning(
            check,
            f"{first.path} is of another environment than this one ({software.prefix})",
            "what was checked here is not what `fleetrun` starts",
            f'export PATH="{software.prefix}/bin:$PATH"',
        )
    else:
        yield ok(check, f"{first.path}, version {software.fleetrun}")


def _way_to_command(software: Software) -> str:
    if software.is_command_lost:
        return installed.mend(software.prefix)
    module = f"{software.python} -m fleetrun"
    if software.has_command:
        return f'export PATH="{software.prefix}/bin:$PATH"  # or `{module}`'
    return f"{module}  # or `{software.python} -m pip install FOLDER` of fleetrun"


def _python(software: Software) -> Finding:
    seen = f"{software.python}, {software.python_version}"
    if software.activated and software.activated.rstrip("/") != software.prefix.rstrip("/"):
        return warning(
            "Python",
            f"{seen}, although {software.activated} is activated",
            "ranks run on the Python of fleetrun, without what is installed in the other",
            f"{software.activated}/bin/python -m pip install FOLDER  # of fleetrun; use that one",
        )
    return ok("Python", seen)


def _packages(packages: Sequence[str]) -> Iterator[Finding]:
    if len({package.partition(" ")[0] for package in packages}) > 1:
        listed = " and ".join(packages)
        yield error(
            "Paddle packages",
            f"{listed} are installed over each other",
            "their files are mixed; what runs is the one that was installed last, if any",
            "pip uninstall -y paddlepaddle paddlepaddle-gpu; pip install paddlepaddle-gpu",
        )


def _paddle(build: Build, gpus: Gpus, feature: str | None) -> Finding:
    kind = f"for CUDA {build.cuda}" if build.cuda else "for CPUs"
    has = [name for name, is_there in build.parts.items() if is_there]
    libraries = [
        f"{name} {number}"
        for name, number in (("cuDNN", build.cudnn), ("NCCL", build.nccl))
        if number
    ]
    seen = f"{build.version} {kind}"
    seen += f" ({', '.join([*libraries, *has])})" if libraries or has else ""
    if feature is not None and build.parts.get(feature) is False:
        means = f"the job needs {feature}, which this build lacks"
        return error("Paddle", seen, means, "pip install paddlepaddle==2.6.2")
    if gpus.gpus and not build.cuda:
        means = f"the {len(gpus.gpus)} GPUs of this host stay idle"
        return error("Paddle", seen, means, f"{_INSTALL}; or --nproc_per_node=cpu")
    return ok("Paddle", seen)


def _imports(software: Software, build: Build) -> Iterator[Finding]:
    """Yield what Paddle imports and its wheel does not ask pip for; seen with 2.6.2 and 3.3.1."""
    if not software.has_setuptools:
        yield error(
            "setuptools",
            f"{software.python} has none (Python 3.12 and later no longer bring it)",
            "`import paddle` fails",
            f"{software.python} -m pip install setuptools",
        )
    major = software.protobuf.partition(".")[0]
    if build.version.startswith("2.") and major.isdecimal() and int(major) >= 7:
        yield error(
            "protobuf",
            f"{software.protobuf}, which Paddle {build.version} predates",
            "fleet.init and DistributedStrategy raise: a field \"has no attribute 'label'\"",
            f"{software.python} -m pip install 'protobuf>=4.21,<5'",
        )


def _driver(build: Build, driver: str, cuda: tuple[int, int]) -> Finding:
    check = "driver for Paddle"
    built_with = version(build.cuda)
    newest = f"{cuda[0]}.{cuda[1]}"
    seen = f"driver {driver} runs CUDA up to {newest}, Paddle was built with {build.cuda}"
    fix = f"install a newer driver, or a Paddle for CUDA {newest}: {_INSTALL}"
    if built_with[0] > cuda[0]:
        return error(check, seen, "Paddle finds no usable GPU", fix)
    if built_with > cuda:
        means = "it runs by CUDA's minor version compatibility; what is compiled later may not"
        return warning(check, seen, means, fix)
    return ok(check, seen)


def _capabilities(build: Build, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield whether the CUDA of BUILD supports each kind of GPU."""
    cuda = version(build.cuda)
    for name, capability in dict.fromkeys((gpu.name, gpu.capability) for gpu in gpus):
        if capability is None:
            continue
        check = "Paddle for this GPU"
        major, minor = capability
        seen = f"{name} has compute capability {major}.{minor}, Paddle was built with {build.cuda}"
        first = next((need for least, need in _FIRST_CUDA if capability >= least), (0, 0))
        if cuda < first:
            needed = f"{first[0]}.{first[1]}"
            means = f"its kernels do not run there: that takes CUDA {needed} or newer"
            yield error(check, seen, means, _INSTALL)
        elif capability < _OLDEST_GPU.get(cuda[0], (0, 0)):
            means = f"its kernels do not run there: CUDA {cuda[0]} has left such GPUs behind"
            yield error(check, seen, means, _INSTALL)
        else:
            yield ok(check, seen)


def version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version.

    >>> version("12.9"), version("13"), version("")
    ((12, 9), (13, 0), (0, 0))
    """
    numbers = [int(part) for part in text.split(".") if part.isdigit()]
    major, minor, *_ = [*numbers, 0, 0]
    return major, minor
