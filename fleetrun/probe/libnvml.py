"""What a launch asks of NVML, by ctypes: pynvml's import takes as long as the rest of a launch.

Functions are named as in pynvml and nvml.h, from which the codes and layouts are.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

_NO_PERMISSION, _INSUFFICIENT_SIZE = 4, 7
_UUID_BYTES = 96
# nvmlPciInfo_t ends with the address.
_PCI_BYTES, _BUS_AT = 68, 36
# A process takes so many words of 8 bytes in each version of the function, and begins with the pid.
_RUNNING = "nvmlDeviceGetComputeRunningProcesses"
_PROCESSES = ((f"{_RUNNING}_v3", 3), (f"{_RUNNING}_v2", 3), (_RUNNING, 2))
# Processes may start between two calls.
_SPARE = 8


class NVMLError(Exception):
    """An error of NVML."""


class NoPermission(NVMLError):
    """The error for a GPU that may not be opened."""


class LibNvml:
    """NVML; functions raise NVMLError, or AttributeError if the driver is too old for them.

    Raises OSError if the driver has no NVML.
    """

    NVMLError = NVMLError

    def __init__(self) -> None:
        self._lib: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self._lib.nvmlErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *words: object) -> None:
        self._check(getattr(self._lib, name)(*words))

    def _check(self, code: int) -> None:
        if code:
            kind = NoPermission if code == _NO_PERMISSION else NVMLError
            raise kind(self._lib.nvmlErrorString(code).decode())

    def _number(self, name: str, *words: object) -> int:
        number = ctypes.c_uint()
        self._call(name, *words, ctypes.byref(number))
        return number.value

    def nvmlInit(self) -> None:
        """Open the driver."""
        self._call("nvmlInit_v2")

    def nvmlDeviceGetCount(self) -> int:
        """Return the number of GPUs."""
        return self._number("nvmlDeviceGetCount_v2")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        """Return a GPU."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return handle

    def nvmlDeviceGetUUID(self, handle: object) -> str:
        """Return the UUID of a GPU or an instance."""
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("nvmlDeviceGetUUID", handle, uuid, _UUID_BYTES)
        return uuid.value.decode()

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object) -> int:
        """Return the most MIG instances of a GPU."""
        return self._number("nvmlDeviceGetMaxMigDeviceCount", handle)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, index: int) -> object:
        """Return a MIG instance."""
        part = ctypes.c_void_p()
        self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, ctypes.byref(part))
        return part

    def nvmlDeviceGetMigMode(self, handle: object) -> tuple[int, int]:
        """Return whether a GPU is in MIG mode, and whether it will be after a reset."""
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending))
        return now.value, pending.value

    def nvmlDeviceGetPciInfo(self, handle: object) -> SimpleNamespace:
        """Return `busId`, the PCI address of a GPU."""
        info = ctypes.create_string_buffer(_PCI_BYTES)
        self._call("nvmlDeviceGetPciInfo_v3", handle, info)
        return SimpleNamespace(busId=info.raw[_BUS_AT:].partition(b"\0")[0].decode())

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        """Return `total`, `free` and `used` bytes of a GPU or an instance."""
        memory = (ctypes.c_ulonglong * 3)()
        self._call("nvmlDeviceGetMemoryInfo", handle, memory)
        return SimpleNamespace(total=memory[0], free=memory[1], used=memory[2])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        """Return the processes that compute on a GPU or an instance, each with its `pid`."""
        name, words = next(row for row in _PROCESSES if hasattr(self._lib, row[0]))
        ask = getattr(self._lib, name)
        count, rows = ctypes.c_uint(), (ctypes.c_ulonglong * 0)()
        while code := ask(handle, ctypes.byref(count), rows):
            if code != _INSUFFICIENT_SIZE:
                self._check(code)
            count.value += _SPARE
            rows = (ctypes.c_ulonglong * (words * count.value))()
        pids = rows[: count.value * words : words]
        return [SimpleNamespace(pid=pid & 0xFFFFFFFF) for pid in pids]
