"""The roles of a job with parameter servers, from numbers and lists of endpoints."""

from __future__ import annotations

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

# The options with the list of each role.
_LISTS = {
    SERVER: "servers",
    TRAINER: "trainers",
    HETER: "heter_workers",
    COORDINATOR: "coordinators",
}
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
    servers = _slots(request, SERVER, "server_num")
    trainers = _slots(request, TRAINER, "trainer_num")
    # As in Paddle, a side without number and list is one process on the other's first host.
    first = next((slot.host for slot in (*servers, *trainers)), None)
    servers = servers or (Slot(SERVER, 0, first),)
    trainers = trainers or (Slot(TRAINER, 1, first),)
    heter = _heter(request)
    devices = _heter_devices(request, max((slot.stage for slot in heter), default=1) - 1)
    coordinators = _slots(request, COORDINATOR, "coordinator_num")
    meeting = Slot(MEETING, host=servers[0].host, port=request.http_port)
    all_slots = (*servers, *trainers, *heter, meeting, *coordinators)
    return Roles(Slots(_housed(request, all_slots), FIRST_PORT, master="none"), devices)


def _slots(request: Request, role: str, number: str) -> tuple[Slot, ...]:
    """Return the slots of ROLE, which the option NUMBER counts or a list names."""
    count: int | None = getattr(request, number)
    words: tuple[str, ...] = getattr(request, _LISTS[role])
    listed = origin.option(request, _LISTS[role])
    stage = 1 if role == TRAINER else 0
    slots = tuple(_slot(listed, word, role, stage) for word in words)
    is_needed = role in {SERVER, TRAINER} and not slots
    if count is not None and count < (1 if is_needed else 0):
        raise UsageError(
            f"{origin.option(request, number)}: give a number, 1 or more; where these processes "
            f"run on other hosts, name all with --servers and --trainers on each host."
        )
    if count and slots and count != len(slots):
        raise UsageError(
            f"{listed} names {len(slots)}, and {origin.option(request, number)} says {count}; omit "
            "one of them."
        )
    return slots or (Slot(role, stage),) * (count or 0)


def _slot(listed: str, text: str, role: str, stage: int) -> Slot:
    """Read TEXT of the option LISTED: HOST or HOST:PORT."""
    host, colon, port = text.strip().partition(":")
    number = int(port) if is_digits(port) else 0
    if not host or is_digits(host) or (colon and not 1 <= number <= LAST_PORT):
        raise UsageError(
            f"{listed}: `{text.strip()}` is not HOST:PORT or HOST; "
            f"a port is from 1 to {LAST_PORT}, and {hosts.NO_IPV6}."
        )
    return Slot(role, stage, host, number if colon else None)


def _heter(request: Request) -> tuple[Slot, ...]:
    """Return the heterogeneous trainers, stage by stage; `;` separates stages."""
    counts: tuple[int, ...] = ()
    number = origin.option(request, "heter_worker_num")
    if request.heter_worker_num is not None and request.heter_worker_num.strip() != "0":
        texts = [text.strip() for text in request.heter_worker_num.split(";")]
        if not all(is_digits(text) and int(text) for text in texts):
            raise UsageError(f"{number}: give a number for each stage, 1 or more, as 2 or '1;2'.")
        counts = tuple(map(int, texts))
    if request.heter_workers is None:
        return tuple(
            Slot(HETER, stage) for stage, count in enumerate(counts, 2) for _ in range(count)
        )
    listed = origin.option(request, "heter_workers")
    stages = [stage.split(",") for stage in request.heter_workers.split(";")]
    sizes = tuple(map(len, stages))
    if counts and counts != sizes:
        raise UsageError(
            f"{listed} names {';'.join(map(str, sizes))}, and {number} says otherwise; omit one of "
            "them."
        )
    return tuple(
        _slot(listed, text, HETER, number)
        for number, stage in enumerate(stages, 2)
        for text in stage
    )


def _heter_devices(request: Request, stages: int) -> tuple[str, ...]:
    """Return the device of each of the heterogeneous STAGES; () if not given."""
    if request.heter_devices is None:
        return ()
    devices = tuple(text.strip().lower() for text in request.heter_devices.split(";"))
    if len(devices) != stages or not {*devices} <= {*_KINDS_OF_DEVICE}:
        raise UsageError(
            f"{origin.option(request, 'heter_devices')}: name one of {', '.join(_KINDS_OF_DEVICE)} "
            f"for each of the {stages} stages of heterogeneous trainers."
        )
    return devices


def _housed(request: Request, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Give every slot a host if any has one, and check the lists for contradictions."""
    named = tuple(dict.fromkeys(slot.host for slot in slots if slot.host is not None))
    if named and not {*request.ips} <= {*named}:
        raise UsageError(
            f"{origin.option(request, 'ips')} names others than the lists of servers and trainers, "
            "which say which hosts take part: leave --ips out."
        )
    lost = [slot.role for slot in slots if slot.host is None and slot.role != MEETING]
    hosts.check_reachable(named, "The lists of servers and trainers")
    if len(named) > 1 and lost:
        raise UsageError(
            f"The lists name {len(named)} hosts ({', '.join(named)}), and which of them the "
            f"{_LISTS[lost[0]]} run on is not given: list them with --{_LISTS[lost[0]]}."
        )
    if named:
        # A number beside a list of one host means that host; gloo meets at the first server.
        slots = tuple(slot._replace(host=slot.host or slots[0].host or named[0]) for slot in slots)
    endpoints = [(slot.host, slot.port) for slot in slots if slot.port is not None]
    for host, port in endpoints:
        if endpoints.count((host, port)) > 1:
            where = f"The endpoint {host}:{port}" if host else f"Port {port}"
            raise UsageError(f"{where} is given twice; servers, trainers and gloo need their own.")
    return slots
