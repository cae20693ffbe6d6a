"""What the GPUs do just now, asked again and again in a process of its own.

A driver that is stuck holds up that process only: readers see that nothing new comes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from fleetrun.probe.ticks import ticks
from fleetrun.records import metricsfile
from fleetrun.records.metricsfile import GpuUsage
from fleetrun.run import itself, libc

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.probe.nvml import Memory, MeterLibrary


def read(lib: MeterLibrary, handles: list[tuple[int, object]]) -> list[GpuUsage]:
    """Return how the GPUs of HANDLES are."""

    def ask(question: Callable[[], float]) -> float | None:
        try:
            return question()
        except lib.NVMLError:
            return None

    found = []
    for number, handle in handles:
        try:
            memory: Memory | None = lib.nvmlDeviceGetMemoryInfo(handle)
        except lib.NVMLError:
            memory = None
        power_mw = ask(lambda handle=handle: lib.nvmlDeviceGetPowerUsage(handle))  # type: ignore[misc]
        found.append(
            GpuUsage(
                number=number,
                uuid=_text(lib.nvmlDeviceGetUUID(handle)),
                name=_text(lib.nvmlDeviceGetName(handle)),
                use_percent=ask(
                    lambda handle=handle: lib.nvmlDeviceGetUtilizationRates(handle).gpu  # type: ignore[misc]
                ),
                memory_used_bytes=None if memory is None else int(memory.used),
                memory_total_bytes=None if memory is None else int(memory.total),
                power_w=None if power_mw is None else power_mw / 1000,
                temperature_c=ask(
                    lambda handle=handle: lib.nvmlDeviceGetTemperature(  # type: ignore[misc]
                        handle, lib.NVML_TEMPERATURE_GPU
                    )
                ),
            )
        )
    return found


def opened(lib: MeterLibrary) -> list[tuple[int, object]]:
    """Return the GPUs that can be used, numbered as `fleetrun --gpus` numbers them.

    The instances of one that is divided (MIG) come before it, with its number.
    """
    from fleetrun.probe import nvml  # the process that asks has it already

    lib.nvmlInit()
    return [
        (number, part)
        for number, gpu in enumerate(nvml.usable(lib))
        for part in (*nvml.instances(lib, gpu).values(), gpu)
    ]


def _text(answer: str | bytes) -> str:
    """Return what pynvml says as text; older ones give bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer


def main(period_s: float) -> None:
    """Write a line of JSON each PERIOD_S, until whoever started us ends or reads no more."""
    # Before the driver is asked, which may take for ever.
    libc.prctl(libc.PR_SET_PDEATHSIG, 9)
    from fleetrun.probe import nvml  # this process only

    try:
        lib = nvml.meter_module()
        handles = opened(lib)
    except Exception:  # noqa: BLE001 - no driver, no library: there is nothing to tell
        return
    if not handles:
        return
    for _ in ticks(period_s):
        line = json.dumps([one._asdict() for one in read(lib, handles)])
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


class GpuMeter:
    """The process that asks each PERIOD_S, and its last answer; CODE is its program."""

    def __init__(self, period_s: float, code: str = "") -> None:
        own = f"from fleetrun.probe import gpumeter; gpumeter.main({period_s})"
        words = [sys.executable, "-c", code] if code else itself.command(own)
        self._rest = b""
        self._newest: tuple[GpuUsage, ...] = ()
        self._at = 0.0
        self._period_s = period_s
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)

    def newest(self) -> tuple[GpuUsage, ...]:
        """Return the last answer; nothing if there is none, or it is old."""
        try:
            while piece := os.read(self._fd, 65536):
                self._rest += piece
        except BlockingIOError:
            pass
        lines = self._rest.split(b"\n")
        self._rest = lines.pop()
        if lines:
            self._newest = tuple(map(metricsfile.gpu, json.loads(lines[-1])))
            self._at = time.monotonic()
        is_old = time.monotonic() > self._at + 3 * self._period_s + 1
        return () if is_old else self._newest

    def close(self) -> None:
        """Kill the process; one that hangs in the driver is left behind."""
        self._process.kill()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            # Else its destructor would complain.
            self._process.returncode = -9
        if self._process.stdout is not None:
            self._process.stdout.close()
