"""NVIDIA's driver and CUDA, asked in children, which may crash or hang."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.host import nvml
from fleetrun.host.nvml import DriverQuery, Survey
from fleetrun.run.isolation import IsolatedCall

# The driver may have to load first, which takes seconds if nothing keeps it loaded.
_TIMEOUT_S = 20.0
# Hides GPUs from CUDA; removed, as the question is whether CUDA starts at all.
_MASK = "CUDA_VISIBLE_DEVICES"


class CudaStart(NamedTuple):
    """The result of cuInit in a child process: its code (0: success) and the code's name.

    `trouble` says why there is no code: the library cannot be loaded, crashes or hangs.
    """

    code: int = 0
    name: str = ""
    # How many GPUs it shows without a mask.
    gpus: int = 0
    trouble: str = ""


def read_driver() -> Survey | None:
    """Return what NVIDIA's driver reports; None without one. One that hangs is not waited for."""
    if not nvml.has_driver("/"):
        return None
    try:
        return DriverQuery(is_thorough=True).result(None, timeout_s=_TIMEOUT_S)
    except EnvironmentFault as fault:
        return Survey(trouble=str(fault))


def start_cuda() -> CudaStart:
    """Return whether CUDA starts on this host, and how many GPUs it shows without a mask."""

    def start() -> tuple[int, str, int]:
        os.environ.pop(_MASK, None)
        cuda = ctypes.CDLL("libcuda.so.1")
        count, name = ctypes.c_int(0), ctypes.c_char_p()
        code = int(cuda.cuInit(0)) or int(cuda.cuDeviceGetCount(ctypes.byref(count)))
        if code:
            cuda.cuGetErrorName(code, ctypes.byref(name))
        return code, (name.value or b"").decode(), count.value

    answer = IsolatedCall(start).result(_TIMEOUT_S, callee="cuInit")
    if answer.trouble:
        return CudaStart(trouble=answer.trouble.removeprefix("OSError: "))
    return CudaStart(*cast("tuple[int, str, int]", answer.value))
