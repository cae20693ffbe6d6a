"""The roles of a job with parameter servers, from numbers and lists of endpoints."""

# No `from __future__ import annotations` here, for the reason given in model.py.

from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.model import COORDINATOR, HETER, SERVER, TRAINER, Request
from fleetrun.plan import hosts, origin
from fleetrun.plan.layout import LAST_PORT, Slot, Slots
from fleetrun.text import is_digits

# A port without a process, at the first server, where the trainers' gloo meets.
MEETING = "MEETING"

# Where Paddle counts from when a list has no ports and there is no --start_port.
FIRST_PORT = 6170

_HETER_MODES = ("ps-heter", "heter")
_KINDS_OF_DEVICE = ("cpu", "gpu", "xpu")


class Roles(NamedTuple):
    """A slot for each process, and one for gloo's port."""

    slots: Slots
    # The devices of the heterogeneous trainers, by stage from the second on.
    heter_devices: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """The number of stages; 1 without heterogeneous trainers."""
        return max(slot.stage for slot in self.slots.slots)


def roles(request: Request) -> Roles:
    """Return the slots of REQUEST; UsageError if its options contradict each other."""
    servers = _slots(request, SERVER, "server_num", "servers")
    trainers = _slots(request, TRAINER, "trainer_num", "trainers")
    # As in Paddle, a side without number and list is one process on the other's first host.
    first = next((slot.host for slot in (*servers, *trainers)), None)
    servers = servers or (Slot(SERVER, 0, first),)
    trainers = trainers or (Slot(TRAINER, 1, first),)
    heter = _heter(request)
    devices = _heter_devices(request, max((slot.stage for slot in heter), default=1) - 1)
    coordinators = _slots(request, COORDINATOR, "coordinator_num", "coordinators")
    meeting = Slot(MEETING, host=servers[0].host, port=request.http_port)
    all_slots = (*servers, *trainers, *heter, meeting, *coordinators)
    return Roles(Slots(_housed(request, all_slots), FIRST_PORT, master="none"), devices)


def check_stages(request: Request, job_roles: Roles) -> None:
    """Raise UsageError if the mode needs heterogeneous trainers and JOB_ROLES has none."""
    if request.run_mode in _HETER_MODES and job_roles.stages == 1:
        raise UsageError(
            f"{origin.option(request, 'run_mode')} needs heterogeneous trainers: give "
            "--heter_worker_num or --heter_workers."
        )


def supplied(request: Request) -> tuple[str, ...]:
    """Return notes on the sides without number and list, which have one process."""
    sides = (
        ("parameter servers", "server_num", "servers"),
        ("trainers", "trainer_num", "trainers"),
    )
    return tuple(
        f"no number of {side} is given, so one is started; --{number} sets it."
        for side, number, listed in sides
        if getattr(request, number) is None and not getattr(request, listed)
    )


def _slots(request: Request, role: str, number: str, listed: str) -> tuple[Slot, ...]:
    """Return the slots of ROLE that the option NUMBER counts and the option LISTED names."""
    count: int | None = getattr(request, number)
    if count is not None and count < 0:
        raise UsageError(f"{origin.option(request, number)}: give a number, 1 or more.")
    stage = 1 if role == TRAINER else 0
    if any(is_digits(text.strip()) for text in getattr(request, listed)):
        raise UsageError(
            f"{origin.option(request, listed)}: a number is no host; to start so many here, "
            f"write --{number}."
        )
    slots = tuple(_slot(request, listed, text, role, stage) for text in getattr(request, listed))
    if count == 0 and not slots and role in {SERVER, TRAINER}:
        side = "parameter servers" if role == SERVER else "trainers"
        elsewhere = (
            "; where they run on other hosts, name all with --servers=HOST:PORT,... and "
            "--trainers=HOST:PORT,..., on each host, in place of numbers."
            if request.master is not None or request.nnodes != "1"
            else "."
        )
        raise UsageError(
            f"{origin.option(request, number)}: such a job needs {side}; leave it out to get one"
            f"{elsewhere}"
        )
    if not slots:
        return (Slot(role, stage),) * (count or 0)
    if count and count != len(slots):
        raise UsageError(
            f"{origin.option(request, listed)} names {len(slots)}, and "
            f"{origin.option(request, number)} says {count}; omit one of them."
        )
    return slots


def _slot(request: Request, listed: str, text: str, role: str, stage: int) -> Slot:
    """Read TEXT of the option LISTED: HOST or HOST:PORT."""
    host, colon, port = text.strip().partition(":")
    number = int(port) if is_digits(port) else 0
    if not host or (colon and not 1 <= number <= LAST_PORT):
        raise UsageError(
            f"{origin.option(request, listed)}: `{text.strip()}` is not HOST:PORT or HOST; "
            f"a port is from 1 to {LAST_PORT}, and {hosts.NO_IPV6}."
        )
    return Slot(role, stage, host, number if colon else None)


def _heter(request: Request) -> tuple[Slot, ...]:
    """Return the heterogeneous trainers, stage by stage; `;` separates stages."""
    counts = _stage_counts(request)
    if request.heter_workers is None:
        return tuple(
            Slot(HETER, stage) for stage, count in enumerate(counts, 2) for _ in range(count)
        )
    stages = [stage.split(",") for stage in request.heter_workers.split(";")]
    if counts and counts != tuple(len(stage) for stage in stages):
        raise UsageError(
            f"{origin.option(request, 'heter_workers')} names "
            f"{';'.join(str(len(stage)) for stage in stages)}, and "
            f"{origin.option(request, 'heter_worker_num')} says otherwise; omit one of "
            "them."
        )
    return tuple(
        _slot(request, "heter_workers", text, HETER, number)
        for number, stage in enumerate(stages, 2)
        for text in stage
    )


def _stage_counts(request: Request) -> tuple[int, ...]:
    """Return the number of heterogeneous trainers of each stage; () if not given."""
    if request.heter_worker_num is None or request.heter_worker_num.strip() == "0":
        return ()
    texts = [text.strip() for text in request.heter_worker_num.split(";")]
    if not all(is_digits(text) and int(text) for text in texts):
        raise UsageError(
            f"{origin.option(request, 'heter_worker_num')}: give a number for each stage, 1 or "
            'more, such as 2 or "1;2".'
        )
    return tuple(int(text) for text in texts)


def _heter_devices(request: Request, stages: int) -> tuple[str, ...]:
    """Return the device of each of the heterogeneous STAGES; () if not given."""
    if request.heter_devices is None:
        return ()
    devices = tuple(text.strip().lower() for text in request.heter_devices.split(";"))
    option = origin.option(request, "heter_devices")
    for device in devices:
        if device not in _KINDS_OF_DEVICE:
            raise UsageError(f"{option}: `{device}` is not one of {', '.join(_KINDS_OF_DEVICE)}.")
    if len(devices) != stages:
        raise UsageError(
            f"{option} names {len(devices)}, and there are {stages} stages of heterogeneous "
            "trainers (--heter_worker_num, --heter_workers); name one for each."
        )
    return devices


def _housed(request: Request, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Give every slot a host if any has one, and check the lists for contradictions."""
    named = tuple(dict.fromkeys(slot.host for slot in slots if slot.host is not None))
    for host in request.ips if named else ():
        if host not in named:
            raise UsageError(
                f"{origin.option(request, 'ips')}: {host} is in none of the lists of servers and "
                "trainers; they say which hosts take part, so leave --ips out."
            )
    lost = [slot.role for slot in slots if slot.host is None and slot.role != MEETING]
    if len(named) > 1:
        near = [host for host in named if hosts.is_loopback(host)]
        if near and len(near) < len(named):
            raise UsageError(
                f"The lists name {near[0]}, which is a loopback address, together with "
                f"{next(host for host in named if host not in near)}: give the address by which "
                "other hosts reach this one."
            )
        if lost:
            number = {SERVER: "servers", TRAINER: "trainers", COORDINATOR: "coordinators"}
            flag = number.get(lost[0], "heter_workers")
            raise UsageError(
                f"The lists name {len(named)} hosts ({', '.join(named)}), and which of them the "
                f"{flag} run on is not given: list them with --{flag}."
            )
    if named:
        # A number beside a list of one host means that host; gloo meets at the first server.
        slots = tuple(slot._replace(host=slot.host or slots[0].host or named[0]) for slot in slots)
    _check_distinct(slots)
    return slots


def _check_distinct(slots: tuple[Slot, ...]) -> None:
    """Raise UsageError if two slots have the same endpoint."""
    endpoints = [(slot.host, slot.port) for slot in slots if slot.port is not None]
    for host, port in endpoints:
        if endpoints.count((host, port)) > 1:
            where = f"The endpoint {host}:{port}" if host else f"Port {port}"
            raise UsageError(f"{where} is given twice; servers, trainers and gloo need their own.")
