"""Whether this host can take part in a generation: its GPUs, and the disk of its logs.

Each function may hang, and so runs in a child process of the launcher. It returns a sentence
without a full stop, empty if all is well.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from fleetrun.host import nvml as reader
from fleetrun.host.nvml import Library
from fleetrun.model import Gpu

# The driver frees the memory of a killed process within this time.
_GIVEN_BACK_S, _LOOK_S = 10.0, 0.2
# The share of memory that the driver itself may take, beside what was used before the job.
_SPARE_SHARE = 0.1
# Below this, a rank's log and an error file do not fit.
_LEAST_BYTES = 16 << 20
_TRIED_BYTES = 65536
_GIB, _MIB = 1 << 30, 1 << 20


def trouble(
    log_dir: str,
    before: Mapping[str, int],
    nvml: Callable[[], Library] | None = None,
    *,
    given_back_s: float = _GIVEN_BACK_S,
) -> str:
    """Return what is wrong with this host, whose GPUs had BEFORE bytes in use at first."""
    return _disk(log_dir) or (_gpus(before, nvml, given_back_s) if before else "")


def _disk(log_dir: str) -> str:
    """Return why no logs can be written to LOG_DIR; a trial file alone reveals quotas."""
    try:
        with tempfile.TemporaryFile(dir=log_dir, buffering=0) as file:
            if file.write(b"\0" * _TRIED_BYTES) < _TRIED_BYTES:
                return f"the disk of its logs, {log_dir}, is full"
        status = os.statvfs(log_dir)
    except OSError as error:
        return f"no log can be written to {log_dir} ({error.strerror})"
    free = status.f_bavail * status.f_frsize
    if free < _LEAST_BYTES:
        return f"the disk of its logs, {log_dir}, has {free / _MIB:.0f} MiB left"
    return ""


def _gpus(
    before: Mapping[str, int], nvml: Callable[[], Library] | None, given_back_s: float
) -> str:
    """Return which GPU is lost, or still holds memory of ended ranks."""
    library = (nvml or reader.library)()
    until = time.monotonic() + given_back_s
    while True:
        answer = reader.survey(library)
        parts = [part for gpu in answer.gpus for part in (gpu, *gpu.instances)]
        absent = sorted(set(before) - {part.uuid for part in parts})
        if absent:
            why = "; ".join(text for _, text in (*answer.lost, *answer.barred))
            return f"{absent[0]} does not answer{f': {why}' if why else ''}"
        full = _full(before, parts)
        if not full or time.monotonic() >= until:
            return full
        time.sleep(_LOOK_S)


def _full(before: Mapping[str, int], gpus: Sequence[Gpu]) -> str:
    for gpu in gpus:
        used, total = gpu.used_bytes or 0, gpu.total_bytes or 0
        if gpu.uuid in before and used > before[gpu.uuid] + _SPARE_SHARE * total:
            amount = f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB"
            pids = ", ".join(str(pid) for pid, _ in gpu.users)
            users = f" (pid {pids})" if pids else ""
            return f"{amount} of the memory of {gpu.uuid} are still in use{users}"
    return ""
