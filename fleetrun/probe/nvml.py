"""What NVML, the library of NVIDIA's driver, says of the GPUs; it is asked in a child process."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.run.isolation import IsolatedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    # GPUs as `NvmlGpu` has them, those that are barred, those that are lost.
    _Numbered = tuple[tuple[int, str], ...]
    _Uses = dict[str, tuple[int, int, tuple[int, ...]]]
    _Found = tuple[tuple[tuple[str, tuple[str, ...], str, _Uses], ...], _Numbered, _Numbered]

# After this many seconds, say what is waited for.
REMARK_S = 5.0


# A GPU of which CUDA shows nothing.
_UNDIVIDED = "it is in MIG mode without an instance: nvidia-smi mig -cgi"


class PciInfo(Protocol):
    """Where a GPU is plugged in."""

    @property
    def busId(self) -> str | bytes: ...


class Memory(Protocol):
    """NVML's answer, in bytes."""

    @property
    def used(self) -> int: ...
    @property
    def total(self) -> int: ...


class GpuProcess(Protocol):
    """A process that computes on a GPU."""

    @property
    def pid(self) -> int: ...
    @property
    def usedGpuMemory(self) -> int | None: ...


class Divided(Protocol):
    """The part of pynvml that tells GPUs, and those that are divided (MIG)."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object: ...
    def nvmlDeviceGetUUID(self, handle: object, /) -> str | bytes: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object, /) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: object, /) -> Sequence[int]: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, index: int, /) -> object: ...


class Nvml(Divided, Protocol):
    """The part of pynvml that we use."""

    def nvmlDeviceGetPciInfo(self, handle: object, /) -> PciInfo: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> Memory: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> Sequence[GpuProcess]: ...


class Utilization(Nvml, Protocol):
    """The part of pynvml that tells what a GPU does, too."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object: ...
    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> Rates: ...


class Rates(Protocol):
    """NVML's answer: percentages of the last second."""

    @property
    def gpu(self) -> int: ...
    @property
    def memory(self) -> int: ...


class MeterLibrary(Divided, Protocol):
    """The part of pynvml that tells what GPUs do."""

    @property
    def NVML_TEMPERATURE_GPU(self) -> int: ...
    def nvmlDeviceGetName(self, handle: object, /) -> str | bytes: ...
    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> Rates: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> Memory: ...
    def nvmlDeviceGetPowerUsage(self, handle: object, /) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: object, sensor: int, /) -> int: ...


def pynvml_module() -> Nvml:
    """Return the real NVML; only the child imports it, which takes 100 ms."""
    import pynvml

    # Its structures have their fields only at run time.
    nvml: Nvml = pynvml  # pyright: ignore[reportAssignmentType]
    return nvml


def utilization_module() -> Utilization:
    """Return the real NVML for its other part."""
    import pynvml

    lib: Utilization = pynvml  # pyright: ignore[reportAssignmentType]
    return lib


def meter_module() -> MeterLibrary:
    """Return the real NVML for what GPUs use."""
    import pynvml

    lib: MeterLibrary = pynvml  # pyright: ignore[reportAssignmentType]
    return lib


class NvmlGpu(NamedTuple):
    """A GPU that can be used: its UUID, those of its MIG instances, where it is plugged in.

    `uses` says by UUID how many bytes of its memory, or of its instances', are used, of how many,
    and by which processes.
    """

    uuid: str
    instances: tuple[str, ...] = ()
    bus: str = ""
    uses: Mapping[str, tuple[int, int, tuple[int, ...]]] = {}


class Survey(NamedTuple):
    """The GPUs that can be used, and why each of the others cannot, by NVML's number of it.

    `trouble` says why there is no answer; `is_stuck` that the driver may never give one.
    """

    gpus: tuple[NvmlGpu, ...] = ()
    barred: tuple[tuple[int, str], ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    trouble: str = ""
    is_stuck: bool = False


class DriverQuery:
    """A survey on its way: the driver is asked from here on, and `result` waits for the answer."""

    def __init__(self, nvml: Callable[[], Nvml] = pynvml_module, *, wants_bus: bool) -> None:
        self._began = time.monotonic()
        try:
            self._question = IsolatedCall(lambda: survey(nvml(), wants_bus=wants_bus))
        except OSError as error:
            raise EnvironmentFault(
                f"The GPUs cannot be looked for: no process can be started ({error.strerror}); "
                "look at `ulimit -u`, `ulimit -n` and the limits of the container."
            ) from None

    def result(self, say: Callable[[str], None], *, timeout_s: float) -> Survey:
        """Return the answer; without one after TIMEOUT_S seconds, the survey is stuck."""
        answer = self._question.wait(self._began + min(REMARK_S, timeout_s))
        if answer is None and timeout_s > REMARK_S:
            say(f"Waiting up to {timeout_s:g} s for the NVIDIA driver to answer.")
            answer = self._question.wait(self._began + timeout_s)
        if answer is None:
            standing = self._question.abandon()
            why = f"it has not answered within {timeout_s:g} s ({standing})"
            return Survey(trouble=why, is_stuck=True)
        if answer.trouble:
            return Survey(trouble=answer.trouble)
        gpus, barred, lost = cast("_Found", answer.value)
        return Survey(tuple(NvmlGpu(*gpu) for gpu in gpus), barred, lost)


def survey(lib: Nvml, *, wants_bus: bool) -> _Found:
    """Return the GPUs, those that may not be opened, and those that do not work."""
    lib.nvmlInit()
    gpus: list[tuple[str, tuple[str, ...], str, _Uses]] = []
    barred: list[tuple[int, str]] = []
    lost: list[tuple[int, str]] = []
    for index in range(lib.nvmlDeviceGetCount()):
        try:
            handle = lib.nvmlDeviceGetHandleByIndex(index)
            uuid = lib.nvmlDeviceGetUUID(handle)
        except lib.NVMLError as error:
            (barred if _is_barred(error) else lost).append((index, str(error)))
            continue
        parts = instances(lib, handle)
        if not parts and _wants_instances(lib, handle):
            lost.append((index, _UNDIVIDED))
            continue
        bus = _bus(lib, handle) if wants_bus else ""
        used = (parts or {_text(uuid): handle}).items()
        uses = {name: use for name, part in used if (use := _use(lib, part)) is not None}
        gpus.append((_text(uuid), tuple(parts), bus, uses))
    return tuple(gpus), tuple(barred), tuple(lost)


def _is_barred(error: Exception) -> bool:
    """Whether a device cgroup (of a container, a batch system) keeps a GPU from us."""
    return "NoPermission" in type(error).__name__


def instances(lib: Divided, handle: object) -> dict[str, object]:
    """Return a GPU's MIG instances by their UUIDs."""
    found: dict[str, object] = {}
    for index in range(_most_instances(lib, handle)):
        # The numbers of instances may have gaps.
        with suppress(lib.NVMLError):
            instance = lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found[_text(lib.nvmlDeviceGetUUID(instance))] = instance
    return found


def _use(lib: Nvml, handle: object) -> tuple[int, int, tuple[int, ...]] | None:
    """Return the bytes used, all there are, and who computes there; None if it is not told."""
    try:
        memory = lib.nvmlDeviceGetMemoryInfo(handle)
    except lib.NVMLError:
        return None
    return memory.used, memory.total, tuple(one.pid for one in running(lib, handle))


def running(lib: Any, handle: object) -> Sequence[GpuProcess]:  # noqa: ANN401 - two versions
    """Return the processes that compute on a GPU; none if the driver does not tell.

    pynvml asks as a new driver wants it, and raises what is no NVMLError with one before 510.
    """
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"):
        try:
            found: Sequence[GpuProcess] = getattr(lib, name)(handle)
        except (lib.NVMLError, AttributeError):  # noqa: PERF203 - of two
            break
        except Exception as error:
            if type(error).__name__ != "NVMLLibraryMismatchError":
                raise
        else:
            return found
    return ()


def _most_instances(lib: Divided, handle: object) -> int:
    """Return how many MIG instances a GPU may have; 0 if it cannot be divided."""
    try:
        return lib.nvmlDeviceGetMaxMigDeviceCount(handle)
    except lib.NVMLError:
        return 0


def _wants_instances(lib: Divided, handle: object) -> bool:
    """Whether nothing but instances of a GPU can be used: it is in MIG mode just now."""
    try:
        return bool(_most_instances(lib, handle)) and lib.nvmlDeviceGetMigMode(handle)[0] == 1
    except lib.NVMLError:
        return False


def _bus(lib: Nvml, handle: object) -> str:
    """Return where a GPU is plugged in; nothing if the driver does not tell."""
    try:
        return _text(lib.nvmlDeviceGetPciInfo(handle).busId)
    except lib.NVMLError:
        # Binding is a help: what the driver will not tell, we do without.
        return ""


def _text(answer: str | bytes) -> str:
    """Return what pynvml says as text; older ones give bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer


def loads(lib: Utilization, gpus: Sequence[str] | None) -> dict[str, tuple[int, int, int]]:
    """Return what each of GPUS does, as the fields of `GpuLoad`, as far as NVML tells.

    They are named by numbers or UUIDs; None are all of this host. Of a part of a GPU there are no
    percentages, and of one that fell off the bus there is nothing.
    """
    lib.nvmlInit()
    if gpus is None:
        gpus = [str(index) for index in range(lib.nvmlDeviceGetCount())]
    numbered = usable(lib) if any(gpu.isdecimal() for gpu in gpus) else []
    found = {}
    for gpu in gpus:
        if gpu.isdecimal() and int(gpu) >= len(numbered):
            continue
        with suppress(lib.NVMLError):
            handle = numbered[int(gpu)] if gpu.isdecimal() else lib.nvmlDeviceGetHandleByUUID(gpu)
            found[gpu] = _load(lib, handle)
    return found


def usable(lib: Divided) -> list[object]:
    """Return the GPUs in the order in which `survey` numbers them."""
    handles = []
    for index in range(lib.nvmlDeviceGetCount()):
        with suppress(lib.NVMLError):
            handle = lib.nvmlDeviceGetHandleByIndex(index)
            if instances(lib, handle) or not _wants_instances(lib, handle):
                handles.append(handle)
    return handles


def _load(lib: Utilization, handle: object) -> tuple[int, int, int]:
    kernels = memory = used = 0
    with suppress(lib.NVMLError):
        rates = lib.nvmlDeviceGetUtilizationRates(handle)
        kernels, memory = rates.gpu, rates.memory
    with suppress(lib.NVMLError):
        used = lib.nvmlDeviceGetMemoryInfo(handle).used
    return kernels, memory, used


def ask_loads(
    gpus: Sequence[str] | None, nvml: Callable[[], Utilization] = utilization_module
) -> IsolatedCall:
    """Ask what GPUs do; the value of the answer is that of `loads`."""
    return IsolatedCall(lambda: loads(nvml(), gpus))
