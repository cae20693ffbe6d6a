"""`fleetrun run_check`: Paddle's own check of its installation, on the devices of each rank.

Each rank runs what `paddle.utils.run_check` runs on one device, and then all ranks together run
what it runs on several: one training step of a `DataParallel` model. On plug-in devices only the
latter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_MASK, _SELECTED = "CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus"


def check() -> None:
    """Check this rank's device, and training together with the other ranks."""
    hide_other_gpus()
    from paddle.utils import install_check

    # On plug-in devices, which no mask hides, every rank would check the first device.
    is_plugged = os.environ.get("PADDLE_DISTRI_BACKEND") == "xccl"
    if not is_plugged:
        install_check.run_check()
    ranks = int(os.environ["PADDLE_TRAINERS_NUM"])
    if ranks > 1 or is_plugged:
        install_check.train_for_run_parallel()  # type: ignore[no-untyped-call]
        hosts = int(os.environ.get("PADDLE_NNODES") or 1)
        where = f" of {hosts} hosts" if hosts > 1 else ""
        print(f"PaddlePaddle works well on {ranks} rank{'s' * (ranks > 1)}{where}.")


def hide_other_gpus() -> None:
    """Make only this rank's GPUs visible: Paddle's check uses all visible ones."""
    places = os.environ.get(_SELECTED, "")
    if not places:
        return
    mask = os.environ.get(_MASK, "")
    visible = mask.split(",") if mask and mask != "all" else None
    chosen = [visible[int(place)] if visible else place for place in places.split(",")]
    os.environ[_MASK] = ",".join(chosen)
    os.environ[_SELECTED] = ",".join(str(place) for place in range(len(chosen)))


if __name__ == "__main__":
    # Python puts the folder of a script first on the path; our modules must not hide others there.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    check()
