"""Queries NVML, the library of NVIDIA's driver, about the GPUs, in a child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.run.isolation import IsolatedCall

# GPUs as `NvmlGpu` has them, those that are barred, those that are lost.
_Numbered = tuple[tuple[int, str], ...]
_Uses = dict[str, tuple[int, int, tuple[int, ...]]]
_Found = tuple[tuple[tuple[str, tuple[str, ...], str, _Uses], ...], _Numbered, _Numbered]


class Library(Protocol):
    """pynvml, almost any function of which may be missing or fail."""

    @property
    def NVMLError(self) -> type[Exception]: ...


# After this many seconds, a line says what the launch waits for.
REMARK_S = 5.0

# NVML_MEMORY_ERROR_TYPE_UNCORRECTED and NVML_VOLATILE_ECC (nvml.h).
_UNCORRECTED, _VOLATILE = 1, 0
# The reason for a GPU that CUDA cannot use.
_UNDIVIDED = "it is in MIG mode without an instance: nvidia-smi mig -cgi"


def library() -> Library:
    """Return the real NVML; only the child imports it, which takes 25 ms."""
    import pynvml

    return cast("Library", pynvml)


def ask(lib: Library, name: str, *words: object) -> Any:  # noqa: ANN401 - pynvml has no types
    """Return the result of the function NAME; None if GPU, driver or pynvml do not support it."""
    try:
        return getattr(lib, name)(*words)
    except (lib.NVMLError, AttributeError):
        return None


def text(answer: str | bytes) -> str:
    """Return a result of pynvml as text; older versions return bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def handles(lib: Any) -> tuple[dict[int, object], _Numbered, _Numbered]:  # noqa: ANN401 - as above
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


class NvmlGpu(NamedTuple):
    """A GPU that can be used: its UUID, those of its MIG instances, where it is plugged in.

    `uses` has by UUID, for it and its instances: bytes of memory used, bytes in all, and the
    processes that use them.
    """

    uuid: str
    instances: tuple[str, ...] = ()
    bus: str = ""
    uses: Mapping[str, tuple[int, int, tuple[int, ...]]] = {}


class Survey(NamedTuple):
    """The usable GPUs, and why the others are not usable, by NVML's numbers.

    `trouble` is why there is no answer; `is_stuck`: the driver may never answer.
    """

    gpus: tuple[NvmlGpu, ...] = ()
    barred: tuple[tuple[int, str], ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    trouble: str = ""
    is_stuck: bool = False


class DriverQuery:
    """A survey in progress: the driver is asked at once, and `result` waits for the answer."""

    def __init__(self, nvml: Callable[[], Library], *, wants_bus: bool) -> None:
        try:
            self._question = IsolatedCall(lambda: survey(nvml(), wants_bus=wants_bus))
        except OSError as error:
            raise EnvironmentFault(
                f"GPUs cannot be detected: no process can be started ({error.strerror}); "
                "look at `ulimit -u`, `ulimit -n` and the limits of the container."
            ) from None

    def result(self, log: Callable[[str], None], *, timeout_s: float) -> Survey:
        """Return the answer; without one after TIMEOUT_S seconds, the survey is stuck."""
        what = "the NVIDIA driver to answer"
        answer = self._question.result(timeout_s, log=log, awaited=what, log_after_s=REMARK_S)
        if answer.trouble:
            return Survey(trouble=answer.trouble, is_stuck=answer.is_late)
        gpus, barred, lost = cast("_Found", answer.value)
        return Survey(tuple(NvmlGpu(*gpu) for gpu in gpus), barred, lost)


def survey(lib: Library, *, wants_bus: bool) -> _Found:
    """Return the GPUs, those that may not be opened, and those that do not work."""
    gpus: list[tuple[str, tuple[str, ...], str, _Uses]] = []
    handle_of, barred, lost = handles(lib)
    for index, handle in handle_of.items():
        parts = instances(lib, handle)
        if not parts and _wants_instances(lib, handle):
            lost = (*lost, (index, _UNDIVIDED))
            continue
        uuid = text(ask(lib, "nvmlDeviceGetUUID", handle) or "")
        # Binding is optional: we do without what the driver does not tell.
        pci = ask(lib, "nvmlDeviceGetPciInfo", handle) if wants_bus else None
        used = (parts or {uuid: handle}).items()
        uses = {name: use for name, part in used if (use := _use(lib, part)) is not None}
        gpus.append((uuid, tuple(parts), "" if pci is None else text(pci.busId), uses))
    return tuple(gpus), barred, tuple(sorted(lost))


def instances(lib: Library, handle: object) -> dict[str, object]:
    """Return a GPU's MIG instances by their UUIDs."""
    # The numbers of instances may have gaps.
    numbers = range(ask(lib, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    parts = [ask(lib, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in numbers]
    named = [(ask(lib, "nvmlDeviceGetUUID", part), part) for part in parts if part is not None]
    return {text(uuid): part for uuid, part in named if uuid is not None}


def _use(lib: Library, handle: object) -> tuple[int, int, tuple[int, ...]] | None:
    """Return the bytes used, the bytes in all, and the computing processes; None if unknown."""
    memory = ask(lib, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return None
    return memory.used, memory.total, tuple(process.pid for process in running(lib, handle))


def running(lib: Any, handle: object) -> Sequence[Any]:  # noqa: ANN401 - two versions
    """Return the processes that compute on a GPU; none if the driver does not tell.

    pynvml asks in the way of new drivers, and raises other errors than NVMLError with those before
    510.
    """
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"):
        try:
            processes: Sequence[Any] = getattr(lib, name)(handle)
        except (lib.NVMLError, AttributeError):  # noqa: PERF203 - of two
            break
        except Exception as error:
            if type(error).__name__ != "NVMLLibraryMismatchError":
                raise
        else:
            return processes
    return ()


def throttle(lib: Library, handle: object) -> int | None:
    """Return the bits of what holds a GPU's clocks down."""
    reasons: int | None = ask(lib, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:
        # As older drivers call it.
        reasons = ask(lib, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return reasons


def ecc_errors(lib: Library, handle: object) -> int | None:
    """Return the uncorrected errors of a GPU's memory since its driver was loaded."""
    errors: int | None = ask(lib, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE)
    return errors


def _wants_instances(lib: Library, handle: object) -> bool:
    """Whether only instances of a GPU can be used, as it is in MIG mode now."""
    most = ask(lib, "nvmlDeviceGetMaxMigDeviceCount", handle)
    mode = ask(lib, "nvmlDeviceGetMigMode", handle) if most else None
    return mode is not None and mode[0] == 1


def loads(lib: Library, gpus: Sequence[str] | None) -> dict[str, tuple[int, int, int]]:
    """Return the load of each of GPUS as the fields of `GpuLoad`, as far as NVML tells.

    GPUS are numbers or UUIDs; None means all of this host. There are no percentages for a part of a
    GPU, and nothing for a GPU that fell off the bus.
    """
    numbered = usable(lib)
    if gpus is None:
        gpus = [str(index) for index in range(len(numbered))]
    usage = {}
    for gpu in gpus:
        if not gpu.isdecimal():
            handle = ask(lib, "nvmlDeviceGetHandleByUUID", gpu)
        else:
            handle = numbered[int(gpu)] if int(gpu) < len(numbered) else None
        if handle is not None:
            rates = ask(lib, "nvmlDeviceGetUtilizationRates", handle)
            memory = ask(lib, "nvmlDeviceGetMemoryInfo", handle)
            kernels, controller = (rates.gpu, rates.memory) if rates is not None else (0, 0)
            usage[gpu] = kernels, controller, 0 if memory is None else memory.used
    return usage


def usable(lib: Library) -> list[object]:
    """Open the driver, and return the GPUs in the order in which `survey` numbers them."""
    gpus = handles(lib)[0].values()
    return [gpu for gpu in gpus if instances(lib, gpu) or not _wants_instances(lib, gpu)]


def ask_loads(gpus: Sequence[str] | None, nvml: Callable[[], Library] = library) -> IsolatedCall:
    """Ask for the load of GPUs; the answer's value is that of `loads`."""
    return IsolatedCall(lambda: loads(nvml(), gpus))
