"""`--gpus=free`: which GPUs nobody else uses."""

from __future__ import annotations

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Device, Facts, Gpu, Request
from fleetrun.plan import masks, origin
from fleetrun.plan.kinds import label

# The value of --gpus that means the free ones.
FREE = "free"


def free(
    request: Request, facts: Facts, visible: masks.Visible, kind: str, needed: int | None
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Return the first NEEDED free devices of VISIBLE (None: all), and which they are."""
    option = origin.option(request, "devices")
    if kind != "gpu":
        raise UsageError(f"{option}: which {label(kind)}s are free is not known; name them.")
    free_devices: list[Device] = []
    for device in visible.devices:
        gpu = _gpu(facts, visible, device)
        if gpu is None or gpu.used_bytes is None:
            raise EnvironmentFault(
                f"{option}: the driver does not tell whether GPU {device.id} is free; name the "
                "GPUs to use."
            )
        if not gpu.users and not gpu.is_filled:
            free_devices.append(device)
    names = ", ".join(device.id for device in free_devices[:needed])
    total = len(visible.devices)
    if not free_devices or len(free_devices) < (needed or 0):
        raise EnvironmentFault(
            f"{option}: {len(free_devices)} of {total} GPUs are free{names and f' ({names})'}, and "
            f"{needed or 1} wanted; `nvidia-smi` shows who uses the others; --gpus=all uses them "
            "anyway."
        )
    return tuple(free_devices[:needed]), (f"{option} takes {names} of {total} GPUs.",)


def _gpu(facts: Facts, visible: masks.Visible, device: Device) -> Gpu | None:
    """Return what the driver reports about a VISIBLE DEVICE; none if it is not a GPU."""
    known = visible.uuids[device.ordinal][0]
    parts = (part for gpu in facts.gpus for part in gpu.parts)
    # A mask may contain only the beginning of a UUID.
    return next((part for part in parts if known and part.uuid.startswith(known)), None)
