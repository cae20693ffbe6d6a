"""The devices that a process would see: those of the host, or those that a mask leaves."""

from typing import NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Device, Facts

# The first of these that is set says which devices a process may see, and in which order.
MASKS = {
    "gpu": ("CUDA_VISIBLE_DEVICES",),
    "xpu": ("XPULINK_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", "NPU_VISIBLE_DEVICES"),
}

NAMES = {"gpu": "GPU", "xpu": "XPU", "npu": "NPU"}

UUIDS = ("GPU-", "MIG-")


class Visible(NamedTuple):
    """The devices a process would see, in its order, and what made it so."""

    devices: tuple[Device, ...]
    mask: str | None
    # A UUID for each device, "" where it is not known.
    uuids: tuple[str, ...] = ()


def visible(facts: Facts, kind: str) -> tuple[Visible, str]:
    """Return the devices of KIND that a process would see, or none and why."""
    count = facts.device_counts.get(kind, 0)
    name, text = _mask(facts, kind)
    if not count:
        broken = facts.without_gpus if kind == "gpu" else ""
        return Visible((), name), broken or f"this host has no {NAMES[kind]} driver"
    uuids = facts.device_ids.get(kind, ())
    if name is None or text == "all":
        devices = tuple(Device(kind, str(index), index) for index in range(count))
        return Visible(devices, None, uuids), ""
    entries = _mask_entries(text)
    if not entries:
        return Visible((), name), f"{name}={text} hides all {count} {NAMES[kind]}s"
    _check_mask(name, entries, facts, kind)
    devices = tuple(Device(kind, entry, index) for index, entry in enumerate(entries))
    known = tuple(
        entry if entry.startswith(UUIDS) else uuids[int(entry)] if uuids else ""
        for entry in entries
    )
    return Visible(devices, name, known), ""


def _mask(facts: Facts, kind: str) -> tuple[str | None, str]:
    """Return the variable that limits KIND on this host, and its value."""
    for name in MASKS[kind]:
        if name in facts.environ:
            return name, facts.environ[name].strip()
    return None, ""


def _mask_entries(text: str) -> tuple[str, ...]:
    """Return a mask's entries as the driver reads it: up to the first that names no device."""
    entries = []
    for piece in text.split(","):
        entry = piece.strip()
        if entry.isascii() and entry.isdigit():
            entries.append(str(int(entry)))
        elif entry.startswith(UUIDS):
            entries.append(entry)
        else:
            # CUDA stops here too: "-1", "NoDevFiles" and the like hide what follows.
            break
    return tuple(entries)


def _check_mask(name: str, entries: tuple[str, ...], facts: Facts, kind: str) -> None:
    """Complain about a mask that the driver would cut short or refuse."""
    shown = f"{name}={','.join(entries)}"
    count = facts.device_counts[kind]
    ids = (*facts.device_ids.get(kind, ()), *facts.device_ids.get("mig", ()))
    for entry in entries:
        if entries.count(entry) > 1:
            raise EnvironmentFault(f"{shown} names {entry} twice; name each device once.")
        if entry.isdigit() and int(entry) >= count:
            raise EnvironmentFault(f"{shown} names {entry}: {has(count, kind)}.")
        if ids and not entry.isdigit() and not any(uuid.startswith(entry) for uuid in ids):
            raise EnvironmentFault(
                f"{shown} names {entry}, which this host does not have: it has {', '.join(ids)}."
            )


def has(count: int, kind: str) -> str:
    """Say what this host has."""
    if count == 1:
        return f"this host has 1 {NAMES[kind]}, number 0"
    return f"this host has {count} {NAMES[kind]}s, 0-{count - 1}"
