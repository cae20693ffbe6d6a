"""The accelerators of this host, by their drivers and their files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import files, paddles
from fleetrun.host.nvml import DriverQuery, Library, Survey, has_driver, library
from fleetrun.model import Facts, Request
from fleetrun.plan import kinds, masks
from fleetrun.rundir.variables import ASSUME_DEVICES
from fleetrun.text import is_digits

# AMD's compute driver lists its nodes here; the processors are among them.
_NODES = "sys/class/kfd/kfd/topology/nodes"
_RENDER = re.compile(r"^drm_render_minor (\d+)$", re.MULTILINE)
_DIGITS = "0123456789"


def by_files(root: str) -> dict[str, int]:
    """Count the devices that appear as files; GPUs are left to their driver."""
    counts = {kind: _files(root, vendor.file) for kind, vendor in kinds.VENDORS.items()}
    return {kind: count for kind, count in counts.items() if count}


def _files(root: str, prefix: str) -> int:
    """Count the files in /dev that are named PREFIX plus a number."""
    names = files.names(os.path.join(root, "dev"))
    stems = [name.rstrip(_DIGITS) for name in names if name[-1] in _DIGITS]
    return stems.count(prefix) if prefix else 0


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


def ask_driver(
    request: Request, root: str, nvml: Callable[[], Library] | None
) -> DriverQuery | None:
    """Start a query to NVIDIA's driver, if it is here and REQUEST may want its GPUs."""
    is_wanted = has_driver(root) and _may_use_gpus(request)
    return DriverQuery(nvml or library) if is_wanted else None


def _may_use_gpus(request: Request) -> bool:
    return request.nproc_per_node != "cpu" and request.device_kind in {None, "gpu"}


def with_gpus(facts: Facts, survey: Survey, root: str) -> Facts:
    """Complete FACTS with the GPUs of SURVEY or, if it failed, with their device files."""
    if survey.is_stuck:
        raise EnvironmentFault(
            f"The NVIDIA driver is stuck: {survey.trouble}. Look at `nvidia-smi` and `dmesg`; "
            "often only a reboot helps. --nproc_per_node=cpu trains on the CPU."
        )
    if survey.trouble:
        count = _files(root, "nvidia")
        if not count:
            # A container without GPUs still shows the driver of its machine.
            why = "NVIDIA's driver is here, but none of its GPUs (docker run --gpus all gives them)"
            return facts._replace(absent={**facts.absent, "gpu": why})
        trouble = f"NVML does not work ({survey.trouble})"
        return _noted(facts, count, f"{trouble}: GPUs are counted by their files in /dev.")
    lost = [f"GPU {index} does not work ({why})" for index, why in survey.lost]
    barred = [f"GPU {index} may not be opened ({why})" for index, why in survey.barred]
    trouble = "; ".join((*lost, *barred))
    if survey.gpus:
        note = f"{trouble}: left out, and the others are numbered without, as CUDA numbers them."
        facts = facts._replace(gpus=survey.gpus)
        return _noted(facts, len(survey.gpus), note if trouble else "")
    if lost:
        raise EnvironmentFault(
            f"No GPU of this host can be used: {trouble}. Look at `nvidia-smi` and `dmesg`; "
            "to train on the CPU, give --nproc_per_node=cpu."
        )
    return facts._replace(absent={**facts.absent, "gpu": trouble}) if trouble else facts


def _noted(facts: Facts, gpus: int, note: str) -> Facts:
    """Complete FACTS with a number of GPUs, and a NOTE about it."""
    notes = (*facts.notes, note) if note else facts.notes
    return facts._replace(device_counts={"gpu": gpus, **facts.device_counts}, notes=notes)


def with_amd(facts: Facts, request: Request, root: str, path: Sequence[str]) -> Facts:
    """Complete FACTS with AMD's GPUs if a Paddle on PATH is built for them or they are named.

    A laptop's Paddle for CPUs must not be told to use the GPU in its processor.
    """
    count = _amd(root) if _may_use_gpus(request) else 0
    mask = facts.environ.get(masks.ROCR_MASK)
    if mask is not None:
        count = min(count, len([entry for entry in mask.split(",") if entry.strip()]))
    if not count:
        return facts
    paddle = paddles.find(path)
    is_named = request.devices is not None or request.nproc_per_node == "gpu"
    if is_named or (paddle is not None and paddle.hip):
        counts = {"gpu": count, **facts.device_counts}
        return facts._replace(device_counts=counts, is_rocm=True)
    return facts


def _amd(root: str) -> int:
    """Count the GPUs that we may use: a container lacks the render devices of others."""
    folder = os.path.join(root, _NODES)
    count = 0
    for node in files.names(folder):
        number = files.text(os.path.join(folder, node, "gpu_id")).strip()
        if not number or number == "0":
            continue
        minor = _RENDER.search(files.text(os.path.join(folder, node, "properties")))
        device = f"dev/dri/renderD{minor[1]}" if minor else "dev/kfd"
        count += os.path.exists(os.path.join(root, device))
    return count
