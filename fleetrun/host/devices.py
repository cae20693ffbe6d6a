"""The accelerators of this host."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import files
from fleetrun.host.nvml import DriverQuery, Library, Survey, library
from fleetrun.model import Facts, GpuUse, Request
from fleetrun.plan import kinds, masks
from fleetrun.run import proc
from fleetrun.rundir.variables import ASSUME_DEVICES
from fleetrun.text import elided, is_digits, visible

# Any of these means that an NVIDIA driver can be asked (/dev/dxg: under Windows).
_NVIDIA = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")

# A folder for each GPU, with one for each instance of it (NVIDIA's MIG User Guide, "/proc based
# nvidia-capabilities").
_CAPABILITIES = "proc/driver/nvidia/capabilities"

_AMD = "sys/class/kfd"

_MASK = "CUDA_VISIBLE_DEVICES"

_DIGITS = "0123456789"

# Enough characters to recognise a process.
_WIDEST_COMMAND = 60


def by_files(root: str) -> dict[str, int]:
    """Count the devices that appear as files; GPUs are left to their driver."""
    names = _numbered_names(root)
    counts = {
        kind: names.count(vendor.file) for kind, vendor in kinds.VENDORS.items() if vendor.file
    }
    return {kind: count for kind, count in counts.items() if count}


def gpus_by_files(environ: Mapping[str, str], root: str = "/") -> int | None:
    """Count the NVIDIA GPUs that a launch with ENVIRON may use; None if files do not tell.

    Divided GPUs, and those under Windows, are known only to the driver, which is not asked.
    """
    folder = os.path.join(root, _CAPABILITIES)
    if not os.path.isdir(folder):
        is_driven = any(os.path.exists(os.path.join(root, path)) for path in _NVIDIA)
        return None if is_driven or has_amd(root) else 0
    for gpu in os.listdir(folder):
        divided = os.path.join(folder, gpu, "mig")
        if os.path.isdir(divided) and any(entry.startswith("gi") for entry in os.listdir(divided)):
            return None
    count, mask = _numbered(root, "nvidia"), environ.get(_MASK, "all").strip()
    return count if mask == "all" else min(count, len(masks.listed(mask)))


def may_use_gpus(request: Request) -> bool:
    """Whether REQUEST would use GPUs."""
    return request.nproc_per_node != "cpu" and request.device_kind in {None, "gpu"}


def has_amd(root: str) -> bool:
    """Whether AMD's compute driver is here."""
    return os.path.exists(os.path.join(root, _AMD))


def ask_driver(
    request: Request, root: str, nvml: Callable[[], Library] | None
) -> DriverQuery | None:
    """Start a query to NVIDIA's driver, if it is here and REQUEST may want its GPUs."""
    if not may_use_gpus(request):
        return None
    if not any(os.path.exists(os.path.join(root, path)) for path in _NVIDIA):
        return None

    return DriverQuery(nvml or library, wants_bus=request.bind != "none")


def with_gpus(facts: Facts, survey: Survey, root: str) -> Facts:
    """Complete FACTS with the GPUs of SURVEY or, if it failed, with their device files."""
    if survey.is_stuck:
        mask = facts.environ.get(_MASK, "all").strip()
        if mask == "all":
            raise EnvironmentFault(
                f"The NVIDIA driver is stuck: {survey.trouble}. Look at `nvidia-smi` and `dmesg`; "
                f"often only a reboot helps. To start without asking it, name the GPUs in {_MASK}, "
                "or train on the CPU with --nproc_per_node=cpu."
            )
        note = f"The NVIDIA driver is stuck: {survey.trouble}; {_MASK}={mask} is believed."
        count = _numbered(root, "nvidia") or len(mask.split(","))
    elif survey.trouble:
        # Driver and library disagree; the device files still give the number.
        count = _numbered(root, "nvidia")
        note = f"NVML does not work ({survey.trouble}): GPUs are counted by their files in /dev."
        if not count:
            # A container without GPUs still shows the driver of its machine.
            why = "NVIDIA's driver is here, but none of its GPUs (docker run --gpus all gives them)"
            return facts._replace(absent={**facts.absent, "gpu": why})
    else:
        return _with_working_gpus(facts, survey)
    counts = {"gpu": count, **facts.device_counts} if count else facts.device_counts
    return facts._replace(
        device_counts=counts, notes=(*facts.notes, note) if count else facts.notes
    )


def _with_working_gpus(facts: Facts, survey: Survey) -> Facts:
    """Complete FACTS with the working GPUs, and note the others."""
    lost = [f"GPU {index} does not work ({why})" for index, why in survey.lost]
    barred = [f"GPU {index} may not be opened ({why})" for index, why in survey.barred]
    trouble = "; ".join((*lost, *barred))
    if not survey.gpus:
        if lost:
            raise EnvironmentFault(
                f"No GPU of this host can be used: {trouble}. Look at `nvidia-smi` and `dmesg`; "
                "to train on the CPU, give --nproc_per_node=cpu."
            )
        return facts._replace(absent={**facts.absent, "gpu": trouble}) if trouble else facts
    uuids = tuple(gpu.uuid for gpu in survey.gpus)
    instances = tuple(gpu.instances for gpu in survey.gpus)
    note = f"{trouble}: left out, and the others are numbered without, as CUDA numbers them."
    return facts._replace(
        device_counts={"gpu": len(uuids), **facts.device_counts},
        device_ids={"gpu": uuids},
        instances=instances if any(instances) else (),
        gpu_uses={uuid: _use(use) for gpu in survey.gpus for uuid, use in gpu.uses.items()},
        notes=(*facts.notes, note) if trouble else facts.notes,
    )


def _use(reported: tuple[int, int, tuple[int, ...]]) -> GpuUse:
    """Return a GPU's use as REPORTED by the driver, with the commands of processes."""
    used, total, pids = reported
    holders = []
    for pid in sorted(set(pids)):
        # The driver reports ids of the machine, which a container cannot see.
        command = elided(visible(proc.command(pid)), _WIDEST_COMMAND)
        holders.append(f"pid {pid} ({command})" if command else f"pid {pid}")
    return GpuUse(used, total, tuple(holders))


def assumed(text: str) -> dict[str, int]:
    """Parse FLEETRUN_ASSUME_DEVICES: `gpu:8`, `npu:4`, `cpu`."""
    if text == "cpu":
        return {}
    counts = {}
    for piece in text.split(","):
        kind, _, number = piece.strip().partition(":")
        if not kinds.is_name(kind) or not is_digits(number):
            raise UsageError(
                f"{ASSUME_DEVICES}={text}: give KIND:NUMBER, as gpu:8 or mlu:4, or cpu."
            )
        counts[kinds.SYNONYMS.get(kind, kind)] = int(number)
    return {kind: count for kind, count in counts.items() if count}


def _numbered(root: str, prefix: str) -> int:
    """Count the device files named PREFIX plus a number."""
    return _numbered_names(root).count(prefix)


def _numbered_names(root: str) -> list[str]:
    """Return the names in /dev that end with a number, without it."""
    names = files.names(os.path.join(root, "dev"))
    return [name.rstrip(_DIGITS) for name in names if name[-1] in _DIGITS]
