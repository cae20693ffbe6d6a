"""How a launch joins its session: where the launchers meet, and what this host brings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from fleetrun.engines import SelectedEngine, detect
from fleetrun.errors import FleetrunError, UsageError
from fleetrun.host import checkpoints, paddles
from fleetrun.model import TRAINER, Endpoint, Facts, LaunchPlan, Member, Request, Roster
from fleetrun.plan import free_gpus, hosts, origin, planner
from fleetrun.plan.command import is_python
from fleetrun.plan.layout import Slots, session_port
from fleetrun.rundir.variables import TOKEN
from fleetrun.session import health, script
from fleetrun.session.codec import LONGEST_TEXT
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.connecting import EVERYWHERE
from fleetrun.session.driver import RendezvousEndpoint, Session
from fleetrun.session.messages import JoinRequest, RosterMessage, is_name
from fleetrun.session.rank_assignment import LIST
from fleetrun.session.rendezvous import Rendezvous
from fleetrun.session.script import digest
from fleetrun.session.sharing import LogFolder

_UNPROTECTED = (
    f"{TOKEN} is not set: until all hosts had joined, anyone with the --job_id and the same "
    "script could take part."
)
# Shorter tokens can be guessed.
_LEAST_TOKEN = 16
_SHORT = (
    f"{TOKEN} has fewer than {_LEAST_TOKEN} characters, which can be guessed: make one "
    "with `openssl rand -hex 32`, the same on every host."
)
_CLOSED = (
    f"{TOKEN} is not set: hosts that come after the job has begun cannot take part. For that, "
    "set it to one value on all hosts before (`openssl rand -hex 32` makes one)."
)
_NAME_BYTES = 8


def join(
    request: Request,
    facts: Facts,
    engine: SelectedEngine,
    slots: Slots,
    *,
    assign: Callable[[int], Roster],
    plan: Callable[[Roster], LaunchPlan],
    log: Callable[[str], None],
    redact: Callable[[str], str],
) -> tuple[Session, Rendezvous]:
    """Return the session of the job, and the gathering that joins it.

    ASSIGN returns this host's own roster for an attempt, with its ports held; PLAN plans for a
    whole roster. REDACT masks secrets in what the other hosts are told.
    """
    try:
        local = assign(0)
    except FleetrunError as error:
        return tell(request, facts, engine, error, log=log, redact=redact)
    launcher = os.urandom(_NAME_BYTES).hex()
    log_dir = os.path.join(facts.cwd, request.log_dir)
    logs = LogFolder(log_dir, launcher, planner.run_name(request, facts.started_utc, facts.pid))
    endpoint = _endpoint(request, facts, engine, slots.first_port, local.me)
    bare = _named(request, facts, engine, local.me)._replace(
        settings=_settings(request, facts, slots, engine), remarks=_remarks(request, facts)
    )
    session = _session(request, facts, endpoint, launcher, bare, log)
    # Listed hosts may come back; if an engine starts the hosts, none joins late. No token is
    # generated here: it would be masked, or end up in logs.
    may_come_late = endpoint.config.may_change and not detect.rows(facts.environ)
    if may_come_late and not endpoint.knows_callers:
        log(_CLOSED)
    first_me: int | None = None

    def offer(attempt: int) -> JoinRequest:
        nonlocal local
        if attempt:
            local = assign(attempt)
        else:
            # Before anybody can look for it.
            logs.announce()
        own_member, folder = local.members[local.me], request.resume_from
        return bare._replace(
            host=own_member.host,
            ports=own_member.ports,
            groups=own_member.groups,
            attempt=attempt,
            checkpoints=() if folder is None else checkpoints.listed(folder),
            master_port=local.master.port if slots.master == "own" else None,
        )

    def make(agreed: RosterMessage) -> LaunchPlan:
        nonlocal first_me
        roster = _roster(agreed, launcher, local)
        _check_own_address(request, facts, agreed, roster.me)
        if agreed.config.may_change:
            first_me = roster.me if first_me is None else first_me
            roster = roster._replace(first_me=first_me)
        launchers = [entry.launcher for entry in agreed.entries]
        attempts = [entry.attempt for entry in agreed.entries]
        notes = [_UNPROTECTED] if endpoint.token is None and not engine.hosts else []
        if endpoint.token is not None and len(endpoint.token) < _LEAST_TOKEN:
            notes = [_SHORT]
        return plan(
            roster._replace(
                notes=(*roster.notes, *notes),
                shared_logs=logs.look(launchers, agreed.generation, attempts),
            )
        )

    def trouble() -> str:
        before = free_gpus.used_before(facts, local.members[local.me].groups)
        return health.trouble(log_dir, before)

    rendezvous = Rendezvous(
        session,
        offer=offer,
        bare=bare,
        plan=make,
        redact=redact,
        log=log,
        health=trouble,
        settled=logs.settle,
        hint=hosts.hint(engine.hosts, request, facts),
    )
    return session, rendezvous


def tell(
    request: Request,
    facts: Facts,
    engine: SelectedEngine,
    fault: FleetrunError,
    *,
    log: Callable[[str], None],
    redact: Callable[[str], str],
) -> tuple[Session, Rendezvous]:
    """Return the session of the job, and a rendezvous that only reports this host's FAULT."""
    try:
        place: int | None = _place(engine, request, facts)
    except FleetrunError:
        own = hosts.own_places(engine.hosts, facts)
        place = own[0] if len(own) == 1 else None
    endpoint = _endpoint(request, facts, engine, planner.first_port(request), place)
    bare = _named(request, facts, engine, place)
    session = _session(request, facts, endpoint, os.urandom(_NAME_BYTES).hex(), bare, log)

    def fail(_: object) -> NoReturn:
        raise fault

    return session, Rendezvous(session, offer=fail, bare=bare, plan=fail, redact=redact, log=log)


def _check_own_address(request: Request, facts: Facts, agreed: RosterMessage, me: int) -> None:
    """Raise UsageError if --host gives this host the address of another one."""
    own, option = agreed.entries[me], origin.option(request, "host")
    if request.host is None or hosts.is_own(request.host, facts):
        return
    for other in agreed.entries:
        is_elsewhere = other.hostname != own.hostname or set(other.ports) & set(own.ports)
        if other.launcher != own.launcher and other.host == own.host and is_elsewhere:
            raise UsageError(
                f"{option} is also that of {other.hostname}, and this host has "
                f"{hosts.own_addresses(facts)}: give each host its own, or none."
            )


def _roster(agreed: RosterMessage, launcher: str, local: Roster) -> Roster:
    """Return the session's roster as planning knows it."""
    first = agreed.entries[0]
    # What a host that comes later has found when it came may be out of date.
    former = [entry for entry in agreed.entries if entry.attempt] or agreed.entries
    port = first.master_port if first.master_port is not None else first.ports[0]
    return local._replace(
        members=tuple(Member(entry.host, entry.ports, entry.groups) for entry in agreed.entries),
        me=[entry.launcher for entry in agreed.entries].index(launcher),
        master=Endpoint(first.host, port),
        generation=agreed.generation,
        rules=agreed.config.rules,
        checkpoints=tuple((entry.host, entry.checkpoints) for entry in former),
    )


# Where the launchers meet -------------------------------------------------------------------------


def _place(engine: SelectedEngine, request: Request, facts: Facts) -> int:
    """Return our place among the listed hosts."""
    if not engine.hosts:
        return 0
    trainer_id = facts.environ.get("PADDLE_TRAINER_ID", "")
    if hosts.in_paddlecloud(facts.environ) and trainer_id.isdecimal():
        return int(trainer_id)
    return hosts.place(engine.hosts, request, facts, options=engine.places.options)[0]


def _endpoint(
    request: Request, facts: Facts, engine: SelectedEngine, first_port: int, place: int | None
) -> RendezvousEndpoint:
    """Return the endpoint of the job."""
    point = hosts.meets_at(request) if not engine.hosts else None
    token = facts.environ.get(TOKEN) or None
    config = _config(request, engine, is_listed=point is None)
    allowed, source = None, ""
    port = session_port(first_port if request.start_port is None else request.start_port)
    if config.has_store:
        host = request.host or ("" if facts.network is None else facts.network.ip)
        is_ours = bool(host)
    elif point is not None:
        host, port, is_ours = point.host, point.port, hosts.is_own(point.host, facts)
    else:
        host, is_ours = engine.hosts[0], place == 0
        allowed = None if token else _addresses_of(engine.hosts, facts)
        if allowed is not None and place is not None:
            # The kernel may call from another one, which the listed hosts would refuse.
            name = engine.hosts[place]
            own = {own.ip for own in facts.addresses if not hosts.is_loopback(own.ip)}
            source = next((ip for ip in (name, *facts.resolved.get(name, ())) if ip in own), "")
    return RendezvousEndpoint(
        config,
        host,
        port,
        request.job_id,
        token,
        addresses=(_listening_address(host, facts),) if is_ours else (),
        may_be_second=point is not None and not config.has_store,
        allowed=allowed,
        source=source,
    )


def _config(request: Request, engine: SelectedEngine, *, is_listed: bool) -> RendezvousConfig:
    """Return the config of REQUEST; IS_LISTED: the hosts are those that ENGINE knows."""
    least, most = hosts.bounds(request.nnodes)
    if is_listed:
        # Without a number, as from a cluster's engine, all listed hosts must come.
        least, most = (least if least < most else len(engine.hosts)), len(engine.hosts)
    return RendezvousConfig(
        least,
        most,
        names=engine.hosts if is_listed else (),
        max_restarts=request.max_restart,
        rdzv_timeout_s=request.rdzv_timeout_s,
        heartbeat_timeout_s=request.heartbeat_timeout_s,
        elastic_timeout_s=request.elastic_timeout_s,
        spares=request.spares,
        grace_s=request.grace_s,
        hang_timeout_s=request.hang_timeout_s,
        has_store=not is_listed and hosts.store_endpoints(request.master or "") is not None,
    )


def _session(  # noqa: PLR0917 - as join has them
    request: Request,
    facts: Facts,
    endpoint: RendezvousEndpoint,
    launcher: str,
    bare: JoinRequest,
    log: Callable[[str], None],
) -> Session:
    """Return the session, with a coordinator elected by etcd if --master names that."""
    if not endpoint.config.has_store:
        return Session(endpoint, launcher, host=bare.named(), log=log)
    from fleetrun.session.elected import ElectedSession  # only with etcd

    endpoints = hosts.store_endpoints(request.master or "") or ()
    is_far = not all(hosts.is_loopback(point.host) for point in endpoints)
    own = [
        address.ip
        for address in facts.addresses
        if not hosts.is_loopback(address.ip) and ":" not in address.ip
    ]
    return ElectedSession(
        endpoint,
        launcher,
        host=bare.named(),
        log=log,
        endpoints=[(point.host, point.port) for point in endpoints],
        is_secure=(request.master or "").strip().startswith("etcds:"),
        own_addresses=own if is_far else (),
    )


def _listening_address(host: str, facts: Facts) -> str:
    """Return the address to listen on: HOST if it is ours, else that of the job's network."""
    own = {address.ip for address in facts.addresses}
    if hosts.is_address(host) and (host in own or hosts.is_loopback(host)):
        return host
    if ":" in "".join(facts.resolved.get(host, (host,))[:1]):
        # A name that has no other address; callers take that one.
        return next((ip for ip in facts.resolved.get(host, ()) if ip in own), host)
    if host == "localhost":
        return "127.0.0.1"
    if facts.network is not None:
        return facts.network.ip
    ipv4 = [address for address in facts.addresses if ":" not in address.ip]
    if any(address.interface == "lo" and not hosts.is_loopback(address.ip) for address in ipv4):
        # HOST may be the name of that one.
        return EVERYWHERE
    near = [address.ip for address in ipv4 if address.interface == facts.peer_interface]
    return near[0] if near else EVERYWHERE


def _addresses_of(names: tuple[str, ...], facts: Facts) -> frozenset[str] | None:
    """Return the addresses from which the hosts NAMES call; None if some are unknown."""
    addresses: set[str] = set()
    for name in names:
        known = (name,) if hosts.is_address(name) else facts.resolved.get(name, ())
        if hosts.is_loopback(name) or (not known and not hosts.is_own(name, facts)):
            return None
        addresses.update(known)
    return frozenset(addresses)


# What this host brings ----------------------------------------------------------------------------


def _named(
    request: Request, facts: Facts, engine: SelectedEngine, place: int | None
) -> JoinRequest:
    """Return this host's request without ports and devices."""
    is_listed = place is not None and bool(engine.hosts)
    return JoinRequest(
        host=engine.hosts[place or 0] if is_listed else (request.host or ""),
        hostname=_plain(facts.hostname),
        pid=facts.pid,
        ports=(),
        groups=(),
        rank=place if is_listed else request.rank,
    )


def _settings(
    request: Request, facts: Facts, slots: Slots, engine: SelectedEngine
) -> tuple[tuple[str, str], ...]:
    """Return the settings that must be the same on all hosts."""
    is_fixed = engine.hosts and ":" not in request.nnodes
    settings = {
        "--nnodes": str(len(engine.hosts)) if is_fixed else request.nnodes,
        "--run_mode": planner.mode(request),
        "the strategy": "" if request.strategy is None else request.strategy.digest,
        "--gather_logs": request.gather_logs or "",
    }
    if is_python(request.script):
        settings["the script's digest"] = _digest(request, facts)
        paddle = paddles.find(sys.path)
        settings["Paddle's version"] = "" if paddle is None else paddle.version
    if engine.hosts:
        settings[LIST] = _comparable(",".join(engine.hosts))
    roles = [slot.role for slot in slots.slots]
    if slots.hosts:
        layout = ",".join(f"{slot.role} {slot.host}:{slot.port}" for slot in slots.slots)
        settings["the list of servers and trainers"] = _comparable(layout)
    if set(roles) != {TRAINER}:
        counted = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        settings["what each host has"] = counted
    return tuple(settings.items())


def _remarks(request: Request, facts: Facts) -> tuple[tuple[str, str], ...]:
    """Return the settings whose differences between hosts are reported."""
    remarks = [("the digest of the script's arguments", digest("\0".join(request.script.args)))]
    if not is_python(request.script):
        # It may be built differently on each host.
        remarks.append(("the digest of the program", _digest(request, facts)))
    return tuple(remarks)


def _digest(request: Request, facts: Facts) -> str:
    return digest(script.identity(request.script, facts.cwd, facts.environ))


def _plain(hostname: str) -> str:
    """Return HOSTNAME with the characters that other hosts accept; the kernel allows any.

    >>> _plain("node-1.local"), _plain("my machine")
    ('node-1.local', 'my-machine')
    """
    return hostname if is_name(hostname) else re.sub(r"[^\w.:-]|^-", "-", hostname)[:64].lstrip("-")


def _comparable(text: str) -> str:
    """Return TEXT, or its digest if it is too long for a message."""
    return text if len(text) <= LONGEST_TEXT // 2 else digest(text)
