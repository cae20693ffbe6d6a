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
    from collections.abc import Sequence

    from fleetrun.probe.nvml import Library

# NVML_TEMPERATURE_GPU (nvml.h).
_SENSOR = 0


def read(lib: Library, gpus: Sequence[tuple[int, object]]) -> list[GpuUsage]:
    """Return how the GPUS are, of which each has a number."""
    from fleetrun.probe import nvml  # the process that asks has it already

    found = []
    for number, gpu in gpus:
        rates = nvml.ask(lib, "nvmlDeviceGetUtilizationRates", gpu)
        memory = nvml.ask(lib, "nvmlDeviceGetMemoryInfo", gpu)
        power_mw = nvml.ask(lib, "nvmlDeviceGetPowerUsage", gpu)
        found.append(
            GpuUsage(
                number=number,
                uuid=nvml.text(nvml.ask(lib, "nvmlDeviceGetUUID", gpu) or ""),
                name=nvml.text(nvml.ask(lib, "nvmlDeviceGetName", gpu) or ""),
                use_percent=None if rates is None else rates.gpu,
                memory_used_bytes=None if memory is None else int(memory.used),
                memory_total_bytes=None if memory is None else int(memory.total),
                power_w=None if power_mw is None else power_mw / 1000,
                temperature_c=nvml.ask(lib, "nvmlDeviceGetTemperature", gpu, _SENSOR),
            )
        )
    return found


def opened(lib: Library) -> list[tuple[int, object]]:
    """Return the GPUs that can be used, numbered as `fleetrun --gpus` numbers them.

    The instances of one that is divided (MIG) come before it, with its number.
    """
    from fleetrun.probe import nvml

    return [
        (number, part)
        for number, gpu in enumerate(nvml.usable(lib))
        for part in (*nvml.instances(lib, gpu).values(), gpu)
    ]


def main(period_s: float) -> None:
    """Write a line of JSON each PERIOD_S, until whoever started us ends or reads no more."""
    # Before the driver is asked, which may take for ever.
    libc.prctl(libc.PR_SET_PDEATHSIG, 9)
    from fleetrun.probe import nvml  # this process only

    try:
        lib = nvml.library()
        gpus = opened(lib)
    except Exception:  # noqa: BLE001 - no driver, no library: there is nothing to tell
        return
    if not gpus:
        return
    for _ in ticks(period_s):
        line = json.dumps([one._asdict() for one in read(lib, gpus)])
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
        # Its standard input is ours, by which the launcher sees that nobody is left.
        self._process = subprocess.Popen(
            words,
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
