"""Parameter servers: servers hold what is learned, and the job is done when its trainers are."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.errors import UsageError
from fleetrun.model import Endpoint, Peers, RankSpec
from fleetrun.modes.cast import Cast, Part
from fleetrun.plan import origin, servers
from fleetrun.plan.devices import MASKS
from fleetrun.plan.servers import COORDINATOR, HETER, MEETING, SERVER, TRAINER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fleetrun.model import Device, Facts, Request, Roster
    from fleetrun.plan.devices import Share
    from fleetrun.plan.servers import Crew, Post, Seat

NAME = "ps"

# The names of logs, as Paddle has them (but for the coordinators', where it says one and does two).
LOGS = {
    SERVER: "serverlog",
    TRAINER: "workerlog",
    HETER: "heterlog",
    COORDINATOR: "coordinatorlog",
}

# What people call them; a process is called so, too.
NAMES = {SERVER: "server", TRAINER: "trainer", HETER: "heter", COORDINATOR: "coordinator"}

# Who computes with devices; the others must not even see them.
_COMPUTES = (TRAINER, HETER)
# Paddle sets both to the same, whichever kind of device there is.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES")
_GLOO = ("0", "1", "2")
# Ports that neither Linux nor fleetrun gives to anybody, and a few, for when one is taken.
_FIRST_LAUNCHER_PORT, _LAUNCHER_PORTS, _TRIES = 9400, 840, 4


class Layout(NamedTuple):
    """Every rank of the job, role by role, and where the trainers' gloo meets."""

    ranks: tuple[RankSpec, ...]
    meeting: Endpoint
    # The stage of each heterogeneous trainer, by its rank.
    stages: tuple[int, ...] = ()

    def endpoints(self, role: str) -> tuple[Endpoint, ...]:
        """Return the endpoints of all who have ROLE, by rank."""
        return tuple(spec.endpoint for spec in self.ranks if spec.role == role)

    def stage_endpoints(self, stage: int) -> tuple[Endpoint, ...]:
        """Return the endpoints of a stage: the trainers are the first, then HETER_TRAINERs."""
        if stage == 1:
            return self.endpoints(TRAINER)
        pairs = zip(self.endpoints(HETER), self.stages, strict=True)
        return tuple(endpoint for endpoint, own in pairs if own == stage)


def cast(request: Request, facts: Facts, share: Share, roster: Roster) -> Cast:
    """Return who takes part in the job, and what this host starts."""
    notes = servers.check_paddle(request, facts)
    post = servers.post(request, facts.environ)
    if post is not None:
        return _posted(post, facts, share, notes)
    crew = servers.crew(request)
    notes += servers.supplied(request)
    found = layout(crew, roster, share.groups)
    gloo = with_gloo(request, facts.environ, found)
    mine = [spec for spec in found.ranks if spec.node_rank == roster.me]
    parts = tuple(
        Part(
            spec,
            name=name(spec),
            log=log(spec),
            essential=is_essential(spec),
            awaits=awaited(spec, found),
            identity=variables(
                crew, found, spec, kind=share.kind, gloo=gloo, environ=facts.environ
            ),
        )
        for spec in mine
    )
    return Cast(NAME, found.ranks, parts, notes, peers=peers(request.job_id, found))


def _posted(post: Post, facts: Facts, share: Share, notes: tuple[str, ...]) -> Cast:
    """Return the one process that a cluster wants of this node; it is told what we were told."""
    devices = share.groups[0] if post.role in _COMPUTES else ()
    spec = RankSpec(post.role, post.rank, 0, 0, devices, post.endpoint)
    identity = {} if not devices and post.role in _COMPUTES else _devices(spec, share.kind, {})
    # Older and newer Paddles know the role by either name.
    identity["PADDLE_ROLE"] = facts.environ.get("PADDLE_ROLE") or post.role
    part = Part(spec, name(spec), log(spec), identity=identity)
    return Cast(NAME, (spec,), (part,), notes, keeps_identity=True)


def name(spec: RankSpec) -> str:
    """Name SPEC's process: `server.1`."""
    return f"{NAMES[spec.role]}.{spec.rank}"


def layout(crew: Crew, roster: Roster, groups: Sequence[tuple[Device, ...]]) -> Layout:
    """Seat CREW on the ROSTER, whose members have a port for each seat that is theirs.

    GROUPS are a host's devices: its first trainer gets the first group, and so on, over and over.
    """
    ranks: list[RankSpec] = []
    stages: list[int] = []
    meetings: list[Endpoint] = []
    in_job: Counter[str] = Counter()
    on_host: Counter[tuple[str, int]] = Counter()
    for node_rank, seat, endpoint in _placed(crew, roster):
        if seat.role == MEETING:
            meetings.append(endpoint)
            continue
        rank, local_rank = in_job[seat.role], on_host[seat.role, node_rank]
        devices = groups[local_rank % len(groups)] if seat.role in _COMPUTES and groups else ()
        ranks.append(RankSpec(seat.role, rank, local_rank, node_rank, devices, endpoint))
        in_job[seat.role] += 1
        on_host[seat.role, node_rank] += 1
        if seat.role == HETER:
            stages.append(seat.stage)
    # Where hosts have seats by number, the first server is on the first of them.
    return Layout(tuple(ranks), meetings[0], tuple(stages))


def _placed(crew: Crew, roster: Roster) -> Iterator[tuple[int, Seat, Endpoint]]:
    """Yield each seat with its place: in the lists' order, or host by host within a role."""
    nodes = {member.host: node_rank for node_rank, member in enumerate(roster.members)}
    ports = [iter(member.ports) for member in roster.members]
    if crew.hosts:
        for seat in crew.seats:
            host = seat.host or ""
            yield nodes[host], seat, Endpoint(host, next(ports[nodes[host]]))
        return
    found = [
        (node_rank, seat, Endpoint(host, next(ports[node_rank])))
        for host, node_rank in nodes.items()
        for seat in crew.seats
    ]
    kinds = list(dict.fromkeys((seat.role, seat.stage) for seat in crew.seats))
    yield from sorted(found, key=lambda one: kinds.index((one[1].role, one[1].stage)))


def peers(job_id: str, found: Layout) -> Peers | None:
    """Return where the launchers of several hosts meet: on the first server's host.

    The ports follow from the job, so that each launcher knows them, and two jobs have different
    ones.
    """
    if len({spec.node_rank for spec in found.ranks}) == 1:
        return None
    chair = next(spec for spec in found.ranks if spec.role == SERVER)
    seats = [f"{spec.role} {spec.endpoint}" for spec in found.ranks]
    key = zlib.crc32("\n".join((job_id, *seats)).encode())
    first = _FIRST_LAUNCHER_PORT + key % (_LAUNCHER_PORTS - _TRIES)
    ports = tuple(range(first, first + _TRIES))
    return Peers(chair.node_rank, chair.endpoint.host, ports, f"{key:08x}")


def is_essential(spec: RankSpec) -> bool:
    """Say whether the job waits for SPEC to finish; the others are stopped when it is done."""
    return spec.role == TRAINER


def log(spec: RankSpec) -> str:
    """Return the name of SPEC's log: each host counts each role from 0, as Paddle does."""
    return f"{LOGS[spec.role]}.{spec.local_rank}"


def awaited(spec: RankSpec, found: Layout) -> tuple[tuple[Endpoint, ...], ...]:
    """Return what must listen before SPEC starts: one endpoint of each group.

    With gloo the first server does not listen before the trainers have met at its other port.
    """
    if spec.role == SERVER:
        return ()
    first, *others = found.endpoints(SERVER)
    return ((first, found.meeting), *((endpoint,) for endpoint in others))


def with_gloo(request: Request, environ: Mapping[str, str], found: Layout) -> str:
    """Return PADDLE_WITH_GLOO: 1 lets the trainers wait for each other, 2 the servers too."""
    if request.with_gloo is not None and request.with_gloo not in _GLOO:
        raise UsageError(f"{origin.option(request, 'with_gloo')}: give one of {', '.join(_GLOO)}.")
    # Without it a trainer may begin with weights of zero, before the first one has sent its own.
    # But heterogeneous trainers call gloo without ever having started it; and on several hosts it
    # knows each by its hostname only, which Debian resolves to 127.0.1.1.
    hosts = {spec.node_rank for spec in found.ranks if spec.role == TRAINER}
    default = "0" if found.stages or len(hosts) > 1 else "1"
    return request.with_gloo or environ.get("PADDLE_WITH_GLOO") or default


def variables(
    crew: Crew,
    found: Layout,
    spec: RankSpec,
    *,
    kind: str,
    gloo: str,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Say who SPEC is: what scripts for Paddle 2.0, 2.6 and 3.3 read in its role, together.

    KIND is the kind of device that this host trains on.
    """
    nodes = {one.node_rank for one in found.ranks}
    identity = {
        "TRAINING_ROLE": spec.role,
        "PADDLE_ROLE": spec.role,
        "POD_IP": spec.endpoint.host,
        "PADDLE_PORT": str(spec.endpoint.port),
        "PADDLE_PSERVERS_IP_PORT_LIST": _join(found.endpoints(SERVER)),
        "PADDLE_TRAINER_ENDPOINTS": _join(found.endpoints(TRAINER)),
        "PADDLE_TRAINERS_NUM": str(len(found.endpoints(TRAINER))),
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": _join(found.endpoints(HETER)),
        "PADDLE_COORDINATOR_ENDPOINTS": _join(found.endpoints(COORDINATOR)),
        "PADDLE_NNODES": str(len(nodes)),
        "PADDLE_WITH_GLOO": gloo,
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_HTTP_ENDPOINT": str(found.meeting),
    }
    if spec.role in {TRAINER, COORDINATOR}:
        identity["PADDLE_TRAINER_ID"] = str(spec.rank)
    if spec.role == COORDINATOR:
        identity["PADDLE_COORDINATOR_NUM"] = str(len(found.endpoints(COORDINATOR)))
    if found.stages:
        identity |= _stages(crew, found, spec, kind)
    return identity | _devices(spec, kind, environ)


def _stages(crew: Crew, found: Layout, spec: RankSpec, kind: str) -> dict[str, str]:
    """Say where SPEC stands among the stages of heterogeneous training."""
    shared = {"PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": _join(found.endpoints(HETER))}
    if spec.role not in _COMPUTES:
        return shared
    stage = 1 if spec.role == TRAINER else found.stages[spec.rank]
    computes_on = "cpu"
    if stage > 1:
        # Where nobody says, as Paddle 2.0 had it: on what there is.
        there = kind if kind in {"gpu", "xpu"} else "cpu"
        computes_on = crew.heter_devices[stage - 2] if crew.heter_devices else there
    sizes = [len(found.stage_endpoints(each)) for each in range(1, crew.stages + 1)]
    return shared | {
        "STAGE_ID": str(stage),
        "STAGE_NUM": str(crew.stages),
        # Written as Python writes a list.
        "PADDLE_STAGE_TRAINERS_NUM": str(sizes),
        "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": _join(found.stage_endpoints(stage - 1)),
        "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": _join(found.stage_endpoints(stage + 1)),
        "HETER_DEVICE_TYPE": computes_on,
    }


def _devices(spec: RankSpec, kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Show SPEC its devices and no others, by the names that the mask we inherited has for them."""
    masks = tuple(dict.fromkeys((*_VISIBLE, *MASKS.get(kind, ()))))
    if spec.role not in _COMPUTES:
        # A server built for GPUs would take memory on the first one for nothing.
        return dict.fromkeys(masks, "")
    flags = dict.fromkeys(("FLAGS_selected_gpus", "FLAGS_selected_xpus"), "0")
    if not spec.devices:
        # As Paddle; but a mask that the user set, hiding them all, say, stays.
        return {name: "0" for name in masks if name not in environ} | flags
    # Within the narrowed mask, devices count from 0 again.
    places = ",".join(str(place) for place in range(len(spec.devices)))
    flags |= dict.fromkeys((*flags, f"FLAGS_selected_{kind}s"), places)
    return dict.fromkeys(masks, ",".join(device.id for device in spec.devices)) | flags


def _join(endpoints: Sequence[Endpoint]) -> str:
    """Write a list as Paddle reads it."""
    return ",".join(str(endpoint) for endpoint in endpoints)
