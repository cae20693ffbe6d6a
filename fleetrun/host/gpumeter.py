"""The current use of the GPUs, polled by a separate process.

A stuck driver holds up only that process: readers see that nothing new arrives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from fleetrun.host import nvml
from fleetrun.host.nvml import Library
from fleetrun.run import itself, libc
from fleetrun.rundir import reading
from fleetrun.rundir.metricsfile import GpuUsage

# NVML_TEMPERATURE_GPU (nvml.h).
_SENSOR = 0


def ticks(period_s: float) -> Iterator[None]:
    """Yield at once and then every PERIOD_S seconds; missed times are not made up for."""
    due = time.monotonic()
    while True:
        yield
        now = time.monotonic()
        due = max(due + period_s, now)
        time.sleep(due - now)


def read(lib: Library, gpus: Sequence[tuple[int, object]]) -> list[GpuUsage]:
    """Return the current use of GPUS, given as pairs of number and handle."""
    uses = []
    for number, gpu in gpus:
        rates = nvml.ask(lib, "nvmlDeviceGetUtilizationRates", gpu)
        memory = nvml.ask(lib, "nvmlDeviceGetMemoryInfo", gpu)
        power_mw = nvml.ask(lib, "nvmlDeviceGetPowerUsage", gpu)
        uses.append(
            GpuUsage(
                number=number,
                uuid=nvml.ask(lib, "nvmlDeviceGetUUID", gpu) or "",
                name=nvml.ask(lib, "nvmlDeviceGetName", gpu) or "",
                use_percent=None if rates is None else rates.gpu,
                memory_used_bytes=None if memory is None else int(memory.used),
                memory_total_bytes=None if memory is None else int(memory.total),
                power_w=None if power_mw is None else power_mw / 1000,
                temperature_c=nvml.ask(lib, "nvmlDeviceGetTemperature", gpu, _SENSOR),
            )
        )
    return uses


def main(period_s: float) -> None:
    """Write a line of JSON every PERIOD_S seconds until our parent ends or stops reading."""
    # Before asking the driver, which may hang.
    libc.prctl(libc.PR_SET_PDEATHSIG, 9)
    try:
        lib = nvml.library()
        gpus = nvml.opened(lib)
    except Exception:  # noqa: BLE001 - no driver, no library: there is nothing to tell
        return
    if not gpus:
        return
    for _ in ticks(period_s):
        print(json.dumps([use._asdict() for use in read(lib, gpus)]), flush=True)


class GpuMeter:
    """Polls in a process, every PERIOD_S seconds; CODE replaces its program."""

    def __init__(self, period_s: float, code: str = "") -> None:
        program = f"from fleetrun.host import gpumeter; gpumeter.main({period_s})"
        words = [sys.executable, "-c", code] if code else itself.command(program)
        self._unread = b""
        self._newest: tuple[GpuUsage, ...] = ()
        self._at = 0.0
        self._period_s = period_s
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)

    def newest(self) -> tuple[GpuUsage, ...]:
        """Return the last answer; empty if there is none or it is stale."""
        try:
            while piece := os.read(self._fd, 65536):
                self._unread += piece
        except BlockingIOError:
            pass
        lines = self._unread.split(b"\n")
        self._unread = lines.pop()
        if lines:
            self._newest = tuple(reading.record(GpuUsage, use) for use in json.loads(lines[-1]))
            self._at = time.monotonic()
        is_old = time.monotonic() > self._at + 3 * self._period_s + 1
        return () if is_old else self._newest

    def close(self) -> None:
        """Kill the process; do not wait for one that hangs in the driver."""
        self._process.kill()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            # Otherwise its destructor would complain.
            self._process.returncode = -9
        if self._process.stdout is not None:
            self._process.stdout.close()
