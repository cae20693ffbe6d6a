"""Queries NVML, the library of NVIDIA's driver, about the GPUs, in a child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from fleetrun.model import Gpu
from fleetrun.run import proc
from fleetrun.run.isolation import IsolatedCall

# The driver's device files (/dev/dxg: under Windows), and a sign that a container without GPUs has.
FILES, _VERSION = ("dev/nvidiactl", "dev/dxg"), "proc/driver/nvidia/version"
# The reason for a GPU that CUDA cannot use.
_UNDIVIDED = "it is in MIG mode without an instance: nvidia-smi mig -cgi"

# pynvml, which has no types, and almost any function of which may be missing or fail.
Library = Any
_Numbered = tuple[tuple[int, str], ...]


class Survey(NamedTuple):
    """The usable GPUs, and why the others are not usable, by NVML's numbers.

    `trouble` is why there is no answer; `is_stuck`: the driver may never answer.
    """

    gpus: tuple[Gpu, ...] = ()
    barred: _Numbered = ()
    lost: _Numbered = ()
    driver: str = ""
    # The newest CUDA version that the driver supports, as in 12.4.
    cuda: tuple[int, int] | None = None
    trouble: str = ""
    is_stuck: bool = False


def has_driver(root: str) -> bool:
    """Whether there is a driver to ask."""
    return any(os.path.exists(os.path.join(root, path)) for path in (*FILES, _VERSION))


def library() -> Library:
    """Return the real NVML; only the child imports it, which takes 25 ms."""
    import pynvml

    return pynvml


def ask(lib: Library, name: str, *words: object) -> Any:  # noqa: ANN401 - pynvml has no types
    """Return the result of the function NAME; None if GPU, driver or pynvml do not support it."""
    try:
        return getattr(lib, name)(*words)
    except Exception:  # noqa: BLE001 - pynvml's own; one of them, for old drivers, is no NVMLError
        return None


class DriverQuery:
    """A survey in progress: the driver is asked at once, and `result` waits for the answer."""

    def __init__(self, nvml: Callable[[], Library] = library, *, is_thorough: bool = False) -> None:
        def call() -> object:
            return _plain(survey(nvml(), is_thorough=is_thorough))

        self._question = IsolatedCall(call)

    def result(self, log: Callable[[str], None] | None, *, timeout_s: float) -> Survey:
        """Return the answer; without one after TIMEOUT_S seconds, the survey is stuck."""
        what = "the NVIDIA driver to answer"
        answer = self._question.result(timeout_s, log=log, awaited=what)
        if answer.trouble:
            return Survey(trouble=answer.trouble, is_stuck=answer.is_late)
        surveyed = Survey(*cast("tuple[Any, ...]", answer.value))
        return surveyed._replace(gpus=tuple(map(_gpu, surveyed.gpus)))


def _plain(value: object) -> object:
    """Return VALUE with plain tuples for named ones, as only these pass through the pipe."""
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _gpu(fields: Sequence[Any]) -> Gpu:
    gpu = Gpu(*fields)
    return gpu._replace(instances=tuple(map(_gpu, gpu.instances)))


def survey(lib: Library, *, is_thorough: bool = False) -> Survey:
    """Return all GPUs; IS_THOROUGH: with what only a check-up needs."""
    usable, barred, lost = handles(lib)
    gpus = []
    for index, handle in usable.items():
        gpu = _read(lib, handle, index)
        if gpu.is_mig and not gpu.instances:
            lost = (*lost, (index, _UNDIVIDED))
        else:
            if is_thorough:
                name = ask(lib, "nvmlDeviceGetName", handle) or "GPU"
                mode = ask(lib, "nvmlDeviceGetComputeMode", handle) or 0
                gpu = gpu._replace(name=name, compute_mode=mode)
            gpus.append(gpu)
    surveyed = Survey(tuple(gpus), barred, tuple(sorted(lost)))
    if not is_thorough:
        return surveyed
    # 12040 is 12.4.
    number = ask(lib, "nvmlSystemGetCudaDriverVersion_v2")
    cuda = None if number is None else (number // 1000, number % 1000 // 10)
    return surveyed._replace(driver=ask(lib, "nvmlSystemGetDriverVersion") or "?", cuda=cuda)


def handles(lib: Library) -> tuple[dict[int, object], _Numbered, _Numbered]:
    """Open the driver, and return the GPUs, those that are barred, and those that are lost."""
    lib.nvmlInit()
    gpus: dict[int, object] = {}
    barred: list[tuple[int, str]] = []
    lost: list[tuple[int, str]] = []
    for index in range(lib.nvmlDeviceGetCount()):
        try:
            handle = lib.nvmlDeviceGetHandleByIndex(index)
            lib.nvmlDeviceGetUUID(handle)
        except lib.NVMLError as error:  # noqa: PERF203 - one may fail, others not
            # A device cgroup (of a container or a batch system) may deny us a GPU.
            is_barred = "NoPermission" in type(error).__name__
            (barred if is_barred else lost).append((index, str(error)))
        else:
            gpus[index] = handle
    return gpus, tuple(barred), tuple(lost)


def _read(lib: Library, handle: object, index: int) -> Gpu:
    """Return a GPU with its instances."""
    parts = instances(lib, handle).items()
    pci = ask(lib, "nvmlDeviceGetPciInfo", handle)
    return _part(lib, handle, ask(lib, "nvmlDeviceGetUUID", handle) or "")._replace(
        number=index,
        bus="" if pci is None else pci.busId,
        instances=tuple(_part(lib, part, uuid) for uuid, part in parts),
        is_mig=bool(parts) or _wants_instances(lib, handle),
    )


def _part(lib: Library, handle: object, uuid: str) -> Gpu:
    """Return the memory and the users of a GPU or an instance."""
    memory = ask(lib, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return Gpu(uuid)
    # The driver reports ids of the machine, which a container cannot see.
    running = ask(lib, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    pids = sorted({process.pid for process in running})
    users = tuple((pid, proc.command(pid)) for pid in pids)
    return Gpu(uuid, used_bytes=int(memory.used), total_bytes=int(memory.total), users=users)


def instances(lib: Library, handle: object) -> dict[str, object]:
    """Return a GPU's MIG instances by their UUIDs."""
    # The numbers of instances may have gaps.
    numbers = range(ask(lib, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    parts = [ask(lib, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in numbers]
    named = [(ask(lib, "nvmlDeviceGetUUID", part), part) for part in parts if part is not None]
    return {uuid: part for uuid, part in named if uuid is not None}


def _wants_instances(lib: Library, handle: object) -> bool:
    """Whether only instances of a GPU can be used, as it is in MIG mode now."""
    most = ask(lib, "nvmlDeviceGetMaxMigDeviceCount", handle)
    mode = ask(lib, "nvmlDeviceGetMigMode", handle) if most else None
    return mode is not None and mode[0] == 1


def opened(lib: Library) -> list[tuple[int, object]]:
    """Return the usable GPUs, numbered as in `fleetrun --gpus`.

    The MIG instances of a divided GPU precede it and share its number.
    """
    gpus = [(gpu, instances(lib, gpu).values()) for gpu in handles(lib)[0].values()]
    usable = [(gpu, parts) for gpu, parts in gpus if parts or not _wants_instances(lib, gpu)]
    return [(number, part) for number, (gpu, parts) in enumerate(usable) for part in (*parts, gpu)]


def rates(lib: Library, gpus: Sequence[str] | None) -> list[tuple[int, int]]:
    """Return the percentages of time that kernels, and their memory, were busy on each of GPUS.

    GPUS are numbers or UUIDs; None means all of this host. There are none for a part of a GPU.
    """
    busy = [
        ask(lib, "nvmlDeviceGetUtilizationRates", gpu)
        for number, gpu in opened(lib)
        if gpus is None or not {str(number), ask(lib, "nvmlDeviceGetUUID", gpu)}.isdisjoint(gpus)
    ]
    return [(rate.gpu, rate.memory) for rate in busy if rate is not None]
