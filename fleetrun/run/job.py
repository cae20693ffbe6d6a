"""Leads from a request to an exit code: probe, share, assign, plan, then show or run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from fleetrun.engines import meeting
from fleetrun.engines.engine import Engine
from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.host import addresses, checkpoints, nvml, probe
from fleetrun.model import Facts, LaunchPlan, Request, Roster, Task
from fleetrun.plan import brief, devices, hosts, planner, render
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Slots
from fleetrun.postmortem import ending
from fleetrun.printing import NAME, error_columns, put
from fleetrun.run.background import Background, begin
from fleetrun.run.events import Outcome
from fleetrun.run.gathering import Gathering
from fleetrun.run.keeper import Keeper, keep
from fleetrun.run.observers import Caller, ObservedJob, Sink
from fleetrun.run.supervisor import Supervisor
from fleetrun.rundir import heartbeat, secrets, variables
from fleetrun.sinks.console import Console
from fleetrun.sinks.eventlog import EventLog
from fleetrun.sinks.launcher_lines import Messages
from fleetrun.sinks.metrics import Metrics
from fleetrun.sinks.outputtimes import OutputTimes
from fleetrun.sinks.profile import ProfileSink
from fleetrun.sinks.provenance import Provenance
from fleetrun.sinks.rotate import Rotation
from fleetrun.sinks.rundir import RunDirectory
from fleetrun.text import visible
from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.resumption import Resumption
from fleetrun.watch.watch import Watch

if TYPE_CHECKING:
    from fleetrun.session.driver import Session  # only with other hosts


def launch(
    request: Request,
    environ: Mapping[str, str],
    tasks: tuple[Task, ...] = (),
    caller: Caller | None = None,
) -> int:
    """Carry out REQUEST and return the exit code; TASKS are the ranks' own tasks of an engine.

    CALLER is told of the job. Raises FleetrunError if the request cannot be carried out; nothing is
    left running then.
    """
    is_real = request.dry_run is None
    request = _with_meeting(request, environ)
    engine = Engine.find(request, environ, planner.places(request))
    is_alone = len(engine.hosts) < 2 and hosts.meets_at(request) is None
    background: tuple[str, int] | None = None
    if request.detach and is_real:
        probe.current_folder()
        begun = begin(os.path.abspath(request.log_dir))
        if isinstance(begun, int):
            return begun
        background = begun
    keeper = keep() if is_real else None
    attempts: Attempts | None = None
    try:
        facts = probe.read(request, environ, engine.hosts)._replace(tasks=tasks)
        if keeper is not None:
            facts = facts._replace(pid=keeper.pid)
        share = planner.share(request, facts)
        slots = planner.slots(request, facts, share)
        # A pidfd, a port and a log for each, a connection for each host, and those of our own.
        needed = 3 * len(slots.slots) + hosts.bounds(request.nnodes)[1] + 40
        if keeper is not None and (allowed := keeper.open_files[1]) < needed:
            raise EnvironmentFault(
                f"{len(slots.slots)} processes on this host need {needed} open files, and "
                f"{allowed} are allowed: run `ulimit -n {needed}` first, as root."
            )
        attempts = Attempts(request, facts, engine, share, slots)
        if not is_real:
            return _show(attempts)
    except FleetrunError as error:
        if is_alone or not is_real or attempts is not None:
            raise
        job = LaunchedJob(request, environ, caller=caller, keeper=keeper)
        return Supervisor(job.tell(error, engine), job).run().exit_code
    try:
        if caller is not None and not is_alone:
            caller.report()
        job = LaunchedJob(request, environ, background, caller, keeper)
        assign, plan = attempts.assign, attempts.plan
        gathering = Gathering(lambda attempt: plan(assign(attempt)))
        if not is_alone:
            gathering = job.join(facts, engine, slots, assign=assign, plan=plan)
        return Supervisor(gathering, job).run().exit_code
    finally:
        attempts.ports.close()


class Attempts:
    """Plans each attempt of a job; releases what an engine holds for it before the next one."""

    def __init__(
        self, request: Request, facts: Facts, engine: Engine, share: Share, slots: Slots
    ) -> None:
        self.request, self._facts, self._engine = request, facts, engine
        self._share, self._slots = share, slots
        self.ports = engine.ports(facts.pid)

    def assign(self, attempt: int = 0) -> Roster:
        """Return the hosts of ATTEMPT, as far as they are known on this one."""
        if attempt:
            self.ports.close()
            self.ports = self._engine.ports(self._facts.pid, attempt)
        roster = self._engine.assign(self.ports, self.request, self._facts, self._slots)
        return roster._replace(generation=attempt)

    def plan(self, roster: Roster) -> LaunchPlan:
        """Return the plan of the hosts of ROSTER."""
        facts, folder = self._facts, self.request.resume_from
        if len(roster.members) > 1 and self.request.dry_run is None:
            facts = addresses.with_members(facts, roster)
        if folder is not None:
            listed = (
                checkpoints.find(folder)
                if roster.checkpoints is None
                else checkpoints.agreed(folder, roster.checkpoints)
            )
            facts = facts._replace(checkpoints=listed)
        return planner.plan(self.request, facts, self._share, roster)


def _with_meeting(request: Request, environ: Mapping[str, str]) -> Request:
    """Return REQUEST with its rendezvous; if that is here, print the command for the others."""
    if hosts.own_port(request.master) is None or request.nnodes == "1" or request.ips:
        return request
    request = meeting.at_this_host(request)
    if request.dry_run is None:
        _messages(request, environ).show(meeting.invitation(request))
    return request


def _messages(request: Request, environ: Mapping[str, str]) -> Messages:
    return Messages(redact=secrets.of_launch(request, environ))


def _show(attempts: Attempts) -> int:
    """Print what would run, in the requested form."""
    request, roster = attempts.request, attempts.assign()
    plans = [attempts.plan(roster._replace(me=node)) for node in range(len(roster.members))]
    attempts.ports.close()
    # Notes quote values of options.
    plans = [plan._replace(notes=tuple(map(secrets.mask, plan.notes))) for plan in plans]
    form = render.as_json if request.dry_run == "json" else render.table
    return put(form(plans, request, here=roster.me))


class LaunchedJob(ObservedJob):
    """A job with the observers that its request needs."""

    _session: Session | None = None

    def __init__(
        self,
        request: Request,
        environ: Mapping[str, str],
        background: tuple[str, int] | None = None,
        caller: Caller | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._background, self._caller = background, caller
        self._messages = messages = _messages(request, environ)
        super().__init__(
            request,
            environ,
            log=messages.log,
            show=messages.show,
            redact=messages.redact,
            keeper=keeper,
        )

    def join(
        self,
        facts: Facts,
        engine: Engine,
        slots: Slots | None,
        *,
        assign: Callable[[int], Roster],
        plan: Callable[[Roster], LaunchPlan],
    ) -> Gathering:
        """Gather the other hosts."""
        from fleetrun.session import rendezvous
        from fleetrun.session.local_host import LocalHost

        own = LocalHost(self.request, facts, engine, slots, assign=assign, plan=plan)
        self._session, gathering = rendezvous.join(own, log=self.log, redact=self.redact)
        return gathering

    def tell(self, fault: FleetrunError, engine: Engine) -> Gathering:
        """Report FAULT to the other hosts, which would wait for this one, and raise it."""

        def fail(_: object) -> NoReturn:
            raise fault

        try:
            facts = probe.reach(self.request, self.environ, engine.hosts)._replace(pid=self.pid)
            return self.join(facts, engine, None, assign=fail, plan=fail)
        except FleetrunError:
            raise fault from None

    def observing(self) -> list[Sink]:  # noqa: C901 - one branch for each observer
        """Return the observers that the request needs, sinks first."""
        request, messages, session = self.request, self._messages, self._session
        if request.metrics_port is not None and not request.metrics_period_s:
            raise UsageError("--metrics_port needs a --metrics_period above 0.")
        messages.preface = lambda: self.redact(self._preface())
        console = Console(self)
        messages.ends_line = console.end_line
        observers: list[Sink] = [messages, RunDirectory(self)]
        if self._background is not None:
            observers.append(Background(self, *self._background))
        if self._caller is not None:
            observers.append(self._caller.sink(self.plan))
        if request.metrics_period_s:
            # A port that is taken is said before the others begin.
            observers.append(Metrics(self))
        if request.profile is not None and not request.quiet:
            observers.append(ProfileSink(self))
        if request.log_max_bytes:
            observers.append(Rotation(self, show=console.catch_up, follow=console.follow))
        observers += [EventLog(self), Provenance(self), console, OutputTimes(self)]
        if self.plan.files:
            from fleetrun.watch import proof  # only with a strategy

            if proof.find(self.plan) is not None:
                observers.append(proof.Proof(self))
        if session is not None:
            from fleetrun.watch.session import JobSession  # only with other hosts

            observers.append(JobSession(self, session))
        records = None
        if request.flight_recorder or self.plan.rules.hang_timeout_s:
            records = FlightRecords(self, session)
            observers.append(records)
        observers.append(Watch(self, session=session, records=records, gpus=self._gpu_loads))
        if request.resume_from is not None:
            observers.append(Resumption(self, request.resume_from))
        return observers

    def _gpu_loads(self) -> Callable[[], object] | None:
        """Return what queries our GPUs' activity; None without GPUs."""
        ranks = (process.rank for process in self.plan.processes if process.rank is not None)
        gpus = [device.id for rank in ranks for device in rank.devices if device.kind == "gpu"]
        # Numbers in another order than the driver's could mean any GPU.
        is_drivers = devices.is_drivers_order(self.request, self.environ)
        is_known = is_drivers or not any(map(str.isdecimal, gpus))
        return (lambda: nvml.rates(nvml.library(), gpus if is_known else None)) if gpus else None

    @property
    def _is_silent(self) -> bool:
        return self.request.quiet or self.request.log_level in {"warning", "error"}

    def _preface(self) -> str:
        """Return the first lines for the user: the banner and our remarks."""
        if self._is_silent:
            return ""
        lines = brief.brief(self.request, self.plan, width=error_columns())
        return "".join(f"{NAME}{line}\n" for line in [*lines, *map(visible, self.plan.notes)])

    def closing(self, outcome: Outcome, at: float) -> str:
        """Return the launch's closing line."""
        if self._is_silent:
            return ""
        paths = [spec.env.get(variables.HEARTBEAT, "") for spec in self.plan.processes]
        lasted_s = at - self.began_at
        return ending.line(outcome, lasted_s, heartbeat.last_step(paths), self.restarts)
