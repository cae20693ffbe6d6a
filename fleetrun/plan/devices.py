"""Which devices each local rank gets, and the resulting backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Device, Facts, Request
from fleetrun.plan import free_gpus, kinds, masks, origin
from fleetrun.plan.kinds import label
from fleetrun.rundir.variables import ASSUME_DEVICES
from fleetrun.text import counted, is_digits, parse_range, suggestion

# The order in which CUDA numbers GPUs, and the order of NVML, the driver's library.
ORDER, DRIVERS_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"

_BACKENDS = ("auto", "nccl", "gloo", "bkcl", "xccl", "flagcx", "heter")

ON_CPU = "training runs on the CPU with the gloo backend."


class Share(NamedTuple):
    """What each local rank gets: one group of devices per rank, empty on CPU."""

    kind: str
    groups: tuple[tuple[Device, ...], ...]
    backend: str
    notes: tuple[str, ...] = ()
    # Whether each rank has a mask of its own, in which its devices count from 0.
    has_own_masks: bool = False


def share(request: Request, facts: Facts, *, takes_all: bool = True) -> Share:
    """Distribute the host's devices over its ranks as REQUEST says.

    TAKES_ALL: a single process gets all devices.
    """
    if request.backend not in _BACKENDS:
        raise UsageError(
            f"{origin.option(request, 'backend')}: give one of {', '.join(_BACKENDS)}."
        )
    processes = _processes(request)
    count = processes if isinstance(processes, int) else facts.cpus if processes == "cpu" else 1
    on_cpu = Share("cpu", ((),) * count, "gloo")
    # Paddle trains on the CPU with gloo: it gets devices only if they are named.
    is_gloo = request.backend == "gloo" and request.devices is None and processes != "gpu"
    kind = "cpu" if processes == "cpu" or is_gloo else _kind(request, facts)
    if kind == "cpu":
        if request.devices is not None:
            other = "nproc_per_node" if processes == "cpu" else "device_kind"
            raise UsageError(
                f"{origin.option(request, 'devices')} names devices, and "
                f"{origin.option(request, other)} requests none: give only one of them."
            )
        return on_cpu._replace(backend=_backend(request, kind))
    visible, why = masks.visible(facts, kind)
    if not visible.devices:
        _refuse_cpu(request, facts, processes, why)
        note = f"{why}: {ON_CPU}"
        return on_cpu._replace(backend=_backend(request, "cpu"), notes=(note,))

    chosen, notes = _choose(request, visible, kind), tuple[str, ...]()
    if request.devices == free_gpus.FREE:
        needed = processes if isinstance(processes, int) else None
        chosen, notes = free_gpus.free(request, facts, visible, kind, needed)
    divided = any(masks.is_instance(device.id) for device in chosen)
    groups: tuple[tuple[Device, ...], ...] = (chosen,)
    if processes != 1 or not takes_all or divided:
        groups = _groups(request, chosen, processes, kind)
    if divided and max(map(len, groups)) > 1:
        raise UsageError(
            f"{origin.option(request, 'devices')}: a process sees only one MIG instance; give "
            f"--nproc_per_node={sum(map(len, groups))}."
        )
    backend = _backend(request, kind)
    if backend == "gloo":
        notes += (f"Paddle trains on the CPU with gloo, even with {label(kind)}s named.",)
    return Share(kind, groups, backend, notes, divided)


def is_drivers_order(request: Request, environ: Mapping[str, str]) -> bool:
    """Whether the ranks number GPUs as the driver does."""
    return {**environ, **dict(request.env)}.get(ORDER, DRIVERS_ORDER) == DRIVERS_ORDER


def _processes(request: Request) -> int | str:
    """Return the number of processes, or `auto`, `gpu` or `cpu`."""
    wanted = request.nproc_per_node
    if isinstance(wanted, str) and is_digits(wanted):
        wanted = int(wanted)
    if wanted in {None, "auto", "gpu", "cpu"} or (isinstance(wanted, int) and wanted >= 1):
        return wanted or "auto"
    raise UsageError(
        f"{origin.option(request, 'nproc_per_node')}: "
        "give a number from 1, or one of auto, gpu, cpu."
    )


def _kind(request: Request, facts: Facts) -> str:
    """Return the named kind, or the first of this host: Paddle prefers those of its plug-ins."""
    present, named = _present(facts), request.device_kind
    # --nproc_per_node=gpu means GPUs even if the host has other devices.
    if named is None and request.nproc_per_node == "gpu":
        named = "gpu"
    if named is None:
        return next(iter((*present, *facts.absent)), "gpu")
    if request.devices is None or origin.is_given(request, "device_kind"):
        return named
    if named == "gpu" and present and "gpu" not in present and present[0] not in kinds.BUILT_IN:
        # Paddle's launcher takes --gpus to mean devices of any kind.
        return present[0]
    known = {"cpu", *kinds.BUILT_IN, *kinds.VENDORS, *facts.device_counts, *facts.paddle_counts}
    if named in {*known, *facts.absent}:
        return named
    # --gups=1 names no kind, and --spaes=1 may be another option, misspelt.
    others = [setting.name for setting in request.settings if setting.source == "default"]
    names = (*(f"{kind}s" for kind in known), *others)
    ending = suggestion(f"{named}s", names, "`fleetrun --help=all` lists them all.", "--")
    raise UsageError(f"no such option: --{named}s{ending}")


def _present(facts: Facts) -> list[str]:
    """Return the kinds of devices of this host, hidden or not, in Paddle's order of preference."""
    counts = {**facts.device_counts, **facts.paddle_counts}
    order = dict.fromkeys((*facts.paddle_counts, *kinds.BUILT_IN, *counts))
    return [kind for kind in order if counts.get(kind)]


def _backend(request: Request, kind: str) -> str:
    """Return the requested backend, if KIND of device supports it."""
    usable = kinds.backends(kind)
    if request.backend != "auto" and request.backend not in usable:
        where = "the CPU" if kind == "cpu" else f"{label(kind)}s"
        raise EnvironmentFault(
            f"{origin.option(request, 'backend')}: training here runs on {where}, which can use "
            f"{', '.join(usable)}; leave the option out to get {usable[0]}."
        )
    return usable[0] if request.backend == "auto" else request.backend


def _refuse_cpu(request: Request, facts: Facts, processes: int | str, why: str) -> None:
    """Raise an error if devices are requested and there are none."""
    if request.devices is not None:
        option = origin.option(request, "devices")
    elif processes == "gpu":
        option = origin.option(request, "nproc_per_node")
    elif origin.is_given(request, "device_kind") and "hides" not in why:
        option = origin.option(request, "device_kind")
    else:
        return
    # The devices that are used if none are requested.
    used = [kind for kind in _present(facts)[:1] if masks.visible(facts, kind)[0].devices]
    instead = f"leave the option out to train on {f'{label(used[0])}s' if used else 'the CPU'}."
    if request.dry_run is not None and "hides" not in why:
        instead = f"{ASSUME_DEVICES}={request.device_kind or 'gpu'}:8 plans as if there were eight."
    raise EnvironmentFault(f"{option} requests devices, but {why}; {instead}")


def _choose(request: Request, visible: masks.Visible, kind: str) -> tuple[Device, ...]:
    """Return the devices that REQUEST names, in its order."""
    if request.devices in {None, free_gpus.FREE}:
        return visible.devices
    words = _device_ids(request)
    if (
        visible.mask in kinds.VENDORS.get(kind, kinds.Vendor()).masks
        and all(word.isdigit() and int(word) < len(visible.devices) for word in words)
        and not {*words} <= {*visible.numbers}
    ):
        # Paddle's launcher does not know the vendor's mask: it numbers the devices that the mask
        # leaves.
        words = tuple(visible.devices[int(word)].id for word in words)
    chosen: list[Device] = []
    for word in words:
        chosen += visible.devices if word == "all" else _find(request, visible, kind, word)
    for device in chosen:
        if chosen.count(device) > 1:
            raise UsageError(
                f"{origin.option(request, 'devices')} names {device.id} twice; to put several "
                "processes on one device, give --nproc_per_node and --oversubscribe."
            )
    return tuple(chosen)


def _device_ids(request: Request) -> tuple[str, ...]:
    """Return every id that the user wrote, with ranges written out."""
    words: list[str] = []
    for piece in (request.devices or "").split(","):
        word = piece.strip()
        span = parse_range(word)
        if span is not None and len(span) <= masks.LONGEST_RANGE:
            words += map(str, span)
        elif word == "all" or masks.is_uuid(word):
            words.append(word)
        else:
            raise UsageError(
                f"{origin.option(request, 'devices')}: {word or 'an empty word'} is not a device; "
                "give ids like 0,1 or 0-3, a UUID, `all`, or `free` alone."
            )
    return tuple(words)


def _find(request: Request, visible: masks.Visible, kind: str, word: str) -> tuple[Device, ...]:
    """Return the visible device that WORD names, or all instances of a partitioned GPU."""
    places = range(len(visible.devices))
    if not word.isdigit():
        # The mask, too, may contain only the beginning of a UUID.
        matches = [
            place
            for place in places
            for uuid in visible.uuids[place]
            if uuid and (uuid.startswith(word) or word.startswith(uuid))
        ]
    elif any(visible.numbers):
        matches = [place for place in places if visible.numbers[place] == word]
    else:
        # A mask of UUIDs has no numbers for WORD to match: WORD is then a position in it.
        matches = [*places][int(word) : int(word) + 1]
    option = origin.option(request, "devices")
    which = 0 if masks.is_instance(word) else -1
    if len({visible.uuids[place][which] for place in matches}) > 1:
        ids = ", ".join(visible.devices[place].id for place in matches)
        raise UsageError(f"{option}: {word} matches several devices: {ids}.")
    if matches:
        return tuple(visible.devices[place] for place in dict.fromkeys(matches))
    if visible.mask is None:
        raise EnvironmentFault(
            f"{option}: {masks.has(len(visible.devices), kind)}; {word} is not there."
        )
    allowed = ", ".join(device.id for device in visible.devices)
    raise EnvironmentFault(
        f"{option}: {visible.mask} does not contain {word}; it allows {allowed}."
    )


def _groups(
    request: Request, chosen: tuple[Device, ...], processes: int | str, kind: str
) -> tuple[tuple[Device, ...], ...]:
    """Distribute CHOSEN devices over PROCESSES."""
    count = len(chosen)
    if not isinstance(processes, int) or processes == count:
        return tuple((device,) for device in chosen)
    if processes > count:
        if request.oversubscribe:
            return tuple((chosen[rank % count],) for rank in range(processes))
        raise UsageError(
            f"{processes} processes, {counted(count, 'device')}; add --oversubscribe to let them "
            f"share, or give --nproc_per_node={count}."
        )
    if request.devices is None:
        return tuple((device,) for device in chosen[:processes])
    if count % processes:
        raise UsageError(
            f"{origin.option(request, 'devices')}: {count} {label(kind)}s cannot be divided "
            f"evenly among {processes} processes (--nproc_per_node)."
        )
    size = count // processes
    return tuple(chosen[rank * size : (rank + 1) * size] for rank in range(processes))
