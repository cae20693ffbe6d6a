"""Parameter servers: servers hold the parameters; the job ends with its trainers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.model import (
    COORDINATOR,
    HETER,
    SERVER,
    TRAINER,
    Device,
    Endpoint,
    Facts,
    RankSpec,
    Request,
    Roster,
)
from fleetrun.plan import kinds, modes, origin
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Layout, LocalProcess, ModeHosts, Slot, Slots
from fleetrun.plan.modes import roles
from fleetrun.plan.modes.roles import MEETING, Roles
from fleetrun.rundir import names
from fleetrun.text import counted

# The common names of roles, also those of the processes.
NAMES = {SERVER: "server", TRAINER: "trainer", HETER: "heter", COORDINATOR: "coordinator"}

# The roles that compute with devices; the others must not see any.
_COMPUTES = (TRAINER, HETER)
# Paddle sets both to the same value, whatever the kind of device.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES")
_GLOO = ("0", "1", "2")
_HETER_MODES = ("ps-heter", "heter")


class Ranks(NamedTuple):
    """All ranks of the job by role, and the rendezvous address of the trainers' gloo."""

    ranks: tuple[RankSpec, ...]
    meeting: Endpoint
    # The stage of each heterogeneous trainer, by its rank.
    stages: tuple[int, ...] = ()

    def endpoints(self, role: str) -> tuple[Endpoint, ...]:
        """Return the endpoints of all ranks of ROLE, by rank."""
        return tuple(spec.endpoint for spec in self.ranks if spec.role == role)

    def stage_endpoints(self, stage: int) -> tuple[Endpoint, ...]:
        """Return the endpoints of STAGE: trainers are stage 1, HETER_TRAINERs the later ones."""
        if stage == 1:
            return self.endpoints(TRAINER)
        pairs = zip(self.endpoints(HETER), self.stages, strict=True)
        return tuple(endpoint for endpoint, own in pairs if own == stage)


def places(request: Request) -> ModeHosts:
    """Return the hosts of the lists of servers and trainers."""
    if not any(getattr(request, name) for name in modes.BY_WORD["ps"].options):
        return ModeHosts(has_roles=True, is_open=True)
    named = roles.roles(request).slots.hosts
    if named and request.nnodes not in {"1", str(len(named))}:
        raise UsageError(
            f"{origin.option(request, 'nnodes')}: the lists of servers and trainers name "
            f"{counted(len(named), 'host')}; leave --nnodes out."
        )
    lists = [name for name in ("servers", "trainers", "heter_workers") if getattr(request, name)]
    return ModeHosts(named, tuple(lists) if named else (), has_roles=True)


def slots(request: Request, share: Share) -> Slots:
    """Return a slot for each process; those of trainers have devices.

    A host's first trainer gets the first group of SHARE, and so on, cyclically.
    """
    slots_of_job = roles.roles(request).slots
    before: Counter[tuple[str, str | None]] = Counter()
    equipped: list[Slot] = []
    for slot in slots_of_job.slots:
        groups = share.groups if slot.role in _COMPUTES else ((),)
        place = before[slot.role, slot.host]
        before[slot.role, slot.host] += 1
        equipped.append(slot._replace(devices=groups[place % len(groups)]))
    return slots_of_job._replace(slots=tuple(equipped))


def layout(request: Request, facts: Facts, share: Share, roster: Roster) -> Layout:
    """Return all ranks of the job, and the processes that this host starts."""
    if roster.assigned is not None:
        return _assigned(roster.assigned, facts, share, roster)
    job_roles = roles.roles(request)
    if request.run_mode in _HETER_MODES and job_roles.stages == 1:
        raise UsageError(
            f"{origin.option(request, 'run_mode')} needs heterogeneous trainers: give "
            "--heter_worker_num or --heter_workers."
        )
    all_ranks = ranks(job_roles.slots, roster)
    gloo = with_gloo(request, facts.environ, all_ranks)
    processes = tuple(
        _process(
            spec,
            variables(
                job_roles, all_ranks, spec, kind=share.kind, gloo=gloo, environ=facts.environ
            ),
            essential=spec.role == TRAINER,
        )
        for spec in all_ranks.ranks
        if spec.node_rank == roster.me
    )
    return Layout(all_ranks.ranks, processes)


def _process(
    spec: RankSpec, identity: Mapping[str, str], *, essential: bool = True
) -> LocalProcess:
    """Return the process of SPEC; like Paddle, each host counts the logs of each role from 0."""
    name = f"{NAMES[spec.role]}.{spec.rank}"
    log = f"{names.LOGS[spec.role]}.{spec.local_rank}"
    return LocalProcess(spec, name, log, identity, essential)


def _assigned(assigned: tuple[str, int], facts: Facts, share: Share, roster: Roster) -> Layout:
    """Return the one process of this node, with the variables that the cluster has set."""
    role, rank = assigned
    devices = share.groups[0] if role in _COMPUTES else ()
    (here,) = roster.members
    spec = RankSpec(role, rank, 0, 0, devices, Endpoint(here.host, here.ports[0]))
    identity = {} if not devices and role in _COMPUTES else _devices(spec, share.kind, {})
    # Older and newer Paddles use either name.
    identity["PADDLE_ROLE"] = facts.environ.get("PADDLE_ROLE") or role
    return Layout((spec,), (_process(spec, identity),))


def ranks(slots: Slots, roster: Roster) -> Ranks:
    """Assign a rank to each of SLOTS; the hosts of ROSTER have a port for each of their slots."""
    specs: list[RankSpec] = []
    stages: list[int] = []
    meetings: list[Endpoint] = []
    in_job: Counter[str] = Counter()
    on_host: Counter[tuple[str, int]] = Counter()
    for node_rank, slot, endpoint, devices in _placed(slots, roster):
        if slot.role == MEETING:
            meetings.append(endpoint)
            continue
        rank, local_rank = in_job[slot.role], on_host[slot.role, node_rank]
        specs.append(RankSpec(slot.role, rank, local_rank, node_rank, devices, endpoint))
        in_job[slot.role] += 1
        on_host[slot.role, node_rank] += 1
        if slot.role == HETER:
            stages.append(slot.stage)
    # If slots are counted, the first server is on the first host.
    return Ranks(tuple(specs), meetings[0], tuple(stages))


def _placed(slots: Slots, roster: Roster) -> list[tuple[int, Slot, Endpoint, tuple[Device, ...]]]:
    """Return each slot with its host, endpoint and devices, in rank order."""
    free = [iter(zip(member.ports, member.groups, strict=True)) for member in roster.members]
    nodes = {member.host: node_rank for node_rank, member in enumerate(roster.members)}
    order = [(nodes[slot.host], slot) for slot in slots.slots if slot.host is not None]
    # By numbers, each host has all slots; several launchers may share an address.
    pairs = order or [(node_rank, slot) for node_rank in range(len(free)) for slot in slots.slots]
    placed: list[tuple[int, Slot, Endpoint, tuple[Device, ...]]] = []
    for node_rank, slot in pairs:
        port, devices = next(free[node_rank])
        endpoint = Endpoint(roster.members[node_rank].host, port)
        placed.append((node_rank, slot, endpoint, devices))
    if not order:
        kinds = list(dict.fromkeys((slot.role, slot.stage) for slot in slots.slots))
        placed.sort(key=lambda entry: kinds.index((entry[1].role, entry[1].stage)))
    return placed


def with_gloo(request: Request, environ: Mapping[str, str], all_ranks: Ranks) -> str:
    """Return PADDLE_WITH_GLOO: with 1 trainers wait for each other, with 2 servers do, too."""
    if request.with_gloo is not None and request.with_gloo not in _GLOO:
        raise UsageError(f"{origin.option(request, 'with_gloo')}: give one of {', '.join(_GLOO)}.")
    # Without it a trainer may start with zero weights before the first one has sent its own. But
    # heterogeneous trainers call gloo without having started it, and on several hosts gloo
    # identifies them only by hostname, which Debian resolves to 127.0.1.1.
    hosts = {spec.node_rank for spec in all_ranks.ranks if spec.role == TRAINER}
    default = "0" if all_ranks.stages or len(hosts) > 1 else "1"
    return request.with_gloo or environ.get("PADDLE_WITH_GLOO") or default


def variables(
    job_roles: Roles,
    all_ranks: Ranks,
    spec: RankSpec,
    *,
    kind: str,
    gloo: str,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of SPEC's role that scripts for Paddle 2.0, 2.6 and 3.3 read.

    KIND is the kind of device that this host trains on.
    """
    nodes = {peer.node_rank for peer in all_ranks.ranks}
    identity = {
        "TRAINING_ROLE": spec.role,
        "PADDLE_ROLE": spec.role,
        "POD_IP": spec.endpoint.host,
        "PADDLE_PORT": str(spec.endpoint.port),
        "PADDLE_PSERVERS_IP_PORT_LIST": _join(all_ranks.endpoints(SERVER)),
        "PADDLE_TRAINER_ENDPOINTS": _join(all_ranks.endpoints(TRAINER)),
        "PADDLE_TRAINERS_NUM": str(len(all_ranks.endpoints(TRAINER))),
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": _join(all_ranks.endpoints(HETER)),
        "PADDLE_COORDINATOR_ENDPOINTS": _join(all_ranks.endpoints(COORDINATOR)),
        "PADDLE_NNODES": str(len(nodes)),
        "PADDLE_WITH_GLOO": gloo,
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_HTTP_ENDPOINT": str(all_ranks.meeting),
    }
    if spec.role in {TRAINER, COORDINATOR}:
        identity["PADDLE_TRAINER_ID"] = str(spec.rank)
    if spec.role == COORDINATOR:
        identity["PADDLE_COORDINATOR_NUM"] = str(len(all_ranks.endpoints(COORDINATOR)))
    if all_ranks.stages:
        identity |= _stages(job_roles, all_ranks, spec, kind)
    return identity | _devices(spec, kind, environ)


def _stages(job_roles: Roles, all_ranks: Ranks, spec: RankSpec, kind: str) -> dict[str, str]:
    """Return the variables of SPEC's stage of heterogeneous training."""
    shared = {"PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": _join(all_ranks.endpoints(HETER))}
    if spec.role not in _COMPUTES:
        return shared
    stage = 1 if spec.role == TRAINER else all_ranks.stages[spec.rank]
    computes_on = "cpu"
    if stage > 1:
        # By default on the available devices, as in Paddle 2.0.
        available = kind if kind in {"gpu", "xpu"} else "cpu"
        computes_on = job_roles.heter_devices[stage - 2] if job_roles.heter_devices else available
    sizes = [len(all_ranks.stage_endpoints(number)) for number in range(1, job_roles.stages + 1)]
    return shared | {
        "STAGE_ID": str(stage),
        "STAGE_NUM": str(job_roles.stages),
        # Formatted as a Python list.
        "PADDLE_STAGE_TRAINERS_NUM": str(sizes),
        "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": _join(all_ranks.stage_endpoints(stage - 1)),
        "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": _join(all_ranks.stage_endpoints(stage + 1)),
        "HETER_DEVICE_TYPE": computes_on,
    }


def _devices(spec: RankSpec, kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show SPEC only its own devices, by their names in the mask."""
    own = () if kind == "cpu" else kinds.masks(kind)
    masks = tuple(dict.fromkeys((*_VISIBLE, *own)))
    if spec.role not in _COMPUTES:
        # A server built for GPUs would waste memory on the first one.
        return dict.fromkeys(masks, "")
    flags = dict.fromkeys(("FLAGS_selected_gpus", "FLAGS_selected_xpus"), "0")
    if not spec.devices:
        # As Paddle does; but a mask set by the user, which may hide all devices, stays.
        return {name: "0" for name in masks if name not in environ} | flags
    # Within the narrowed mask, devices count from 0 again.
    places = ",".join(str(place) for place in range(len(spec.devices)))
    flags |= dict.fromkeys((*flags, f"FLAGS_selected_{kind}s"), places)
    return dict.fromkeys(masks, ",".join(device.id for device in spec.devices)) | flags


def _join(endpoints: Sequence[Endpoint]) -> str:
    """Join ENDPOINTS for Paddle."""
    return ",".join(str(endpoint) for endpoint in endpoints)
