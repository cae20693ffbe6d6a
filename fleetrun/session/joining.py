"""How a launch joins its session: where the launchers meet, and how this one listens."""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.engines import SelectedEngine
from fleetrun.model import Facts, Request
from fleetrun.plan import hosts, planner
from fleetrun.plan.layout import session_port
from fleetrun.rundir.variables import TOKEN
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.connecting import EVERYWHERE
from fleetrun.session.driver import RendezvousEndpoint, Session
from fleetrun.session.local_host import LocalHost
from fleetrun.session.rendezvous import Rendezvous


def join(
    own: LocalHost, *, log: Callable[[str], None], redact: Callable[[str], str]
) -> tuple[Session, Rendezvous]:
    """Return the session of the job of OWN host, and the gathering that joins it.

    REDACT masks secrets in what the other hosts are told.
    """
    session = _session(own, _endpoint(own), log)
    return session, Rendezvous(session, own, redact=redact, log=log)


def _endpoint(own: LocalHost) -> RendezvousEndpoint:
    """Return the endpoint of the job."""
    request, facts, engine, slots = own.request, own.facts, own.engine, own.slots
    first_port = planner.first_port(request) if slots is None else slots.first_port
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
        host, is_ours = engine.hosts[0], own.place == 0
        allowed = None if token else _addresses_of(engine.hosts, facts)
        if allowed is not None and own.place is not None:
            # The kernel may call from another one, which the listed hosts would refuse.
            name = engine.hosts[own.place]
            ours = {address.ip for address in facts.addresses if not hosts.is_loopback(address.ip)}
            source = next((ip for ip in (name, *facts.resolved.get(name, ())) if ip in ours), "")
    return RendezvousEndpoint(
        config,
        host,
        port,
        request.job_id,
        token,
        addresses=(_listening_address(host, facts),) if is_ours else (),
        names=engine.hosts if point is None else (),
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
        max_restarts=request.max_restart,
        rdzv_timeout_s=request.rdzv_timeout_s,
        heartbeat_timeout_s=request.heartbeat_timeout_s,
        elastic_timeout_s=request.elastic_timeout_s,
        spares=request.spares,
        grace_s=request.grace_s,
        hang_timeout_s=request.hang_timeout_s,
        has_store=not is_listed and hosts.store_endpoints(request.master or "") is not None,
    )


def _session(own: LocalHost, endpoint: RendezvousEndpoint, log: Callable[[str], None]) -> Session:
    """Return the session, with a coordinator elected by etcd if --master names that."""
    host = own.bare.named()
    if not endpoint.config.has_store:
        return Session(endpoint, own.launcher, host=host, log=log)
    from fleetrun.session.elected import ElectedSession  # only with etcd

    endpoints = hosts.store_endpoints(own.request.master or "") or ()
    is_far = not all(hosts.is_loopback(point.host) for point in endpoints)
    ours = [at.ip for at in own.facts.addresses]
    others = [ip for ip in ours if not hosts.is_loopback(ip) and ":" not in ip]
    return ElectedSession(
        endpoint,
        own.launcher,
        host=host,
        log=log,
        members=[(point.host, point.port) for point in endpoints],
        own_address=others[0] if is_far and others else "",
    )


def _listening_address(host: str, facts: Facts) -> str:
    """Return the address to listen on: HOST if it is one of ours, else all."""
    own = {address.ip for address in facts.addresses}
    if host == "localhost":
        return "127.0.0.1"
    if hosts.is_address(host) and (host in own or hosts.is_loopback(host)):
        return host
    return EVERYWHERE if facts.network is None else facts.network.ip


def _addresses_of(names: tuple[str, ...], facts: Facts) -> frozenset[str] | None:
    """Return the addresses from which the hosts NAMES call; None if some are unknown."""
    addresses: set[str] = set()
    for name in names:
        known = (name,) if hosts.is_address(name) else facts.resolved.get(name, ())
        if hosts.is_loopback(name) or (not known and not hosts.is_own(name, facts)):
            return None
        addresses.update(known)
    return frozenset(addresses)
