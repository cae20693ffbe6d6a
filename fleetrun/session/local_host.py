"""What this host brings into the session of its job, and its plan of each generation."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from fleetrun.engines.engine import Engine
from fleetrun.errors import FleetrunError
from fleetrun.host import checkpoints, paddles
from fleetrun.model import TRAINER, Endpoint, Facts, LaunchPlan, Member, Request, Roster, Rules
from fleetrun.plan import hosts, planner
from fleetrun.plan.command import is_python
from fleetrun.plan.layout import Slots, session_port
from fleetrun.rundir.variables import TOKEN
from fleetrun.session.connecting import EVERYWHERE
from fleetrun.session.driver import RendezvousEndpoint
from fleetrun.session.messages import JoinRequest, RendezvousConfig, RosterMessage, is_name
from fleetrun.session.sharing import LogFolder

_UNPROTECTED = f"{TOKEN} is not set: anyone could join before the start, and nobody can afterwards."


class LocalHost:
    """What the host brings to the job of REQUEST, whose ranks have SLOTS.

    ASSIGN returns its own roster for an attempt, with its ports held; PLAN plans for a whole
    roster. If ASSIGN fails, or the SLOTS are unknown, the host only tells the others why.
    """

    _local: Roster

    def __init__(
        self,
        request: Request,
        facts: Facts,
        engine: Engine,
        slots: Slots | None,
        *,
        assign: Callable[[int], Roster],
        plan: Callable[[Roster], LaunchPlan],
    ) -> None:
        self.launcher = os.urandom(8).hex()
        self.request, self.facts, self.engine, self.slots = request, facts, engine, slots
        self._assign, self._plan = assign, plan
        self._logs = LogFolder(os.path.join(facts.cwd, request.log_dir), self.launcher)
        # Called when the first rendezvous is over.
        self.settle = self._logs.settle
        # Why there is no roster.
        self._fault: FleetrunError | None = None
        try:
            self._local = assign(0)
        except FleetrunError as fault:
            self._fault = fault
        # Its place among the listed hosts; None: unknown.
        self.place = self._local.me if self._fault is None else self._known_place()
        self._first_me: int | None = None
        is_listed = self.place is not None and bool(engine.hosts)
        # The request without ports and devices.
        self.bare = JoinRequest(
            host=engine.hosts[self.place or 0] if is_listed else (request.host or ""),
            hostname=facts.hostname if is_name(facts.hostname) else "unnamed",
            pid=facts.pid,
            ports=(),
            groups=(),
            rank=self.place if is_listed else request.rank,
            run=planner.run_name(request, facts.started_utc, facts.pid),
            settings=_settings(request, facts, slots, engine) if slots and not self._fault else (),
        )

    def _known_place(self) -> int | None:
        """Return the place of a host that cannot take part, if that can be told."""
        names, own = self.engine.hosts, hosts.own_places(self.engine.hosts, self.facts)
        if len(own) > 1:
            own = [place for place in own if names[place] == self.request.host]
        return own[0] if own else (None if names else 0)

    def endpoint(self, *, has_store: bool) -> RendezvousEndpoint:
        """Return where the launchers meet: at a listed host, or where --master says."""
        request, facts, slots, names = self.request, self.facts, self.slots, self.engine.hosts
        first_port = planner.first_port(request) if slots is None else slots.first_port
        port = session_port(first_port if request.start_port is None else request.start_port)
        point = None if names else hosts.meets_at(request)
        token = facts.environ.get(TOKEN) or None
        least, most = hosts.bounds(request.nnodes)
        allowed = None
        if point is None:
            # Without a number, as from a cluster's engine, all listed hosts must come.
            least, most = (least if least < most else len(names)), len(names)
            host, is_ours = names[0], self.place == 0
            known = [facts.resolved.get(n, ()) if not hosts.is_address(n) else (n,) for n in names]
            if not token and all(known) and not any(map(hosts.is_loopback, names)):
                allowed = frozenset(address for addresses in known for address in addresses)
        elif has_store:
            host = request.host or ("" if facts.network is None else facts.network.ip)
            is_ours = bool(host)
        else:
            host, port, is_ours = point.host, point.port, hosts.is_own(point.host, facts)
        config = RendezvousConfig(
            least,
            most,
            max_restarts=request.max_restart,
            rdzv_timeout_s=request.rdzv_timeout_s,
            heartbeat_timeout_s=request.heartbeat_timeout_s,
            elastic_timeout_s=request.elastic_timeout_s,
            spares=request.spares,
            grace_s=request.grace_s,
            hang_timeout_s=request.hang_timeout_s,
            has_store=has_store,
        )
        is_address = hosts.is_address(host) and hosts.is_own(host, facts)
        return RendezvousEndpoint(
            config,
            host,
            port,
            request.job_id,
            token,
            address=(host if is_address else EVERYWHERE) if is_ours else "",
            names=names,
            allowed=allowed,
        )

    def offer(self, attempt: int) -> JoinRequest:
        """Return the request for a place; raise FleetrunError if this host cannot take part."""
        if attempt:
            self._local = self._assign(attempt)
        elif self._fault is not None:
            raise self._fault
        else:
            # Before anybody can look for it.
            self._logs.announce()
        own, folder = self._local.members[self._local.me], self.request.resume_from
        has_own_port = self.slots is not None and self.slots.master == "own"
        return self.bare._replace(
            host=own.host,
            ports=own.ports,
            groups=own.groups,
            attempt=attempt,
            checkpoints=() if folder is None else checkpoints.listed(folder),
            master_port=self._local.master.port if has_own_port else None,
        )

    def plan(self, agreed: RosterMessage) -> LaunchPlan:
        """Return the plan of the generation; raise FleetrunError if there is none."""
        entries, config = agreed.entries, agreed.config
        first, me = entries[0], [entry.launcher for entry in entries].index(self.launcher)
        self._first_me = me if self._first_me is None else self._first_me
        # What a host that comes later has found when it came may be out of date.
        former = [entry for entry in entries if entry.attempt] or entries
        # Listed hosts are known by their addresses.
        is_closed = self.facts.environ.get(TOKEN) or self.engine.hosts
        return self._plan(
            self._local._replace(
                members=tuple(Member(entry.host, entry.ports, entry.groups) for entry in entries),
                me=me,
                # Whoever follows a lost coordinator orders the hosts anew.
                first_me=self._first_me if config.may_change or agreed.generation else None,
                master=Endpoint(first.host, first.master_port or first.ports[0]),
                generation=agreed.generation,
                rules=Rules(config.grace_s, config.max_restarts, config.hang_timeout_s),
                checkpoints=tuple((entry.host, entry.checkpoints) for entry in former),
                notes=(*self._local.notes, *([] if is_closed else [_UNPROTECTED])),
                shared_logs=self._logs.look(entries, agreed.generation),
            )
        )


def _settings(
    request: Request, facts: Facts, slots: Slots, engine: Engine
) -> tuple[tuple[str, str], ...]:
    """Return the settings that must be the same on all hosts."""
    nnodes = str(len(engine.hosts)) if engine.hosts else request.nnodes
    settings = {
        # The coordinator's bounds apply.
        "--nnodes": "a range" if ":" in request.nnodes else nnodes,
        "--run_mode": request.run_mode,
        "the strategy": "" if request.strategy is None else request.strategy.digest,
        "the list of hosts": ",".join(engine.hosts),
    }
    if is_python(request.script):
        path = os.path.join(facts.cwd, request.script.target)
        with suppress(OSError), open(path, "rb") as file:
            settings["the script's digest"] = hashlib.sha256(file.read()).hexdigest()[:12]
        paddle = paddles.find(sys.path)
        settings["Paddle's version"] = "" if paddle is None else paddle.version
    if {slot.role for slot in slots.slots} != {TRAINER}:
        places = (f"{slot.role} {slot.host or ''}:{slot.port or ''}" for slot in slots.slots)
        settings["the list of processes"] = ", ".join(place.strip(" :") for place in places)
    return tuple(settings.items())
