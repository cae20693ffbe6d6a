"""What this host brings into the session of its job, and its plan of each generation."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from fleetrun.engines import SelectedEngine
from fleetrun.errors import FleetrunError, UsageError
from fleetrun.host import checkpoints, paddles, scripts
from fleetrun.model import TRAINER, Endpoint, Facts, LaunchPlan, Member, Request, Roster
from fleetrun.plan import hosts, origin, planner
from fleetrun.plan.command import CHECK, is_python
from fleetrun.plan.layout import Slots
from fleetrun.rundir.variables import TOKEN
from fleetrun.session.codec import LONGEST_TEXT
from fleetrun.session.messages import JoinRequest, RosterMessage, Settings, is_name

from fleetrun.session.sharing import LogFolder

_UNPROTECTED = (
    f"{TOKEN} is not set: until all hosts had joined, anyone with the --job_id and the same "
    "script could take part, and no other host can afterwards."
)
_NAME_BYTES = 8
# How much of a script is read.
_MOST_READ = 64 << 20


class LocalHost:
    """What the host brings to the job of REQUEST, whose ranks have SLOTS.

    ASSIGN returns its own roster for an attempt, with its ports held; PLAN plans for a whole
    roster. If ASSIGN fails, or the SLOTS are unknown, the host only tells the others why.
    """

    def __init__(
        self,
        request: Request,
        facts: Facts,
        engine: SelectedEngine,
        slots: Slots | None,
        *,
        assign: Callable[[int], Roster],
        plan: Callable[[Roster], LaunchPlan],
    ) -> None:
        self.launcher = os.urandom(_NAME_BYTES).hex()
        self.request, self.facts, self.engine, self.slots = request, facts, engine, slots
        self._assign, self._plan = assign, plan
        self._logs = LogFolder(os.path.join(facts.cwd, request.log_dir), self.launcher)
        # The own roster, or why there is none.
        self._local: Roster | None = None
        self._fault: FleetrunError | None = None
        try:
            self._local = assign(0)
        except FleetrunError as fault:
            self._fault = fault
        # Its place among the listed hosts; None: unknown.
        self.place = self._known_place() if self._local is None else self._local.me
        self._first_me: int | None = None
        # The request without ports and devices.
        is_listed = self.place is not None and bool(engine.hosts)
        self.bare = JoinRequest(
            host=engine.hosts[self.place or 0] if is_listed else (request.host or ""),
            hostname=facts.hostname if is_name(facts.hostname) else "unnamed",
            pid=facts.pid,
            ports=(),
            groups=(),
            rank=self.place if is_listed else request.rank,
            run=planner.run_name(request, facts.started_utc, facts.pid),
        )
        if slots is not None and self._fault is None:
            self.bare = self.bare._replace(
                settings=_settings(request, facts, slots, engine),
            )

    def _known_place(self) -> int | None:
        """Return the place of a host that cannot take part, if that can be told."""
        engine, request, facts = self.engine, self.request, self.facts
        trainer_id = facts.environ.get("PADDLE_TRAINER_ID", "")
        if not engine.hosts:
            return 0
        if hosts.in_paddlecloud(facts.environ) and trainer_id.isdecimal():
            return int(trainer_id)
        try:
            return hosts.place(engine.hosts, request, facts, options=engine.places.options)[0]
        except FleetrunError:
            own = hosts.own_places(engine.hosts, facts)
            return own[0] if len(own) == 1 else None

    def offer(self, attempt: int) -> JoinRequest:
        """Return the request for a place; raise FleetrunError if this host cannot take part."""
        if attempt:
            self._local = self._assign(attempt)
        elif self._fault is not None:
            raise self._fault
        else:
            # Before anybody can look for it.
            self._logs.announce()
        assert self._local is not None
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
        assert self._local is not None
        entries = agreed.entries
        me = [entry.launcher for entry in entries].index(self.launcher)
        first = entries[0]
        self._check_own_address(agreed, me)
        if agreed.config.may_change and self._first_me is None:
            self._first_me = me
        # What a host that comes later has found when it came may be out of date.
        former = [entry for entry in entries if entry.attempt] or entries
        port = first.ports[0] if first.master_port is None else first.master_port
        # Listed hosts are known by their addresses.
        is_closed = self.facts.environ.get(TOKEN) or self.engine.hosts
        return self._plan(
            self._local._replace(
                members=tuple(Member(entry.host, entry.ports, entry.groups) for entry in entries),
                me=me,
                first_me=self._first_me if agreed.config.may_change else self._local.first_me,
                master=Endpoint(first.host, port),
                generation=agreed.generation,
                rules=agreed.config.rules,
                checkpoints=tuple((entry.host, entry.checkpoints) for entry in former),
                notes=(*self._local.notes, *([] if is_closed else [_UNPROTECTED])),
                shared_logs=self._logs.look(entries, agreed.generation),
            )
        )

    def _check_own_address(self, agreed: RosterMessage, me: int) -> None:
        """Raise UsageError if --host gives this host the address of another one."""
        request, facts = self.request, self.facts
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

    def settle(self, *, has_begun: bool) -> None:
        """Take note that the first rendezvous is over; HAS_BEGUN: the job begins."""
        self._logs.settle(has_begun=has_begun)


def _settings(request: Request, facts: Facts, slots: Slots, engine: SelectedEngine) -> Settings:
    """Return the settings that must be the same on all hosts."""
    is_fixed = engine.hosts and ":" not in request.nnodes
    settings = {
        "--nnodes": str(len(engine.hosts)) if is_fixed else request.nnodes,
        "--run_mode": request.run_mode,
        "the strategy": "" if request.strategy is None else request.strategy.digest,
    }
    if is_python(request.script):
        settings["the script's digest"] = _digest(request, facts)
        paddle = paddles.find(sys.path)
        settings["Paddle's version"] = "" if paddle is None else paddle.version
    if engine.hosts:
        settings["the list of hosts"] = _comparable(",".join(engine.hosts))
    roles = [slot.role for slot in slots.slots]
    if slots.hosts:
        layout = ",".join(f"{slot.role} {slot.host}:{slot.port}" for slot in slots.slots)
        settings["the list of servers and trainers"] = _comparable(layout)
    if set(roles) != {TRAINER}:
        counted = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        settings["what each host has"] = counted
    return tuple(settings.items())


def _digest(request: Request, facts: Facts) -> str:
    """Return the digest of the script's file; empty if it cannot be read."""
    script = request.script
    if script.form != "file" or script.target == CHECK:
        return script.target
    with suppress(FleetrunError, OSError):
        path = os.path.join(facts.cwd, scripts.find(script, facts.cwd, facts.environ) or "")
        with open(path, "rb") as file:
            return _short(file.read(_MOST_READ))
    return ""


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _comparable(text: str) -> str:
    """Return TEXT, or its digest if it is too long for a message."""
    return text if len(text) <= LONGEST_TEXT // 2 else _short(os.fsencode(text))
