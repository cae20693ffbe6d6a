"""A fake of NVML: GPUs that work, hang, are lost or barred.

It raises for anything that it does not know.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    T = TypeVar("T")


class Bus(NamedTuple):
    """The PCI address of a GPU."""

    busId: str


class Load(NamedTuple):
    """Percentages of the last second."""

    gpu: int
    memory: int


class Bytes(NamedTuple):
    """The used memory of a GPU."""

    used: int
    total: int


class Holder(NamedTuple):
    """A process that computes."""

    pid: int
    usedGpuMemory: int | None = None


class FakeNvmlError(Exception):
    """An error of NVML."""


class NoPermission(FakeNvmlError):
    """The error for a GPU that a device cgroup denies."""


def nothing() -> None:
    """Work."""


def hang() -> None:
    """Never return, as a driver that is stuck."""
    while True:
        select.select([], [], [])


class FakeNvml:
    """An NVML with GPUS, each a UUID and its MIG instances ("" where there is none).

    LOADS are the percentages of some of them, of time and of memory, BUSES their places, USES the
    bytes used and all of some of them and of instances, with who computes, TROUBLE what is raised
    for one of a number. Those of WHOLE could be divided, and are not.
    """

    NVMLError = FakeNvmlError

    def __init__(
        self,
        *gpus: tuple[str, ...],
        broken: bool = False,
        init: Callable[[], None] = nothing,
        loads: Mapping[str, tuple[int, int]] | None = None,
        buses: Mapping[str, str] | None = None,
        uses: Mapping[str, tuple[int, int, tuple[int, ...]]] | None = None,
        trouble: Mapping[int, FakeNvmlError] | None = None,
        whole: tuple[str, ...] = (),
    ) -> None:
        self._gpus = gpus
        self._broken = broken
        self._init = init
        self._loads = loads or {}
        self._buses = buses or {}
        self._uses = uses or {}
        self._trouble = trouble or {}
        self._whole = whole
        self._is_open = False

    def nvmlInit(self) -> None:
        self._init()
        if self._broken:
            raise FakeNvmlError("Driver/library version mismatch")
        self._is_open = True

    def nvmlDeviceGetCount(self) -> int:
        assert self._is_open
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object:
        assert self._is_open
        assert 0 <= index < len(self._gpus)
        if index in self._trouble:
            raise self._trouble[index]
        return self._gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object:
        assert self._is_open
        for gpu in self._gpus:
            if uuid in gpu:
                return gpu if uuid == gpu[0] else uuid
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> Load:
        return Load(*self._of(handle, self._loads))

    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> Bytes:
        return Bytes(*self._use(handle)[:2])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> list[Holder]:
        return [Holder(pid) for pid in self._use(handle)[2]]

    def _use(self, handle: object) -> tuple[int, int, tuple[int, ...]]:
        return self._of(handle, self._uses)

    def nvmlDeviceGetPciInfo(self, handle: object, /) -> Bus:
        return Bus(self._of(handle, self._buses, "Unknown Error"))

    def _of(self, handle: object, table: Mapping[str, T], error: str = "Not Supported") -> T:
        uuid = self.nvmlDeviceGetUUID(handle)
        if uuid not in table:
            raise FakeNvmlError(error)
        return table[uuid]

    def nvmlDeviceGetUUID(self, handle: object, /) -> str:
        assert self._is_open
        return handle[0] if isinstance(handle, tuple) else str(handle)

    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetName(self, handle: object, /) -> str:
        return f"GPU {self.nvmlDeviceGetUUID(handle)}"

    def nvmlDeviceGetPowerUsage(self, handle: object, /) -> int:
        self._use(handle)
        return 412_500

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int, /) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        self._use(handle)
        return 61

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object, /) -> int:
        assert isinstance(handle, tuple)
        if len(handle) == 1 and handle[0] not in self._whole:
            raise FakeNvmlError("Not Supported")
        return 7

    def nvmlDeviceGetMigMode(self, handle: object, /) -> list[int]:
        assert isinstance(handle, tuple)
        self.nvmlDeviceGetMaxMigDeviceCount(handle)
        # Now, and after the next reset.
        return [int(len(handle) > 1)] * 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, index: int, /) -> object:
        assert isinstance(handle, tuple)
        if index + 1 >= len(handle) or not handle[index + 1]:
            raise FakeNvmlError("Not Found")
        return handle[index + 1]
