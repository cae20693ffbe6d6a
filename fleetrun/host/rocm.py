"""AMD's GPUs, as the kernel shows them to ROCm."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from fleetrun.host import files, paddles
from fleetrun.model import Facts, Request
from fleetrun.plan.masks import ROCR_MASK

# AMD's compute driver lists its nodes here; the processors are among them.
_NODES = "sys/class/kfd/kfd/topology/nodes"
_RENDER = re.compile(r"^drm_render_minor (\d+)$", re.MULTILINE)


def with_gpus(facts: Facts, request: Request, root: str, path: Sequence[str]) -> Facts:
    """Complete FACTS with AMD's GPUs if a Paddle on PATH is built for them or they are named.

    A laptop's Paddle for CPUs must not be told to use the GPU in its processor.
    """
    count = _count(root)
    mask = facts.environ.get(ROCR_MASK)
    if mask is not None:
        count = min(count, len([entry for entry in mask.split(",") if entry.strip()]))
    if not count:
        return facts
    is_named = request.devices is not None or request.nproc_per_node == "gpu"
    if is_named or paddles.is_for_rocm(path):
        counts = {"gpu": count, **facts.device_counts}
        return facts._replace(device_counts=counts, is_rocm=True)
    plural = "s are" if count > 1 else " is"
    why = (
        f"{count} AMD GPU{plural} here, and the Paddle of this Python is not built for ROCm "
        "(--nproc_per_node=gpu uses them with another one)"
    )
    return facts._replace(absent={**facts.absent, "gpu": why})


def _count(root: str) -> int:
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
