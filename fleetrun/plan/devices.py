"""Which devices each local rank gets, and the resulting backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Device, Facts, Request
from fleetrun.plan import free_gpus, kinds, masks, origin
from fleetrun.plan.kinds import label
from fleetrun.rundir.variables import ASSUME_DEVICES
from fleetrun.text import counted, format_ranges, is_digits, parse_range, suggestion

# The order in which CUDA numbers GPUs, and the order of NVML, the driver's library.
ORDER, DRIVERS_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"

_ALL_BACKENDS = ("auto", "nccl", "gloo", "bkcl", "xccl", "flagcx", "heter")

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
    masks.check_characters(facts.environ)
    if request.backend not in _ALL_BACKENDS:
        raise UsageError(
            f"{origin.option(request, 'backend')}: give one of {', '.join(_ALL_BACKENDS)}."
        )
    processes = _processes(request)
    if processes == "cpu":
        return _on_cpu(request, facts.cpus, ())
    # Paddle trains on the CPU with gloo: it gets devices only if they are named.
    if request.backend == "gloo" and request.devices is None and processes != "gpu":
        return _on_cpu(request, processes if isinstance(processes, int) else 1, ())
    kind, of_kind = _kind(request, facts)
    if kind == "cpu":
        if request.devices is not None:
            raise UsageError(
                f"{origin.option(request, 'devices')} names devices, "
                f"and {origin.option(request, 'device_kind')} requests none: give only one of them."
            )
        return _on_cpu(request, processes if isinstance(processes, int) else 1, ())
    _check_preferred(request, facts, kind)
    visible, why = masks.visible(facts, kind)
    if not visible.devices:
        _refuse_cpu(request, facts, processes, why)
        note = f"{_without(visible, why, facts)}: {ON_CPU}"
        return _on_cpu(request, processes if isinstance(processes, int) else 1, (note,))
    if request.devices == free_gpus.FREE:
        count = processes if isinstance(processes, int) else None
        chosen, notes = free_gpus.free(request, facts, visible, kind, count)
    else:
        chosen, notes = _choose(request, visible, kind)
    divided = any(masks.is_instance(device.id) for device in chosen)
    if processes == 1 and takes_all and not divided:
        groups: tuple[tuple[Device, ...], ...] = (chosen,)
    else:
        groups = _groups(request, chosen, processes, kind)
    notes = (*of_kind, *notes, *_idle(chosen, groups, kind), *_unseen(request, kind))
    backend = _backend(request, kind)
    if backend == "gloo":
        notes = (
            *notes,
            f"Paddle trains on the CPU with gloo, even with {label(kind)}s named.",
        )
    else:
        instances = _instances(request, visible, groups) if divided else ()
        notes = (*notes, *instances, *free_gpus.remarks(facts, visible, groups))
    _check_masked(request, facts, kind)
    has_own_masks = divided or request.virtual_local_rank
    return Share(kind, groups, backend, notes, has_own_masks)


def _check_preferred(request: Request, facts: Facts, kind: str) -> None:
    """Raise EnvironmentFault if Paddle has a plug-in for KIND, and would use another one."""
    used = next((name for name, count in facts.paddle_counts.items() if count), kind)
    if facts.paddle_counts.get(kind) and kind != used:
        raise EnvironmentFault(
            f"{origin.option(request, 'device_kind')}: Paddle has several plug-ins here, and uses "
            f"{label(used)}s: set {kinds.ROOT} to a folder with the plug-in for {label(kind)}s "
            "alone."
        )


def _check_masked(request: Request, facts: Facts, kind: str) -> None:
    """Raise EnvironmentFault if each rank needs a mask, and KIND may have none."""
    if request.virtual_local_rank and kind in facts.paddle_counts:
        raise EnvironmentFault(
            f"--virtual_local_rank: whether the plug-in for {label(kind)}s reads a mask of each "
            "rank is not known, and all ranks might take device 0; leave the option out."
        )


def _instances(
    request: Request, visible: masks.Visible, groups: tuple[tuple[Device, ...], ...]
) -> tuple[str, ...]:
    """Raise UsageError if CUDA cannot see GROUPS of MIG instances, and warn of NCCL's limits."""
    for group in groups:
        if len(group) > 1 and any(masks.is_instance(device.id) for device in group):
            raise UsageError(
                f"{origin.option(request, 'devices')} gives a process {len(group)} devices, of "
                f"which some are MIG instances: a process sees only one; give --nproc_per_node="
                f"{sum(map(len, groups))}."
            )
    masked = "Each process sees one MIG instance, by a CUDA_VISIBLE_DEVICES of its own."
    gpus = [visible.uuids[device.ordinal][-1] for group in groups for device in group]
    if len(set(gpus)) < len(gpus):
        nccl = (
            "NCCL refuses two ranks on one GPU, even on different MIG instances: it will "
            "report `Duplicate GPU detected`; give one instance of each GPU, or train on the "
            "CPU with --backend=gloo."
        )
        return (masked, nccl)
    return (masked,)


def _unseen(request: Request, kind: str) -> tuple[str, ...]:
    """Warn that a hang cannot be distinguished from computing on devices of KIND."""
    if kind == "gpu" or not request.hang_timeout_s:
        return ()
    consequence = (
        f"ranks that only wait for theirs count as hung after {request.hang_timeout_s:g} s"
    )
    return (f"Whether {label(kind)}s compute is not known: {consequence} (--hang_timeout).",)


def is_drivers_order(request: Request, environ: Mapping[str, str]) -> bool:
    """Whether the ranks number GPUs as the driver does."""
    chosen = {**environ, **dict(request.env)}.get(ORDER, DRIVERS_ORDER)
    return chosen == DRIVERS_ORDER


def _processes(request: Request) -> int | str:
    """Return the number of processes, or a word such as `auto`."""
    requested = request.nproc_per_node
    if requested is None:
        return "auto"
    if isinstance(requested, str) and is_digits(requested):
        requested = int(requested)
    if requested in {"auto", "gpu", "cpu"} or (isinstance(requested, int) and requested >= 1):
        if requested == "cpu" and request.devices is not None:
            raise UsageError(
                f"{origin.option(request, 'devices')} names devices, "
                f"and {origin.option(request, 'nproc_per_node')} requests none: give only one of "
                "them."
            )
        return requested
    raise UsageError(
        f"{origin.option(request, 'nproc_per_node')}: "
        "give a number from 1, or one of auto, gpu, cpu."
    )


def _kind(request: Request, facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Return the kind of device to use, and remarks about it.

    It is the named kind, or the first one of this host: Paddle prefers those of its plug-ins.
    """
    present = _there(facts)
    named = request.device_kind
    # --nproc_per_node=gpu means GPUs even if the host has other devices.
    if named is None and request.nproc_per_node == "gpu":
        named = "gpu"
    is_general = named == "gpu" and "gpu" not in present and not _is_exact(request)
    if is_general and present and present[0] not in kinds.BUILT_IN:
        # Paddle's launcher takes --gpus to mean devices of any kind.
        note = f"{origin.option(request, 'devices')} names {label(present[0])}s: no GPU is here."
        return present[0], (note,)
    if named is not None:
        _check_known(request, named, facts)
        return named, ()
    if len(present) > 1:
        alternatives = " or ".join(f"--device_kind={kind}" for kind in present[1:])
        presence = f"This host has {' and '.join(f'{label(kind)}s' for kind in present)}"
        return present[0], (
            f"{presence}: {label(present[0])}s are used; {alternatives} uses the others.",
        )
    return next(iter((*present, *facts.absent)), "gpu"), ()


def _there(facts: Facts) -> list[str]:
    """Return the kinds of devices of this host, hidden or not, in Paddle's order of preference."""
    counts = {**facts.device_counts, **facts.paddle_counts}
    order = dict.fromkeys((*facts.paddle_counts, *kinds.BUILT_IN, *counts))
    return [kind for kind in order if counts.get(kind)]


def _is_exact(request: Request) -> bool:
    """Whether GPUs are meant: --device_kind says so, or no devices are listed."""
    return request.devices is None or origin.is_given(request, "device_kind")


def _check_known(request: Request, kind: str, facts: Facts) -> None:
    """Raise UsageError for an option such as --gups that names an unknown KIND."""
    known = {*kinds.BUILT_IN, *kinds.VENDORS, *facts.device_counts, *facts.paddle_counts}
    if kind in {"cpu", *known, *facts.absent} or _is_exact(request):
        return

    present = ", ".join(f"--{kind_}s" for kind_ in facts.paddle_counts)
    otherwise = (
        f"Paddle here has {present}." if present else "`fleetrun --help=all` lists them all."
    )
    # --spaes=1 may be another option, misspelt.
    others = [setting.name for setting in request.settings if setting.source == "default"]
    names = (*(f"{kind_}s" for kind_ in known), *others)
    ending = suggestion(f"{kind}s", names, otherwise, "--")
    raise UsageError(f"no such option: --{kind}s{ending}")


def _on_cpu(request: Request, processes: int, notes: tuple[str, ...]) -> Share:
    """Return PROCESSES ranks without devices."""
    if request.virtual_local_rank:
        notes = (*notes, "--virtual_local_rank has no effect: the ranks have no devices.")
    return Share("cpu", ((),) * processes, _backend(request, "cpu"), notes)


def _backend(request: Request, kind: str) -> str:
    """Return the requested backend, if KIND of device supports it."""
    if request.backend == "auto":
        return kinds.backends(kind)[0]
    if request.backend not in kinds.backends(kind):
        where = "the CPU" if kind == "cpu" else f"{label(kind)}s"
        raise EnvironmentFault(
            f"{origin.option(request, 'backend')}: training here runs on {where}, which can use "
            f"{', '.join(kinds.backends(kind))}; leave the option out to get "
            f"{kinds.backends(kind)[0]}."
        )
    return request.backend


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
    used = [kind for kind in _there(facts)[:1] if masks.visible(facts, kind)[0].devices]
    instead = f"leave the option out to train on {f'{label(used[0])}s' if used else 'the CPU'}."
    if request.dry_run is not None and "hides" not in why:
        instead = f"{ASSUME_DEVICES}={request.device_kind or 'gpu'}:8 plans as if there were eight."
    raise EnvironmentFault(f"{option} requests devices, but {why}; {instead}")


def _without(visible: masks.Visible, why: str, facts: Facts) -> str:
    """Return WHY no device is VISIBLE, and the mask that the user may not expect."""
    mask = visible.mask and facts.environ[visible.mask].strip()
    return f"{visible.mask}={mask} is set, but {why}" if mask and "hides" not in why else why


def _choose(
    request: Request, visible: masks.Visible, kind: str
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Return the devices that REQUEST names, in its order, and remarks on the mapping."""
    if request.devices is None:
        return visible.devices, ()
    chosen: list[Device] = []
    words = _device_ids(request)
    if (
        visible.mask in kinds.VENDORS.get(kind, kinds.Vendor()).masks
        and all(word.isdigit() and int(word) < len(visible.devices) for word in words)
        and not {*words} <= {*visible.numbers}
    ):
        # Paddle's launcher does not know the vendor's mask: it numbers the devices that the mask
        # leaves.
        words = tuple(visible.devices[int(word)].id for word in words)
    for word in words:
        chosen += visible.devices if word == "all" else _find(request, visible, kind, word)
    for device in chosen:
        if chosen.count(device) > 1:
            raise UsageError(
                f"{origin.option(request, 'devices')} names {device.id} twice; to put several "
                "processes on one device, give --nproc_per_node and --oversubscribe."
            )
    if visible.mask is None or all(device.id == str(device.ordinal) for device in chosen):
        return tuple(chosen), ()
    places = ",".join(str(device.ordinal) for device in chosen)
    plural = "s" if len(chosen) > 1 else ""
    return tuple(chosen), (
        f"{origin.option(request, 'devices')} is device{plural} {places} of {visible.mask}.",
    )


def _device_ids(request: Request) -> tuple[str, ...]:
    """Return every id that the user wrote, with ranges written out."""
    words: list[str] = []
    pieces = [piece.strip() for piece in (request.devices or "").split(",")]
    for piece in pieces:
        span = parse_range(piece)
        if not piece:
            raise UsageError(
                f"{origin.option(request, 'devices')}: an id is missing; give ids like 0,1 or "
                "0-3, or `all`, or --nproc_per_node=cpu to train on the CPU."
            )
        if span is not None and len(span) <= masks.LONGEST_RANGE:
            words += map(str, span)
        elif "-" in piece and all(is_digits(end.strip()) for end in piece.split("-")):
            raise UsageError(
                f"{origin.option(request, 'devices')}: {piece} is not a range; "
                "write the lower id first, like 0-7."
            )
        elif piece == "all" or masks.is_uuid(piece):
            words.append(piece)
        else:
            raise UsageError(
                f"{origin.option(request, 'devices')}: {piece} is not a device; give ids like 0,1 "
                "or 0-3, a UUID, `all`, or `free` alone."
            )
    return tuple(words)


def _find(request: Request, visible: masks.Visible, kind: str, word: str) -> tuple[Device, ...]:
    """Return the visible device that WORD names, or all instances of a partitioned GPU."""
    places = range(len(visible.devices))
    if word.isdigit():
        matches = [place for place in places if visible.numbers[place] == word]
        # A mask of UUIDs has no numbers for WORD to match: WORD is then a position in it.
        if not any(visible.numbers):
            matches = [*places][int(word) : int(word) + 1]
    else:
        matches = [
            place
            for place in places
            # The mask, too, may contain only the beginning of a UUID.
            if any(
                uuid and (uuid.startswith(word) or word.startswith(uuid))
                for uuid in visible.uuids[place]
            )
        ]
    devices = tuple(visible.devices[place] for place in matches)
    which = 0 if masks.is_instance(word) else -1
    if len({visible.uuids[place][which] for place in matches}) > 1:
        raise UsageError(
            f"{origin.option(request, 'devices')}: {word} matches several devices: "
            f"{', '.join(device.id for device in devices)}."
        )
    if devices:
        return devices
    if visible.mask is None:
        raise EnvironmentFault(
            f"{origin.option(request, 'devices')}: {masks.has(len(visible.devices), kind)}; "
            f"{word} is not there."
        )
    raise EnvironmentFault(
        f"{origin.option(request, 'devices')}: {visible.mask} does not contain {word}; it allows "
        f"{', '.join(device.id for device in visible.devices)}."
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
    per_process = count // processes
    return tuple(chosen[rank * per_process : (rank + 1) * per_process] for rank in range(processes))


def _idle(
    chosen: tuple[Device, ...], groups: tuple[tuple[Device, ...], ...], kind: str
) -> tuple[str, ...]:
    """Return a line that names the devices of CHOSEN in none of GROUPS."""
    used = {device for group in groups for device in group}
    idle = [device.id for device in chosen if device not in used]
    if not idle:
        return ()
    name = label(kind)
    subject = f"{name} {idle[0]} is" if len(idle) == 1 else f"{name}s {_listed(idle)} are"
    return (f"{subject} idle: --nproc_per_node={len(groups)} uses one {name} for each process.",)


def _listed(ids: list[str]) -> str:
    """Return IDS as text, with consecutive ones as a range.

    >>> _listed(["2", "3"]), _listed(["3", "1"]), _listed(["GPU-a", "GPU-b"])
    ('2-3', '3, 1', 'GPU-a, GPU-b')
    """
    numbers = [int(device_id) for device_id in ids if is_digits(device_id)]
    is_sorted = len(numbers) == len(ids) and numbers == sorted(numbers)
    return format_ranges(numbers) if is_sorted else ", ".join(ids)
