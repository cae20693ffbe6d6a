"""Whether CUDA's driver library starts; tried in a child, which may crash or hang."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, cast

from fleetrun.doctor.facts import CudaStart
from fleetrun.run import isolation

# Hides GPUs from CUDA; removed, as the question is whether CUDA starts at all.
_MASK = "CUDA_VISIBLE_DEVICES"
_UVM, _WINDOWS = "dev/nvidia-uvm", "dev/dxg"


def library() -> Any:  # noqa: ANN401 - a library of C
    """Load the real driver library."""
    return ctypes.CDLL("libcuda.so.1")


def read(
    lib: Callable[[], Any] = library, *, root: str = "/", timeout_s: float = 20.0
) -> CudaStart:
    """Return whether CUDA starts on this host, and how many GPUs it shows without a mask."""
    has_uvm = any(os.path.exists(os.path.join(root, path)) for path in (_UVM, _WINDOWS))
    start = CudaStart(has_uvm=has_uvm)
    answer = isolation.answer("cuInit", lambda: tuple(ask(lib())), timeout_s)
    if answer.trouble:
        return start._replace(trouble=answer.trouble.removeprefix("OSError: "))
    code, name, count = cast("tuple[int, str, int]", answer.value)
    return start._replace(code=code, name=name, gpus=count)


def ask(lib: Any) -> tuple[int, str, int]:  # noqa: ANN401 - as above
    """Start LIB; return the code of cuInit or of the count, its name, and the number of GPUs."""
    os.environ.pop(_MASK, None)
    count = ctypes.c_int(0)
    code = int(lib.cuInit(0)) or int(lib.cuDeviceGetCount(ctypes.byref(count)))
    name = ctypes.c_char_p()
    if code:
        lib.cuGetErrorName(code, ctypes.byref(name))
    return code, (name.value or b"").decode(), count.value
