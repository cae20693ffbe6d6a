"""A rank that uses a GPU by the driver alone (libcuda): no Paddle, no CUDA toolkit.

`spin wait` waits in a kernel that never ends, as NCCL's do for a peer that is lost; `spin work`
fills memory for some seconds, and `spin hold` takes memory and then waits. Without a GPU it waits
or computes on the processor.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

# The driver compiles it for any GPU. It reads a flag until somebody sets it; nobody does.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 flag) {
    .reg .u64 %at;
    .reg .u32 %value;
    .reg .pred %p;
    ld.param.u64 %at, [flag];
again:
    ld.volatile.global.u32 %value, [%at];
    setp.eq.u32 %p, %value, 0;
    @%p bra again;
    ret;
}
"""
WORK_S = 25.0
BYTES = 1 << 30


class Gpu:
    """The first GPU that the rank may see, and a context on it."""

    def __init__(self) -> None:
        self.lib: Any = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuCtxCreate_v2", ctypes.byref(context), 0, device)

    def call(self, name: str, *words: Any) -> None:
        """Call the function NAME; end where it fails."""
        code = getattr(self.lib, name)(*words)
        if code:
            sys.exit(f"{name} ends with {code}")

    def memory(self, count: int) -> Any:
        """Take COUNT bytes of the GPU, and fill them with zeros."""
        at = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(count))
        self.call("cuMemsetD8_v2", at, ctypes.c_ubyte(0), ctypes.c_size_t(count))
        return at

    def wait(self) -> None:
        """Begin the kernel, and wait for it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        flag = self.memory(4)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(flag))
        self.call("cuLaunchKernel", function, *(1,) * 6, 0, None, parameters, None)
        print("waits", flush=True)
        self.call("cuCtxSynchronize")

    def work(self) -> None:
        """Fill memory again and again."""
        at, size = self.memory(BYTES), ctypes.c_size_t(BYTES)
        end = time.monotonic() + WORK_S
        while time.monotonic() < end:  # one line of Python, which never moves
            self.call("cuMemsetD8_v2", at, ctypes.c_ubyte(1), size)


def has_gpu() -> bool:
    return os.environ.get("SPIN_ON") == "gpu"


def main(how: str) -> None:
    """Do what HOW says, on a GPU if there is one."""
    if has_gpu():
        gpu = Gpu()
        if how == "work":
            gpu.work()
            return
        held = gpu.memory(BYTES) if how == "hold" else None
        gpu.wait()
        del held
        return
    print("waits", flush=True)
    if how == "work":
        numbers = bytearray(BYTES >> 4)
        end = time.monotonic() + WORK_S
        while time.monotonic() < end:
            # Memory that is taken and left: a waiting loop does neither.
            numbers = bytearray(BYTES >> 4)
        print(len(numbers))
        return
    while True:
        pass


if __name__ == "__main__":
    main(sys.argv[1])
