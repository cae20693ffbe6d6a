"""Checks NVIDIA's driver, CUDA and each GPU, which are asked in children, and the kernel's log."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.cuda import DRIVER, FILES, CudaStart
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host import files
from fleetrun.host.nvml import Survey
from fleetrun.model import Gpu
from fleetrun.postmortem import kernelfacts
from fleetrun.text import counted, format_size

_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
# Bits of NVML's clocks event reasons (nvml.h) that mean trouble; a power cap does not.
_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "it is too hot (software thermal slowdown)",
    0x40: "it is too hot (hardware thermal slowdown)",
    0x80: "the power supply limits it",
}
_EXCLUSIVE, _PROHIBITED = 3, 2  # NVML_COMPUTEMODE_* of nvml.h
# Errors (NVIDIA's list of Xids) after which a GPU must be reset or replaced; others, such as 13 and
# 31, are usually a program's fault.
_GRAVE_XIDS = {48, 62, 64, 74, 79, 92, 95, 119, 120, 140}
_RELOAD = "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; nvidia-smi  # or a reboot"
_LIBRARY = (
    "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...  # a container; on "
    "the machine itself: install the driver's libraries again"
)
_UVM = "sudo nvidia-modprobe -u -c=0  # or modprobe nvidia_uvm; a container: docker run --gpus all"
# The errors of NVML at its start, their consequences, and the fixes.
_NVML = (
    (
        "river/library version mismatch",
        "the loaded driver and its library differ since an upgrade, so CUDA cannot start",
        _RELOAD,
    ),
    ("LibraryNotFound", "its library, libnvidia-ml.so.1, is missing", _LIBRARY),
    ("DriverNotLoaded", "no rank can use a GPU", "sudo modprobe nvidia && nvidia-smi"),
    (
        "NVMLError_Unknown",
        "a container loses its GPUs when systemd reloads the host's control groups",
        "docker restart CONTAINER  # and docker run --device=/dev/nvidiactl ... to keep them",
    ),
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
    """Check the driver, CUDA, each GPU and the kernel's log."""
    driver = job.driver
    if driver is None:
        cpu = "" if job.kind not in {"cpu", "gpu"} else ": ranks run on the CPU"
        yield ok("GPUs", f"no NVIDIA driver{cpu}")
        return
    has_files = any(os.path.exists(os.path.join(root, path)) for path in FILES)
    if driver.trouble and not driver.is_stuck and not has_files:
        version = _VERSION.search(files.text(os.path.join(root, DRIVER)))
        yield warning(
            "GPUs",
            f"the machine has NVIDIA's driver{f' {version[0]}' if version else ''}, but its "
            "device files are missing",
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
    if not driver.trouble and not driver.gpus:
        seen, means = f"driver {driver.driver} has none", "ranks run on the CPU"
        yield warning("GPUs", seen, means, "nvidia-smi -L; lspci | grep -i nvidia")
    for gpu in driver.gpus:
        yield from _gpu(gpu)
    if job.cuda is not None:
        yield _cuda(job.cuda, driver, root)
    yield from kernel_log(os.path.join(root, "dev/kmsg"))


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
    is_usable = cuda is not None and not cuda.code and not cuda.trouble and cuda.gpus > 0
    finding = warning if is_usable else error
    return finding("NVIDIA driver", f"NVML does not work: {driver.trouble}", means, fix)


def _cuda(start: CudaStart, driver: Survey, root: str) -> Finding:
    """Judge whether CUDA starts and sees the GPUs that NVML sees."""
    check, means = "CUDA", "no rank can use a GPU"
    if start.trouble:
        fix = _LIBRARY if "libcuda" in start.trouble else _LOOK
        return error(check, f"it does not start: {start.trouble}", means, fix)
    if start.code:
        why, fix = _STARTS.get(start.code, ("", _LOOK))
        # CUDA needs it, NVML does not.
        files_of_cuda = ("dev/nvidia-uvm", "dev/dxg")
        if not any(os.path.exists(os.path.join(root, path)) for path in files_of_cuda):
            why, fix = "/dev/nvidia-uvm, which it needs, is missing", _UVM
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
    """Yield what is wrong with one GPU, or one line if nothing is."""
    troubles = [*_use(gpu), *_memory(gpu), *_speed(gpu)]
    yield from troubles
    if not troubles:
        room = "" if gpu.total_bytes is None else f", {format_size(gpu.total_bytes)}"
        capability = "" if gpu.capability is None else f", sm_{''.join(map(str, gpu.capability))}"
        links = "" if gpu.nvlinks is None else f", {gpu.nvlinks[0]} NVLinks"
        mig = f", {counted(len(gpu.instances), 'MIG instance')}" if gpu.is_mig else ""
        yield ok("GPU", f"GPU {gpu.number}: {gpu.name}{room}{capability}{links}{mig}")


def _use(gpu: Gpu) -> Iterator[Finding]:
    """Yield who uses GPU, and what keeps the job's ranks from it."""
    users = dict(user for part in gpu.parts for user in part.users)
    if users:
        shown = [f"pid {pid}" + (f" ({text})" if text else "") for pid, text in users.items()]
        yield warning(
            "GPU in use",
            f"GPU {gpu.number} is used by {', '.join(shown)}",
            "ranks may run out of its memory, and share its time",
            f"kill {' '.join(map(str, users))}  # if they are left over; or take others by --gpus",
        )
    elif gpu.is_filled:
        used, total = (format_size(size or 0) for size in (gpu.used_bytes, gpu.total_bytes))
        yield warning(
            "GPU in use",
            f"{used} of GPU {gpu.number}'s {total} is in use, by no process that can be seen",
            "a process outside this container uses it, or a dead process has left it",
            f"nvidia-smi -i {gpu.number}; fuser -v /dev/nvidia{gpu.number}",
        )
    if len(gpu.instances) > 1:
        yield warning(
            "MIG",
            f"GPU {gpu.number} is split into {len(gpu.instances)} MIG instances",
            "NCCL does not connect instances, so no more than one rank can train on them together",
            f"nvidia-smi -i {gpu.number} -mig 0  # by root, when nobody uses it",
        )
    mode = f"nvidia-smi -i {gpu.number} -c DEFAULT  # by root"
    if gpu.compute_mode == _PROHIBITED:
        seen = f"GPU {gpu.number} is in compute mode Prohibited"
        yield error("compute mode", seen, "no process may compute on it", mode)
    elif gpu.compute_mode == _EXCLUSIVE:
        seen = f"GPU {gpu.number} is in compute mode Exclusive Process"
        means = "a second process on it, as with --oversubscribe, ends at once"
        yield warning("compute mode", seen, means, mode)


def _memory(gpu: Gpu) -> Iterator[Finding]:
    """Yield the faults of GPU's memory."""
    check = "GPU memory"
    reset = f"nvidia-smi --gpu-reset -i {gpu.number}  # when nothing uses it; or a reboot"
    if gpu.is_remap_failed:
        yield error(
            check,
            f"GPU {gpu.number} cannot replace a broken row of its memory",
            "results may be wrong or the job may end at any moment; the GPU has to be replaced",
            f"nvidia-smi -q -d ROW_REMAPPER -i {gpu.number}",
        )
    elif gpu.is_remap_pending:
        seen = f"GPU {gpu.number} waits for a reset to replace broken memory"
        yield warning(check, seen, "the next error there ends the job", reset)
    if gpu.ecc_errors:
        seen = f"GPU {gpu.number} has had {gpu.ecc_errors} uncorrected ECC errors"
        yield error(check, seen, "each ends the process whose memory it hits", reset)


def _speed(gpu: Gpu) -> Iterator[Finding]:
    """Yield what slows GPU down: its clocks, PCIe lanes, NVLinks."""
    causes = [text for bit, text in _THROTTLES.items() if gpu.throttle & bit]
    if causes:
        yield warning(
            "GPU clocks",
            f"GPU {gpu.number} is slowed down: {', '.join(causes)}",
            "all ranks wait for the slowest",
            f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.number}  # look at fans and power",
        )
    if gpu.lanes is not None and gpu.lanes[0] < gpu.lanes[1]:
        yield warning(
            "PCIe",
            f"GPU {gpu.number} has {gpu.lanes[0]} of {gpu.lanes[1]} lanes",
            "data reach it more slowly than the others",
            f"nvidia-smi -q -i {gpu.number}  # a slot, riser or BIOS setting",
        )
    if gpu.nvlinks is not None and 0 < gpu.nvlinks[0] < gpu.nvlinks[1]:
        yield warning(
            "NVLink",
            f"GPU {gpu.number} has {gpu.nvlinks[0]} of {gpu.nvlinks[1]} links up",
            "allreduces among GPUs are slower",
            f"nvidia-smi nvlink -s -i {gpu.number}  # and nvidia-smi nvlink -e for its errors",
        )


def kernel_log(path: str) -> Iterator[Finding]:
    """Yield the errors of GPUs in the kernel's log at PATH."""
    check, xids = "Xid errors", Counter[tuple[int, str]]()
    try:
        for record in kernelfacts.records(path):
            for match in _XID.finditer(record.decode(errors="replace")):
                xids[int(match[2]), match[1].lower()] += 1
    except OSError as failure:
        seen = f"the kernel's log cannot be read ({failure.strerror})"
        means = "errors of GPUs appear only there"
        yield warning(check, seen, means, "sudo dmesg | grep -i xid")
        return
    fix = "dmesg | grep -i xid  # NVIDIA's list of Xid errors says what each is"
    for (number, bus), count in xids.items():
        seen = f"Xid {number} of the GPU at {bus}, {count} times since the kernel's log began"
        if number in _GRAVE_XIDS:
            yield error(check, seen, "that GPU may need a reset or be broken", fix)
        else:
            yield warning(check, seen, "usually a fault of the program, not of the GPU", fix)
    if not xids:
        yield ok(check, "none in the kernel's log")
