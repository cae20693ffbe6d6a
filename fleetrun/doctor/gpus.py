"""Checks NVIDIA's driver, CUDA and each GPU, which are asked in children."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.cuda import CudaStart
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host.nvml import FILES, Survey
from fleetrun.model import Gpu
from fleetrun.text import counted, format_size

# NVML_COMPUTEMODE_* of nvml.h, in which ranks may not compute.
_MODES = {
    2: ("Prohibited", "no process may compute on it", error),
    3: ("Exclusive Process", "a second process on it, as with --oversubscribe, ends", warning),
}
_RELOAD = "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; nvidia-smi  # or a reboot"
_LIBRARY = (
    "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...  # a container; on "
    "the machine itself: install the driver's libraries again"
)
# The errors of NVML at its start, their consequences, and the fixes.
_NVML = (
    (
        "river/library version mismatch",
        "the loaded driver and its library differ since an upgrade, so CUDA cannot start",
        _RELOAD,
    ),
    ("LibraryNotFound", "its library, libnvidia-ml.so.1, is missing", _LIBRARY),
    ("DriverNotLoaded", "no rank can use a GPU", "sudo modprobe nvidia && nvidia-smi"),
)
# The codes of cuInit (cuda.h), their meaning, and the fixes.
_STARTS = {
    100: (
        "it sees no GPU",
        "ls -l /dev/nvidia*; env | grep -E 'CUDA|NVIDIA'  # a container: docker run --gpus all",
    ),
    802: (
        "the switches between the GPUs are not set up",
        "sudo systemctl enable --now nvidia-fabricmanager  # of exactly the driver's version",
    ),
    803: (
        "the loaded driver and libcuda.so.1 are of different versions",
        f"ldconfig -p | grep libcuda  # an old or a container's own one; else {_RELOAD}",
    ),
    804: (
        "a libcuda.so.1 for newer data-centre GPUs (cuda-compat) is found first",
        "ldconfig -p | grep libcuda; echo $LD_LIBRARY_PATH  # take the folder compat out",
    ),
}
_LOOK = "nvidia-smi; sudo dmesg | tail"


def check(job: CheckedJob, root: str = "/") -> Iterator[Finding]:
    """Check the driver, CUDA and each GPU."""
    driver = job.driver
    if driver is None:
        yield ok("GPUs", "no NVIDIA driver")
        return
    has_files = any(os.path.exists(os.path.join(root, path)) for path in FILES)
    if driver.trouble and not driver.is_stuck and not has_files:
        yield warning(
            "GPUs",
            "the machine has NVIDIA's driver, but its device files are missing",
            "ranks run on the CPU",
            "docker run --gpus all ...  # a container; on the machine itself: sudo nvidia-smi",
        )
        return
    if driver.trouble:
        yield _silent(driver, job.cuda)
    for index, why in driver.lost:
        yield error(
            "GPU",
            f"GPU {index} does not work ({why})",
            "a job that requests it does not start",
            "nvidia-smi; dmesg | grep -i xid  # a reset, a reboot; CUDA_VISIBLE_DEVICES till then",
        )
    for index, why in driver.barred:
        yield warning(
            "GPU",
            f"GPU {index} may not be opened ({why})",
            "the job runs without it",
            "docker run --gpus all ...  # or ask the batch system for it",
        )
    for gpu in driver.gpus:
        troubles = list(_gpu(gpu))
        size = "" if gpu.total_bytes is None else f", {format_size(gpu.total_bytes)}"
        mig = f", {counted(len(gpu.instances), 'MIG instance')}" if gpu.is_mig else ""
        yield from troubles or [ok("GPU", f"GPU {gpu.number}: {gpu.name}{size}{mig}")]
    if job.cuda is not None:
        yield _cuda(job.cuda, driver)


def _silent(driver: Survey, cuda: CudaStart | None) -> Finding:
    if driver.is_stuck:
        return error(
            "NVIDIA driver",
            f"it is stuck: {driver.trouble}",
            "whatever uses a GPU here hangs, and cannot be killed",
            "dmesg | tail; nvidia-smi  # often only a reboot helps",
        )
    means, fix = next(
        (explanation for mark, *explanation in _NVML if mark in driver.trouble),
        ("health, use and order of the GPUs are not known", _LOOK),
    )
    # Ranks need CUDA, not NVML.
    finding = warning if cuda is not None and cuda.gpus else error
    return finding("NVIDIA driver", f"NVML does not work: {driver.trouble}", means, fix)


def _cuda(start: CudaStart, driver: Survey) -> Finding:
    """Judge whether CUDA starts and sees the GPUs that NVML sees."""
    check, means = "CUDA", "no rank can use a GPU"
    if start.trouble:
        fix = _LIBRARY if "libcuda" in start.trouble else _LOOK
        return error(check, f"it does not start: {start.trouble}", means, fix)
    if start.code:
        why, fix = _STARTS.get(start.code, ("", _LOOK))
        seen = f"cuInit ends with {start.code}{f', {start.name}' if start.name else ''}"
        return error(check, f"{seen}{f': {why}' if why else ''}", means, fix)
    # With MIG, CUDA shows one instance and no whole GPU.
    expected = 1 if any(gpu.is_mig for gpu in driver.gpus) else len(driver.gpus)
    if start.gpus < expected:
        return error(
            check,
            f"it shows {start.gpus} of the {len(driver.gpus)} GPUs that NVML shows",
            "ranks of the others end at once",
            "ls -l /dev/nvidia*; nvidia-smi -q | grep -i -A2 'compute mode'; sudo dmesg | tail",
        )
    return ok(check, f"it starts, with {counted(start.gpus, 'GPU')}")


def _gpu(gpu: Gpu) -> Iterator[Finding]:
    """Yield who uses GPU, and what keeps ranks from it."""
    name, number = f"GPU {gpu.number}", gpu.number
    users = dict(user for part in gpu.parts for user in part.users)
    if users:
        shown = [f"pid {pid}" + (f" ({text})" if text else "") for pid, text in users.items()]
        yield warning(
            "GPU in use",
            f"{name} is used by {', '.join(shown)}",
            "ranks may run out of its memory, and share its time",
            f"kill {' '.join(map(str, users))}  # if they are left over; or take others by --gpus",
        )
    elif gpu.is_filled:
        used, total = (format_size(size or 0) for size in (gpu.used_bytes, gpu.total_bytes))
        yield warning(
            "GPU in use",
            f"{used} of {name}'s {total} is in use, by no process that can be seen",
            "a process outside this container uses it, or a dead process has left it",
            f"nvidia-smi -i {number}; fuser -v /dev/nvidia{number}",
        )
    if gpu.compute_mode in _MODES:
        mode, means, finding = _MODES[gpu.compute_mode]
        fix = f"nvidia-smi -i {number} -c DEFAULT  # by root"
        yield finding("compute mode", f"{name} is in compute mode {mode}", means, fix)
