"""The devices that a process would see: those of the host, or those in a mask."""

from __future__ import annotations

import re
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Device, Facts
from fleetrun.plan import kinds
from fleetrun.plan.kinds import label
from fleetrun.text import counted, parse_range

# On AMD GPUs this one takes precedence over CUDA's, which HIP reads, too.
HIP_MASK = "HIP_VISIBLE_DEVICES"
# Hides GPUs below HIP, which numbers the remaining ones from 0.
ROCR_MASK = "ROCR_VISIBLE_DEVICES"

# More than any host has: a longer range is a typing error, not worth expanding.
LONGEST_RANGE = 4096

# Values that hide all devices.
_HIDING = re.compile(r"(?i)|-.*|none|void|NoDev\w*")


class Visible(NamedTuple):
    """The devices that a process would see, in its order, and the mask."""

    devices: tuple[Device, ...]
    mask: str | None
    # The UUIDs of each device: its own, and that of the GPU that it is a part of.
    uuids: tuple[tuple[str, ...], ...] = ()
    # The driver's number of each one's GPU; "" if it was not named by a number.
    numbers: tuple[str, ...] = ()


class _Behind(NamedTuple):
    """A device behind an entry of a mask, or one of its instances (MIG)."""

    id: str
    number: str
    uuids: tuple[str, ...]


def visible(facts: Facts, kind: str) -> tuple[Visible, str]:
    """Return the devices of KIND that a process would see, or no devices and the reason."""
    if kind in facts.paddle_counts:
        return _seen(facts, kind)
    count = facts.device_counts.get(kind, 0)
    name, text = _mask(facts, kind)
    if not count:
        why = facts.absent.get(kind, f"this host has no {label(kind)} driver")
        return Visible((), name), f"{name}={text} is set, but {why}" if text else why
    if name is None or text == "all":
        name, entries = None, tuple(map(str, range(count)))
    else:
        entries = listed(text)
        if not entries and _HIDING.fullmatch(text.partition(",")[0]):
            return Visible((), name), f"{name}={text} hides all {count} {label(kind)}s"
        _check(name, text, facts, kind)
    behind = [device for entry in entries for device in _behind(entry, facts, kind)]
    if any(is_instance(device.id) for device in behind):
        # With MIG instances, CUDA's numbers differ from the driver's.
        behind = [device._replace(id=device.uuids[0] or device.id) for device in behind]
    # A mask may name both an instance and its GPU.
    behind = list({device.id: device for device in behind}.values())
    return Visible(
        tuple(Device(kind, device.id, place) for place, device in enumerate(behind)),
        name,
        tuple(device.uuids for device in behind),
        tuple(device.number for device in behind),
    ), ""


def _seen(facts: Facts, kind: str) -> tuple[Visible, str]:
    """Return the devices of a plug-in's KIND; Paddle has counted those behind the mask."""
    count = facts.paddle_counts[kind]
    name, text = _mask(facts, kind)
    if name is None or text == "all":
        name, ids = None, tuple(map(str, range(count)))
    else:
        ids = listed(text)
        if not ids and (not count or _HIDING.fullmatch(text)):
            return Visible((), name), f"{name}={text} hides all {label(kind)}s"
    if not count:
        return Visible((), name), facts.absent[kind]
    if len(ids) == count:
        places = tuple(range(count))
    elif 0 < len(ids) < count and all(entry.isdecimal() and int(entry) < count for entry in ids):
        # The plug-in does not read the mask, and numbers all devices.
        places = tuple(map(int, ids))
    else:
        number = counted(len(ids), "device") if ids else "no device"
        raise EnvironmentFault(
            f"{name}={text} names {number}, but Paddle sees {count} through it; list the numbers "
            "of devices, as 4,5,6,7."
        )
    devices = tuple(Device(kind, entry, place) for entry, place in zip(ids, places, strict=True))
    numbers = tuple(entry if entry.isdecimal() else "" for entry in ids)
    return Visible(devices, name, tuple((entry,) for entry in ids), numbers), ""


def _behind(entry: str, facts: Facts, kind: str) -> list[_Behind]:
    """Return the device that ENTRY names, or its instances if it is partitioned (MIG)."""
    gpus = facts.gpus if kind == "gpu" else ()
    number = entry if entry.isdigit() else ""
    if number:
        gpu = gpus[int(entry)] if gpus else None
    else:
        gpu = next((gpu for gpu in gpus if gpu.uuid.startswith(entry)), None)
    if gpu is None or not gpu.instances:
        uuid = entry if not number else gpu.uuid if gpu else ""
        return [_Behind(entry, number, (uuid,))]
    return [_Behind(part.uuid, number, (part.uuid, gpu.uuid)) for part in gpu.instances]


def is_uuid(text: str) -> bool:
    """Whether TEXT may be a vendor's UUID, or the beginning of one."""
    return text.find("-") > 0 and not text.replace("-", "").isdigit()


def is_instance(device: str) -> bool:
    """Whether DEVICE names a MIG instance, not a whole GPU."""
    return device.startswith("MIG-")


def _mask(facts: Facts, kind: str) -> tuple[str | None, str]:
    """Return the variable that limits KIND on this host, and its value."""
    names = kinds.masks(kind)
    if kind == "gpu" and facts.is_rocm:
        names = (HIP_MASK, *names)
    name = next((name for name in names if name in facts.environ), None)
    return name, "" if name is None else facts.environ[name].strip()


def variable(facts: Facts, kind: str) -> str:
    """Return the variable that limits the devices of KIND for a process of this host."""
    return _mask(facts, kind)[0] or kinds.masks(kind)[0]


def listed(text: str) -> tuple[str, ...]:
    """Return a mask's entries as drivers read them, that is, up to the first invalid one.

    >>> listed("0,05,-1,2"), listed("4-6"), listed("GPU-a1,DRS-b2"), listed("none")
    (('0', '5'), ('4', '5', '6'), ('GPU-a1', 'DRS-b2'), ())
    """
    entries: list[str] = []
    for piece in text.split(","):
        entry = piece.strip()
        span = parse_range(entry)
        if span is not None and len(span) <= LONGEST_RANGE:
            entries += map(str, span)
        elif is_uuid(entry):
            entries.append(entry)
        else:
            # CUDA stops here too: "-1", "NoDevFiles" and the like hide what follows.
            break
    return tuple(entries)


def _check(name: str, text: str, facts: Facts, kind: str) -> None:
    """Raise an error for a mask that the driver would misread, truncate or refuse."""
    count, gpus = facts.device_counts[kind], facts.gpus if kind == "gpu" else ()
    ids = [part.uuid for gpu in gpus for part in (gpu, *gpu.instances)]
    for piece in text.split(","):
        entry = piece.strip()
        is_number = entry.isascii() and entry.isdigit()
        is_known = is_number or is_uuid(entry) or _HIDING.fullmatch(entry)
        if kind in kinds.BUILT_IN and not is_known:
            raise EnvironmentFault(
                f"{name}={text}: {entry} is not a number, and drivers interpret it differently; "
                "list the numbers of devices, as 4,5,6,7."
            )
    entries = listed(text)
    shown = f"{name}={','.join(entries)}"
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
    """Describe this host's devices for an error message."""
    if count == 1:
        return f"this host has 1 {label(kind)}, number 0"
    return f"this host has {count} {label(kind)}s, 0-{count - 1}"
