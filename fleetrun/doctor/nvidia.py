"""NVIDIA's GPUs: what NVML and the kernel's log say, and whether CUDA starts; asked in children."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from fleetrun.host import files, nvml
from fleetrun.host.nvml import Library, ask, library, text
from fleetrun.postmortem import kernelfacts
from fleetrun.run import isolation


class User(NamedTuple):
    """A process that uses memory of a GPU; bytes are None if the driver does not report them."""

    pid: int
    name: str
    used: int | None


class Gpu(NamedTuple):
    """One GPU; None means that the driver does not report the value."""

    number: int
    name: str
    uuid: str
    bus: str = ""
    memory: int | None = None
    used: int | None = None
    users: tuple[User, ...] = ()
    # As in 9.0.
    capability: tuple[int, int] | None = None
    # Uncorrected ECC errors since the driver was loaded.
    ecc_errors: int | None = None
    is_remap_pending: bool | None = None
    is_remap_failed: bool | None = None
    is_mig: bool | None = None
    instances: int = 0
    # Bits of NVML's clocks event (throttle) reasons.
    throttle: int | None = None
    # default, exclusive process, prohibited.
    compute_mode: str | None = None
    # PCIe lanes in use, and the most that GPU and slot support.
    lanes: tuple[int, int] | None = None
    # NVLinks that are up, and all there are.
    nvlinks: tuple[int, int] | None = None


class Xid(NamedTuple):
    """A GPU error in the kernel's log: its number, the GPU's bus address, and the line."""

    number: int
    bus: str
    text: str


class CudaStart(NamedTuple):
    """The result of cuInit in a child process: its code (0: success) and the code's name.

    `trouble` says why there is no code: the library cannot be loaded, crashes or hangs.
    """

    # Whether /dev/nvidia-uvm exists, which CUDA needs and NVML does not.
    has_uvm: bool
    code: int = 0
    name: str = ""
    # How many GPUs it shows without a mask.
    gpus: int = 0
    trouble: str = ""


class Gpus(NamedTuple):
    """What NVIDIA's driver reports; `trouble`: why it does not; `is_stuck`: it may never answer."""

    has_driver: bool
    # Whether there are device files; a container without GPUs has none.
    has_files: bool = True
    gpus: tuple[Gpu, ...] = ()
    # The indexes of those that may not be opened or do not work, and why.
    barred: tuple[tuple[int, str], ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    driver: str = ""
    # The newest CUDA version that the driver supports, as in 12.4.
    cuda: tuple[int, int] | None = None
    # The path between two GPUs: same board, PCIe switch, host bridge, NUMA node, across the system.
    links: Mapping[tuple[int, int], str] = {}
    xids: tuple[Xid, ...] = ()
    # Why the kernel's log could not be read; empty: it could.
    log_refusal: str = ""
    trouble: str = ""
    is_stuck: bool = False
    # None: it was not started.
    cuda_start: CudaStart | None = None


# Hides GPUs from CUDA; removed, as the question is whether CUDA starts at all.
_MASK = "CUDA_VISIBLE_DEVICES"
_UVM, _WINDOWS = "dev/nvidia-uvm", "dev/dxg"


def cuda_library() -> Any:  # noqa: ANN401 - a library of C
    """Load the real driver library."""
    return ctypes.CDLL("libcuda.so.1")


def read_cuda(
    lib: Callable[[], Any] = cuda_library, *, root: str = "/", timeout_s: float = 20.0
) -> CudaStart:
    """Return whether CUDA starts on this host, and how many GPUs it shows without a mask."""
    has_uvm = any(os.path.exists(os.path.join(root, path)) for path in (_UVM, _WINDOWS))
    started = CudaStart(has_uvm=has_uvm)
    answer = isolation.answer("cuInit", lambda: tuple(start(lib())), timeout_s)
    if answer.trouble:
        return started._replace(trouble=answer.trouble.removeprefix("OSError: "))
    code, name, count = cast("tuple[int, str, int]", answer.value)
    return started._replace(code=code, name=name, gpus=count)


def start(lib: Any) -> tuple[int, str, int]:  # noqa: ANN401 - as above
    """Start LIB; return the code of cuInit or of the count, its name, and the number of GPUs."""
    os.environ.pop(_MASK, None)
    count = ctypes.c_int(0)
    code = int(lib.cuInit(0)) or int(lib.cuDeviceGetCount(ctypes.byref(count)))
    name = ctypes.c_char_p()
    if code:
        lib.cuGetErrorName(code, ctypes.byref(name))
    return code, (name.value or b"").decode(), count.value


# The driver may have to load first, which takes seconds if nothing keeps it loaded.
TIMEOUT_S = 20.0
_FILES = ("dev/nvidiactl", "dev/dxg")
# Also present in a container without GPUs.
_DRIVER = "proc/driver/nvidia/version"
_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")
_MOST_NVLINKS = 18
# NVML's numbers (nvml.h): NVML_COMPUTEMODE_*, NVML_TOPOLOGY_*.
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}
_TOPOLOGY = {
    0: "same board",
    10: "PCIe switch",
    20: "PCIe switches",
    30: "host bridge",
    40: "NUMA node",
    50: "across the system",
}


# The child's answer as plain values: GPUs, barred and lost ones, driver, CUDA, links.
_Numbered = tuple[tuple[int, str], ...]
_Plain = tuple[
    tuple[tuple[Any, ...], ...],
    _Numbered,
    _Numbered,
    str,
    "tuple[int, int] | None",
    tuple[tuple[tuple[int, int], str], ...],
]


def read(
    load: Callable[[], Library] = library,
    *,
    start_cuda: Callable[[], CudaStart] = read_cuda,
    root: str = "/",
    timeout_s: float = TIMEOUT_S,
) -> Gpus:
    """Return what is known about NVIDIA's GPUs; a driver that does not answer is not waited for."""
    has_files = any(os.path.exists(os.path.join(root, path)) for path in _FILES)
    if not has_files and not os.path.exists(os.path.join(root, _DRIVER)):
        return Gpus(has_driver=False)
    xids, refusal = kernel_log(os.path.join(root, "dev/kmsg"))
    gpus_ = Gpus(has_driver=True, xids=xids, log_refusal=refusal)
    answer = isolation.answer("it", lambda: survey(load()), timeout_s)
    if answer.is_late:
        return gpus_._replace(trouble=answer.trouble, is_stuck=True)
    if answer.trouble and not has_files:
        version = _VERSION.search(files.text(os.path.join(root, _DRIVER)))
        return Gpus(has_driver=True, has_files=False, driver=version[0] if version else "")
    gpus_ = gpus_._replace(cuda_start=start_cuda())
    if answer.trouble:
        return gpus_._replace(trouble=answer.trouble)
    gpus, barred, lost, driver, runs, links = cast("_Plain", answer.value)
    return gpus_._replace(
        gpus=tuple(map(_gpu, gpus)),
        barred=barred,
        lost=lost,
        driver=driver,
        cuda=runs,
        links=dict(links),
    )


def _gpu(fields: Iterable[Any]) -> Gpu:
    gpu = Gpu(*fields)
    return gpu._replace(
        users=tuple(User(pid, _name(pid), used) for pid, _, used in gpu.users),
    )


def _name(pid: int) -> str:
    """Return the name of process PID; empty if a container does not show it."""
    return files.text(f"/proc/{pid}/comm").strip()


def survey(lib: Library) -> _Plain:
    """Ask LIB everything that a check-up needs; answers that it refuses are None."""
    gpus: list[tuple[Any, ...]] = []
    handles, barred, lost = nvml.handles(lib)
    for index, handle in handles.items():
        gpu = _asked(lib, handle, index)
        # Only plain tuples pass through the pipe.
        gpus.append(tuple(gpu._replace(users=tuple(map(tuple, gpu.users)))))  # type: ignore[arg-type]
    links = []
    for (first, first_handle), (second, second_handle) in itertools.combinations(
        handles.items(), 2
    ):
        level = ask(lib, "nvmlDeviceGetTopologyCommonAncestor", first_handle, second_handle)
        if level in _TOPOLOGY:
            links.append(((first, second), _TOPOLOGY[level]))
    number = ask(lib, "nvmlSystemGetCudaDriverVersion_v2")
    driver = text(ask(lib, "nvmlSystemGetDriverVersion") or "?")
    # 12040 is 12.4.
    newest = None if number is None else (number // 1000, number % 1000 // 10)
    return tuple(gpus), barred, lost, driver, newest, tuple(links)


def _asked(lib: Library, handle: object, index: int) -> Gpu:
    """Return what LIB reports about one GPU."""

    def query(name: str, *words: int) -> Any:  # noqa: ANN401 - pynvml has no types
        return ask(lib, name, handle, *words)

    memory = query("nvmlDeviceGetMemoryInfo")
    remapped = query("nvmlDeviceGetRemappedRows")
    retiring = query("nvmlDeviceGetRetiredPagesPendingStatus")
    mig = query("nvmlDeviceGetMigMode")
    lanes, most = query("nvmlDeviceGetCurrPcieLinkWidth"), query("nvmlDeviceGetMaxPcieLinkWidth")
    states = [query("nvmlDeviceGetNvLinkState", link) for link in range(_MOST_NVLINKS)]
    up = [state for state in states if state is not None]
    pci = query("nvmlDeviceGetPciInfo")
    capability = query("nvmlDeviceGetCudaComputeCapability")
    return Gpu(
        number=index,
        name=text(query("nvmlDeviceGetName") or "GPU"),
        uuid=text(query("nvmlDeviceGetUUID")),
        bus="" if pci is None else text(pci.busId),
        memory=None if memory is None else int(memory.total),
        used=None if memory is None else int(memory.used),
        users=tuple(
            User(
                int(process.pid),
                "",
                None if process.usedGpuMemory is None else int(process.usedGpuMemory),
            )
            for process in nvml.running(lib, handle)
        ),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        ecc_errors=nvml.ecc_errors(lib, handle),
        is_remap_pending=bool(remapped[2]) if remapped is not None else _truth(retiring),
        is_remap_failed=None if remapped is None else bool(remapped[3]),
        is_mig=None if mig is None else bool(mig[0]),
        instances=len(nvml.instances(lib, handle)),
        throttle=nvml.throttle(lib, handle),
        compute_mode=_COMPUTE_MODES.get(query("nvmlDeviceGetComputeMode")),
        lanes=None if lanes is None or most is None else (lanes, most),
        nvlinks=(sum(map(bool, up)), len(up)) if up else None,
    )


def _truth(state: int | None) -> bool | None:
    return None if state is None else bool(state)


def kernel_log(path: str) -> tuple[tuple[Xid, ...], str]:
    """Return the GPU errors in the kernel's log at PATH, or why it cannot be read."""
    xids: list[Xid] = []
    try:
        for record in kernelfacts.records(path):
            matches = _XID.finditer(record.decode(errors="replace"))
            xids += [Xid(int(match[2]), match[1].lower(), match[0]) for match in matches]
    except OSError as error:
        return tuple(xids), error.strerror or str(error)
    return tuple(xids), ""
