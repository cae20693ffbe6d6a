"""The device under test: built from device/*.cc, and the variables with which ranks run on it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
SOURCES = Path(__file__).parent / "device"
# Kernels depend on the version of Paddle, and their stubs on the architecture.
_WITH_KERNELS = ("3.3.1", "x86_64")
# The alignment of gradients in a device's memory, in floats.
_ALIGNED = 256
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-pthread")


class Device(NamedTuple):
    """What ranks of tests run on: a kind ("": the CPU), settings as in the head of runtime.cc."""

    kind: str = ""
    settings: Mapping[str, object] = MappingProxyType({})


# FLEETRUN_TEST_PLUGIN=FOLDER/libNAME.so: another device plays ours, by settings of its own, without
# a witness that these tests can read.
PLUGIN = os.environ.get("FLEETRUN_TEST_PLUGIN", "")
# FLEETRUN_TEST_NCCL=FOLDER, a wheel's nvidia/nccl: the collectives are NCCL's, on the first GPU.
NCCL = Path(os.environ.get("FLEETRUN_TEST_NCCL", ""))
# With FLEETRUN_TEST_DEVICE=npu all tests that train do so on the device.
_used = [Device(os.environ.get("FLEETRUN_TEST_DEVICE", ""))]


@contextlib.contextmanager
def on(kind: str, **settings: object) -> Iterator[None]:
    """Let launched ranks run on devices of KIND."""
    _used.append(Device(kind, settings))
    try:
        yield
    finally:
        _used.pop()


def kind() -> str:
    """Return the kind of devices that launched ranks run on; "" is the CPU."""
    return _used[-1].kind


def elements(*sizes: int) -> int:
    """Return the length of the buffer of gradients of SIZES, in floats: devices need padding."""
    return sum(-(-size // _ALIGNED) * _ALIGNED if kind() else size for size in sizes)


def variables(python: Path) -> dict[str, str]:
    """Return the variables with which ranks that PYTHON runs are on the device."""
    kind, settings = _used[-1]
    if not kind:
        return {}
    loaded = {
        "CUSTOM_DEVICE_ROOT": str(library(python).parent),
        "TESTDEVICE_KIND": kind,
        # The library counts devices and registers kernels when it is loaded.
        "TESTDEVICE_COUNT": str(settings.get("count", 4)),
        "TESTDEVICE_WITHOUT": str(settings.get("without", "")),
        # Paddle prints on each import what it has loaded.
        "GLOG_minloglevel": "1",
    }
    if NCCL.name:
        loaded["CUDA_VISIBLE_DEVICES"] = "0"
    return {
        **loaded,
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": kind,
        **{f"TESTDEVICE_{name.upper()}": str(value) for name, value in settings.items()},
    }


def of_rank(rank: int) -> dict[str, str]:
    """Return the variables that only RANK has."""
    return {f"FLAGS_selected_{kind()}s": str(rank)} if kind() else {}


class Collective(NamedTuple):
    """A collective as one rank's device saw it, and the kernels of backward that overlapped it."""

    rank: int
    group: str
    ranks: int
    operation: str
    bytes: int
    dtype: str
    order: int
    stream: int
    issued: float
    begin: float
    end: float
    beside: int


def witnessed(folder: Path, rank: int) -> list[Collective]:
    """Return the collectives that RANK's device wrote to FOLDER, its `witness`, in order."""
    if PLUGIN:
        return []
    lines = (folder / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted((Collective(**json.loads(line)) for line in lines), key=lambda call: call.order)


def traces(folder: Path, nranks: int) -> list[list[list[tuple[str, int]]]]:
    """Return for each communicator what each of its ranks has sent, as witnessed in FOLDER."""
    groups: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for rank in range(nranks):
        for call in witnessed(folder, rank):
            sent = groups.setdefault(call.group, {}).setdefault(rank, [])
            sent.append((call.operation, call.bytes))
    return [list(ranks.values()) for ranks in groups.values()]


@cache
def library(python: Path) -> Path:
    """Build the device for PYTHON's Paddle, unless it is there; return its library."""
    if PLUGIN:
        return Path(PLUGIN)
    (paddle,) = python.parent.parent.glob("lib/python3*/site-packages/paddle")
    text = (paddle / "version" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r"full_version\s*=\s*'([\d.]+)'", text)[0]
    unused = "tcp" if NCCL.name else "nccl"
    sources = sorted(path for path in SOURCES.glob("*.cc") if path.stem != unused)
    if (version, platform.machine()) != _WITH_KERNELS:
        sources = [path for path in sources if path.stem != "kernels"]
    made_of = [
        str(paddle),
        *_FLAGS,
        str(NCCL),
        *(path.read_text() for path in [*sorted(SOURCES.glob("*.h")), *sources]),
    ]
    folder = ROOT / "build" / "device" / f"{version}-{crc32(repr(made_of).encode()):08x}"
    built = folder / "libtestdevice.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built, paddle, sources)
    return built


def _build(built: Path, paddle: Path, sources: list[Path]) -> None:
    if shutil.which("g++") is None:
        missing = "no g++ is here, which builds the device under test"
        if shutil.which("apt-get") and not os.geteuid():
            pytest.fail(f"{missing}: apt-get install g++")
        pytest.skip(missing)
    flags = [*_FLAGS, "-w", f"-I{paddle}/include", f"-I{paddle}/include/third_party"]
    libraries: list[str] = []
    if any(path.stem == "kernels" for path in sources):
        flags += ["-DWITH_KERNELS", "-DPADDLE_WITH_CUSTOM_DEVICE"]
        places = (paddle / "libs", paddle / "base")
        libraries = [f"-L{place}" for place in places]
        libraries += [f"-Wl,-rpath,{place}" for place in places]
        libraries += ["-lphi_core", "-lphi", "-lcommon"]
    if NCCL.name:
        cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        flags += [f"-I{NCCL}/include", f"-I{cuda}/include"]
        libraries += [f"-L{NCCL}/lib", f"-Wl,-rpath,{NCCL}/lib", "-l:libnccl.so.2"]
        libraries += [f"-L{cuda}/lib64", "-lcudart_static", "-ldl", "-lrt"]
    objects = [built.with_name(f"{path.stem}.o") for path in sources]
    compilers = [
        subprocess.Popen(["g++", *flags, "-c", path, "-o", made])
        for path, made in zip(sources, objects, strict=True)
    ]
    assert [compiler.wait() for compiler in compilers] == [0] * len(sources)
    new = built.with_suffix(".new")
    # Paddle closes the library at exit, while threads of streams may still run in it.
    argv: list[Any] = ["g++", "-shared", "-pthread", *objects, "-o", new, *libraries]
    subprocess.run([*argv, "-Wl,-z,nodelete"], check=True)
    for path in objects:
        path.unlink()
    new.rename(built)
