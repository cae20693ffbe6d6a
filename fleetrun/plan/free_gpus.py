"""GPUs in use by others: which are free, and remarks about the rest."""

from __future__ import annotations

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Device, Facts, Gpu, Request
from fleetrun.plan import masks, origin
from fleetrun.plan.kinds import label
from fleetrun.text import elided
from fleetrun.text import visible as visible_text

# The value of --gpus that means the free ones.
FREE = "free"

# Enough characters to recognise a process.
_WIDEST = 60
_GIB = 1 << 30


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
    total = len(visible.devices)
    if not free_devices or len(free_devices) < (needed or 0):
        names = ", ".join(device.id for device in free_devices)
        count = (
            f"{len(free_devices)} of {total} GPUs {'is' if len(free_devices) == 1 else 'are'} free"
        )
        count += f" ({names})" if free_devices else ""
        shortfall = f", and {needed} are requested" if needed and free_devices else ""
        wanted = ",".join(device.id for device in visible.devices[: needed or total])
        raise EnvironmentFault(
            f"{option}: {count}{shortfall}; `nvidia-smi` shows who uses the others; "
            f"--gpus={wanted} uses {'it' if total == 1 else 'them'} anyway."
        )
    chosen = tuple(free_devices[:needed])
    names = ", ".join(device.id for device in chosen)
    return chosen, (f"{option} takes {names} of {total} GPUs.",)


def remarks(
    facts: Facts, visible: masks.Visible, groups: tuple[tuple[Device, ...], ...]
) -> tuple[str, ...]:
    """Return remarks about devices of GROUPS whose memory others use."""
    lines = []
    for device in dict.fromkeys(device for group in groups for device in group):
        gpu = _gpu(facts, visible, device)
        if gpu is None or not gpu.is_filled:
            continue
        who = [
            f"pid {pid} ({elided(visible_text(text), _WIDEST)})" if text else f"pid {pid}"
            for pid, text in gpu.users
        ]
        users = f", by {', '.join(who)}" if who else ""
        amount = f"{(gpu.used_bytes or 0) / _GIB:.1f} of {(gpu.total_bytes or 0) / _GIB:.1f} GiB"
        lines.append(
            f"GPU {device.id} is in use: {amount} are taken{users}; --gpus={FREE} takes free ones."
        )
    return tuple(lines)


def _gpu(facts: Facts, visible: masks.Visible, device: Device) -> Gpu | None:
    """Return what the driver reports about a VISIBLE DEVICE."""
    if device.kind != "gpu" or not facts.gpus:
        return None
    known = visible.uuids[device.ordinal][0]
    parts = (part for gpu in facts.gpus for part in gpu.parts)
    # A mask may contain only the beginning of a UUID.
    return next((part for part in parts if known and part.uuid.startswith(known)), None)
