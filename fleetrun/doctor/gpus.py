"""Findings about GPUs, by what NVIDIA's driver reports, and devices of Paddle's plug-ins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.doctor.nvidia import CudaStart, Gpu, Gpus, Xid
from fleetrun.plan import kinds
from fleetrun.text import counted, format_size

# Bits of NVML's clocks event reasons (nvml.h) that mean trouble; a power cap does not.
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "it is too hot (software thermal slowdown)",
    0x40: "it is too hot (hardware thermal slowdown)",
    0x80: "the power supply limits it",
}
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
# The share of memory that a GPU may use without any process.
_OWN_SHARE = 0.05


def judge(gpus: Gpus, *, has_others: bool = False) -> Iterator[Finding]:
    """Yield the findings about GPUS; HAS_OTHERS: there are accelerators of another kind."""
    if not gpus.has_driver:
        yield ok("GPUs", f"no NVIDIA driver{'' if has_others else ': ranks run on the CPU'}")
        return
    if not gpus.has_files:
        yield warning(
            "GPUs",
            f"the machine has NVIDIA's driver {gpus.driver}".rstrip()
            + ", but its device files are missing",
            "ranks run on the CPU",
            "docker run --gpus all ...  # a container; on the machine itself: sudo nvidia-smi",
        )
        return
    if gpus.trouble:
        yield _silent(gpus)
        if gpus.cuda_start is not None:
            yield from _cuda(gpus.cuda_start, gpus)
        yield from _log(gpus)
        return
    for index, why in gpus.lost:
        yield error(
            "GPU",
            f"GPU {index} does not work ({why})",
            "a job that requests it does not start",
            "nvidia-smi; dmesg | grep -i xid  # a reset, a reboot; CUDA_VISIBLE_DEVICES till then",
        )
    for index, why in gpus.barred:
        yield warning(
            "GPU",
            f"GPU {index} may not be opened ({why})",
            "the job runs without it",
            "docker run --gpus all ...  # or ask the batch system for it",
        )
    if not gpus.gpus:
        yield warning(
            "GPUs",
            f"driver {gpus.driver} has none",
            "ranks run on the CPU",
            "nvidia-smi -L; lspci | grep -i nvidia",
        )
    for gpu in gpus.gpus:
        yield from _gpu(gpu)
    if gpus.gpus and gpus.cuda_start is not None:
        yield from _cuda(gpus.cuda_start, gpus)
    yield from _topology(gpus)
    yield from _log(gpus)


def _cuda(start: CudaStart, gpus: Gpus) -> Iterator[Finding]:
    """Yield whether CUDA starts and sees the GPUs that NVML sees."""
    check, means = "CUDA", "no rank can use a GPU"
    if start.trouble:
        fix = _LIBRARY if "libcuda" in start.trouble else "nvidia-smi; sudo dmesg | tail"
        yield error(check, f"it does not start: {start.trouble}", means, fix)
        return
    if start.code:
        why, fix = _STARTS.get(start.code, ("", "nvidia-smi; sudo dmesg | tail"))
        if not start.has_uvm:
            why, fix = "/dev/nvidia-uvm, which it needs, is missing", _UVM
        seen = f"cuInit ends with {start.code}{f', {start.name}' if start.name else ''}"
        yield error(check, f"{seen}{f': {why}' if why else ''}", means, fix)
        return
    # With MIG, CUDA shows one instance and no whole GPU.
    expected = 1 if any(gpu.is_mig for gpu in gpus.gpus) else len(gpus.gpus)
    if start.gpus < expected:
        yield error(
            check,
            f"it shows {start.gpus} of the {len(gpus.gpus)} GPUs that NVML shows",
            "ranks of the others end at once",
            "ls -l /dev/nvidia*; nvidia-smi -q | grep -i -A2 'compute mode'; sudo dmesg | tail",
        )
    else:
        yield ok(check, f"it starts, with {counted(start.gpus, 'GPU')}")


def _silent(gpus: Gpus) -> Finding:
    if gpus.is_stuck:
        return error(
            "NVIDIA driver",
            f"it is stuck: {gpus.trouble}",
            "whatever uses a GPU here hangs, and cannot be killed",
            "dmesg | tail; nvidia-smi  # often only a reboot helps",
        )
    means, fix = next(
        (explanation for mark, *explanation in _NVML if mark in gpus.trouble),
        ("health, use and order of the GPUs are not known", "nvidia-smi; sudo dmesg | tail"),
    )
    start = gpus.cuda_start
    # Ranks need CUDA, not NVML.
    is_usable = start is not None and not start.code and not start.trouble and start.gpus > 0
    finding = warning if is_usable else error
    return finding("NVIDIA driver", f"NVML does not work: {gpus.trouble}", means, fix)


def _gpu(gpu: Gpu) -> Iterator[Finding]:
    """Yield what is wrong with one GPU, or one line if nothing is."""
    troubles = [*_memory(gpu), *_state(gpu), *_connections(gpu)]
    yield from troubles
    if not troubles:
        room = "" if gpu.memory is None else f", {format_size(gpu.memory)}"
        capability = "" if gpu.capability is None else f", sm_{''.join(map(str, gpu.capability))}"
        links = "" if gpu.nvlinks is None else f", {gpu.nvlinks[0]} NVLinks"
        mig = f", {gpu.instances} MIG instances" if gpu.is_mig else ""
        yield ok("GPU", f"GPU {gpu.number}: {gpu.name}{room}{capability}{links}{mig}")


def _memory(gpu: Gpu) -> Iterator[Finding]:
    """Yield the users of GPU's memory, and its faults."""
    if gpu.users:
        shown = ", ".join(
            f"pid {user.pid}"
            + (f" ({user.name})" if user.name else "")
            + (f" {format_size(user.used)}" if user.used is not None else "")
            for user in gpu.users
        )
        yield warning(
            "GPU in use",
            f"GPU {gpu.number} is used by {shown}",
            "ranks may run out of its memory, and share its time",
            "kill "
            + " ".join(str(user.pid) for user in gpu.users)
            + "  # if they are left over; or take others by --gpus",
        )
    elif gpu.memory and gpu.used is not None and gpu.used > _OWN_SHARE * gpu.memory:
        yield warning(
            "GPU in use",
            f"{format_size(gpu.used)} of GPU {gpu.number}'s {format_size(gpu.memory)} is in use, "
            "by no process that can be seen",
            "a process outside this container uses it, or a dead process has left it",
            f"nvidia-smi -i {gpu.number}; fuser -v /dev/nvidia{gpu.number}",
        )
    reset = f"nvidia-smi --gpu-reset -i {gpu.number}  # when nothing uses it; or a reboot"
    if gpu.is_remap_failed:
        yield error(
            "GPU memory",
            f"GPU {gpu.number} cannot replace a broken row of its memory",
            "results may be wrong or the job may end at any moment; the GPU has to be replaced",
            f"nvidia-smi -q -d ROW_REMAPPER -i {gpu.number}",
        )
    elif gpu.is_remap_pending:
        yield warning(
            "GPU memory",
            f"GPU {gpu.number} waits for a reset to replace broken memory",
            "the next error there ends the job",
            reset,
        )
    if gpu.ecc_errors:
        yield error(
            "GPU memory",
            f"GPU {gpu.number} has had {gpu.ecc_errors} uncorrected ECC errors",
            "each ends the process whose memory it hits",
            reset,
        )


def _state(gpu: Gpu) -> Iterator[Finding]:
    """Yield what keeps GPU from computing or slows it down."""
    if gpu.is_mig and not gpu.instances:
        yield error(
            "MIG",
            f"GPU {gpu.number} is in MIG mode, but has no instance",
            "nothing can run on it",
            f"nvidia-smi mig -i {gpu.number} -cgi 19 -C  # or -mig 0",
        )
    elif gpu.is_mig and gpu.instances > 1:
        yield warning(
            "MIG",
            f"GPU {gpu.number} is split into {gpu.instances} MIG instances",
            "NCCL does not connect instances, so no more than one rank can train on them together",
            f"nvidia-smi -i {gpu.number} -mig 0  # by root, when nobody uses it",
        )
    mode = f"nvidia-smi -i {gpu.number} -c DEFAULT  # by root"
    if gpu.compute_mode == "prohibited":
        seen = f"GPU {gpu.number} is in compute mode Prohibited"
        yield error("compute mode", seen, "no process may compute on it", mode)
    elif gpu.compute_mode == "exclusive process":
        seen = f"GPU {gpu.number} is in compute mode Exclusive Process"
        means = "a second process on it, as with --oversubscribe, ends at once"
        yield warning("compute mode", seen, means, mode)
    causes = [text for bit, text in THROTTLES.items() if (gpu.throttle or 0) & bit]
    if causes:
        yield warning(
            "GPU clocks",
            f"GPU {gpu.number} is slowed down: {', '.join(causes)}",
            "all ranks wait for the slowest",
            f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.number}  # look at fans and power",
        )


def _connections(gpu: Gpu) -> Iterator[Finding]:
    """Yield which of GPU's connections are missing."""
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


def _topology(gpus: Gpus) -> Iterator[Finding]:
    """Yield how the GPUs are connected."""
    if not gpus.links:
        return
    levels = list(dict.fromkeys(gpus.links.values()))
    linked = all(gpu.nvlinks is not None and gpu.nvlinks[0] for gpu in gpus.gpus)
    seen = f"{len(gpus.gpus)} GPUs, {'NVLink and ' if linked else ''}PCIe: {', '.join(levels)}"
    if "across the system" in levels and not linked:
        yield warning(
            "GPU topology",
            seen,
            "some reach each other only through the link between processors, which slows NCCL",
            "nvidia-smi topo -m  # choose near ones by --gpus",
        )
    else:
        yield ok("GPU topology", seen)


def _log(gpus: Gpus) -> Iterator[Finding]:
    """Yield the errors of GPUs in the kernel's log."""
    if gpus.log_refusal:
        yield warning(
            "Xid errors",
            f"the kernel's log cannot be read ({gpus.log_refusal})",
            "errors of GPUs appear only there",
            "sudo dmesg | grep -i xid",
        )
        return
    errors: dict[tuple[int, str], list[Xid]] = {}
    for xid in gpus.xids:
        errors.setdefault((xid.number, xid.bus), []).append(xid)
    for (number, bus), rows in errors.items():
        seen = f"Xid {number} of the GPU at {bus}, {len(rows)} times since the kernel's log began"
        fix = "dmesg | grep -i xid  # NVIDIA's list of Xid errors says what each is"
        if number in _GRAVE_XIDS:
            means = "that GPU may need a reset or be broken"
            yield error("Xid errors", seen, means, fix)
        else:
            yield warning("Xid errors", seen, "usually a fault of the program, not of the GPU", fix)
    if not errors:
        yield ok("Xid errors", "none in the kernel's log")


def judge_plugins(counts: Mapping[str, int], absent: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the devices in COUNTS, by kind, and why others are ABSENT."""
    for kind, count in counts.items():
        if count:
            seen = f"{count} of Paddle's kind {kind}; ranks talk to each other by xccl"
            yield ok(f"{kinds.label(kind)}s", seen)
    for kind, why in absent.items():
        if kind != "gpu":
            yield _absent(kind, why, has_plugin=kind in counts)


def _absent(kind: str, why: str, *, has_plugin: bool) -> Finding:
    """Return the finding about a KIND that is present but cannot be used, and WHY."""
    means = "ranks do not use them"
    if kind not in kinds.VENDORS and not has_plugin:
        fix = f"install the plug-in for this Paddle's version, or unset {kinds.ROOT}"
        return warning("plug-ins", why, means, fix)
    if has_plugin:
        masks = ", ".join(kinds.masks(kind))
        file = kinds.VENDORS.get(kind, kinds.Vendor()).file
        driver = f"ls /dev/{file}*" if file else "look at the vendor's driver"
        fix = f"{driver}  # are they there, may this user open them, does {masks} hide them?"
    else:
        package = kinds.VENDORS[kind].package or f"the plug-in for {kinds.label(kind)}s"
        fix = f"pip install {package}  # of Paddle's own version"
    return warning(f"{kinds.label(kind)}s", why, means, fix)
