"""GPUs in use by others: which are free, and remarks about the rest."""

from __future__ import annotations

from typing import NamedTuple

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Device, Facts, GpuUse, Request
from fleetrun.plan import masks, origin
from fleetrun.plan.kinds import label

# The value of --gpus that means the free ones.
FREE = "free"

# The driver itself, and a desktop, take some of a GPU's memory.
_FREE_SHARE = 0.1

_GIB = 1 << 30


class Choice(NamedTuple):
    """The chosen devices, and the reason."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()


def free(
    request: Request, facts: Facts, visible: masks.Visible, kind: str, needed: int | None
) -> Choice:
    """Choose the first NEEDED free devices of VISIBLE; None: all that are free."""
    option = origin.option(request, "devices")
    if kind != "gpu":
        raise UsageError(f"{option}: which {label(kind)}s are free is not known; name them.")
    free_devices: list[Device] = []
    for device in visible.devices:
        use = _use(facts, visible, device)
        if use is None:
            raise EnvironmentFault(
                f"{option}: the driver does not tell whether GPU {device.id} is free; name the "
                "GPUs to use."
            )
        if not use.holders and not _is_filled(use):
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
    return Choice(chosen, (f"{option} takes {names} of {total} GPUs.",))


def remarks(
    facts: Facts, visible: masks.Visible, groups: tuple[tuple[Device, ...], ...]
) -> tuple[str, ...]:
    """Return remarks about devices of GROUPS whose memory others use."""
    if not facts.gpu_uses:
        return ()
    lines = []
    for device in dict.fromkeys(device for group in groups for device in group):
        use = _use(facts, visible, device)
        if use is None or not _is_filled(use):
            continue
        users = f", by {', '.join(use.holders)}" if use.holders else ""
        amount = f"{use.used_bytes / _GIB:.1f} of {use.total_bytes / _GIB:.1f} GiB"
        lines.append(
            f"GPU {device.id} is in use: {amount} are taken{users}; --gpus={FREE} takes free ones."
        )
    return tuple(lines)


def before(facts: Facts, groups: tuple[tuple[Device, ...], ...]) -> dict[str, GpuUse]:
    """Return the memory in use on the GPUs of GROUPS before the launch, as far as known."""
    gpus = [device for group in groups for device in group if device.kind == "gpu"]
    if not gpus:
        return {}
    visible, _ = masks.visible(facts, "gpu")
    known = [visible.uuids[device.ordinal][0] for device in gpus]
    return {
        uuid: use
        for uuid, use in facts.gpu_uses.items()
        if any(name and uuid.startswith(name) for name in known)
    }


def _is_filled(use: GpuUse) -> bool:
    return use.used_bytes > _FREE_SHARE * use.total_bytes


def _use(facts: Facts, visible: masks.Visible, device: Device) -> GpuUse | None:
    """Return the use of a VISIBLE DEVICE, if it is known."""
    known = visible.uuids[device.ordinal][0]
    # A mask may contain only the beginning of a UUID.
    return next(
        (use for uuid, use in facts.gpu_uses.items() if known and uuid.startswith(known)), None
    )
