"""The current use of the GPUs, polled in a thread.

A stuck driver holds up only that thread: readers see that nothing new arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from fleetrun.host import nvml
from fleetrun.host.nvml import Library
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


def read(lib: Library, gpus: Sequence[tuple[int, object]]) -> tuple[GpuUsage, ...]:
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
    return tuple(uses)


class GpuMeter:
    """Polls in a thread, every PERIOD_S seconds; LIBRARY returns NVML."""

    def __init__(self, period_s: float, library: Callable[[], Library] = nvml.library) -> None:
        self._period_s = period_s
        self._newest: tuple[GpuUsage, ...] = ()
        self._at = 0.0
        threading.Thread(target=self._poll, args=(library,), daemon=True).start()

    def _poll(self, library: Callable[[], Library]) -> None:
        # No driver, no library: there is nothing to tell.
        with suppress(Exception):
            lib = library()
            gpus = nvml.opened(lib)
            for _ in ticks(self._period_s):
                self._newest, self._at = read(lib, gpus), time.monotonic()

    def newest(self) -> tuple[GpuUsage, ...]:
        """Return the last answer; empty if there is none or it is stale."""
        is_old = time.monotonic() > self._at + 3 * self._period_s + 1
        return () if is_old else self._newest
