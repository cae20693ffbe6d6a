"""Leads from a request to an exit code: probe, share, assign, plan, then show or run."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from fleetrun.engines import meeting
from fleetrun.engines.engine import Engine
from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.host import addresses, checkpoints, nvml, probe
from fleetrun.model import Facts, LaunchPlan, Request, Roster, Task
from fleetrun.plan import brief, devices, hosts, planner, render
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Slots
from fleetrun.postmortem import ending
from fleetrun.postmortem.ending import Ending, document
from fleetrun.printing import NAME, error_columns, put
from fleetrun.run import children
from fleetrun.run.background import Background, begin
from fleetrun.run.events import Outcome
from fleetrun.run.gathering import AtOnce, Gathering
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
from fleetrun.sinks.rotate import Cut, Rotation
from fleetrun.sinks.rundir import RunDirectory
from fleetrun.text import visible
from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.resumption import Resumption
from fleetrun.watch.watch import Watch

if TYPE_CHECKING:
    from fleetrun.session.driver import Session  # only with other hosts

# Files that the launcher opens for each process, its pidfd, a port and a log; and its other ones.
_PER_PROCESS, _OWN_FILES = 3, 40
# Begins to gather the hosts of a job.
Begin: TypeAlias = Callable[["LaunchedJob"], "tuple[Gathering, Session | None]"]


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
    background: Background | None = None
    if request.detach and is_real:
        probe.current_folder()
        begun = begin(os.path.abspath(request.log_dir))
        if isinstance(begun, int):
            return begun
        background = begun
    keeper = keep() if is_real else None
    is_alone = _is_alone(request, engine)
    try:
        if request.preflight and is_real:
            from fleetrun.doctor import checkup

            checkup.preflight(request, environ)
        facts = probe.read(request, environ, engine.hosts)._replace(tasks=tasks)
        if keeper is not None:
            facts = facts._replace(pid=keeper.pid)
        share = planner.share(request, facts)
        slots = planner.slots(request, facts, share)
        most = 1 if is_alone else max(len(engine.hosts), hosts.bounds(request.nnodes)[1])
        needed = len(slots.slots) * _PER_PROCESS + most + _OWN_FILES
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if is_real and resource.RLIM_INFINITY != allowed < needed:
            raise EnvironmentFault(
                f"{len(slots.slots)} processes on this host need {needed} open files, and "
                f"{allowed} are allowed: run `ulimit -n {needed}` first."
            )
    except FleetrunError as error:
        return tell(error, request, environ, engine, caller, keeper=keeper)
    attempts = _Attempts(request, facts, engine, share, slots)
    try:
        if not is_real:
            return _show(attempts)
        if caller is not None and not is_alone:
            caller.report()
        job = LaunchedJob(request, environ, background, caller, keeper)
        return job.run(attempts.alone if is_alone else attempts.join)
    finally:
        attempts.close()


class _Attempts:
    """Plans each attempt of a job; releases what an engine holds for it before the next one."""

    def __init__(
        self, request: Request, facts: Facts, engine: Engine, share: Share, slots: Slots
    ) -> None:
        self.request, self._facts, self._engine = request, facts, engine
        self._share, self._slots = share, slots
        self._ports = engine.ports(facts.pid)

    def assign(self, attempt: int = 0) -> Roster:
        """Return the hosts of ATTEMPT, as far as they are known on this one."""
        if attempt:
            self._ports.close()
            self._ports = self._engine.ports(self._facts.pid, attempt)
        roster = self._engine.assign(self._ports, self.request, self._facts, self._slots)
        return roster._replace(generation=attempt)

    def plan(self, roster: Roster) -> LaunchPlan:
        """Return the plan of the hosts of ROSTER."""
        facts = self._facts
        if len(roster.members) > 1 and self.request.dry_run is None:
            facts = addresses.with_members(facts, roster)
        if self.request.resume_from is not None:
            folder = self.request.resume_from
            listed = (
                checkpoints.find(folder)
                if roster.checkpoints is None
                else checkpoints.agreed(folder, roster.checkpoints)
            )
            facts = facts._replace(checkpoints=listed)
        return planner.plan(self.request, facts, self._share, roster)

    def alone(self, _: LaunchedJob) -> tuple[Gathering, Session | None]:
        """Gather a job without other hosts."""
        return AtOnce(lambda attempt: self.plan(self.assign(attempt))), None

    def join(self, job: LaunchedJob) -> tuple[Gathering, Session | None]:
        """Gather the other hosts."""
        from fleetrun.session import rendezvous
        from fleetrun.session.local_host import LocalHost

        own = LocalHost(
            self.request,
            self._facts,
            self._engine,
            self._slots,
            assign=self.assign,
            plan=self.plan,
        )
        session, gathering = rendezvous.join(own, log=job.log, redact=job.redact)
        return gathering, session

    def close(self) -> None:
        """Release the ports."""
        self._ports.close()


def _with_meeting(request: Request, environ: Mapping[str, str]) -> Request:
    """Return REQUEST with its rendezvous; if that is here, print the command for the others."""
    is_here = hosts.own_port(request.master) is not None
    if not is_here or request.nnodes == "1" or request.ips:
        return request

    request = meeting.at_this_host(request)
    if request.dry_run is None:
        _messages(request, environ).show(meeting.invitation(request))
    return request


def _messages(request: Request, environ: Mapping[str, str], *, is_ci: bool = False) -> Messages:
    redact = secrets.of_launch(request, environ)
    return Messages(is_ci=is_ci, redact=redact)


def _is_alone(request: Request, engine: Engine) -> bool:
    """Whether the job has no other hosts."""
    return len(engine.hosts) < 2 and hosts.meets_at(request) is None  # one is us


def tell(
    fault: FleetrunError,
    request: Request,
    environ: Mapping[str, str],
    engine: Engine,
    caller: Caller | None,
    *,
    keeper: Keeper | None = None,
) -> int:
    """Report FAULT to the other hosts, which would wait for this one, and raise it."""
    if _is_alone(request, engine) or request.dry_run is not None:
        raise fault

    def begin(job: LaunchedJob) -> tuple[Gathering, Session | None]:
        from fleetrun.session import rendezvous
        from fleetrun.session.local_host import LocalHost

        def fail(_: object) -> NoReturn:
            raise fault

        try:
            facts = probe.reach(request, environ, engine.hosts)._replace(pid=job.pid)
            own = LocalHost(request, facts, engine, None, assign=fail, plan=fail)
            session, gathering = rendezvous.join(own, log=job.log, redact=job.redact)
        except FleetrunError:
            raise fault from None
        return gathering, session

    return LaunchedJob(request, environ, caller=caller, keeper=keeper).run(begin)


def _show(attempts: _Attempts) -> int:
    """Print what would run, in the requested form."""
    request, roster = attempts.request, attempts.assign()
    plans = [attempts.plan(roster._replace(me=node)) for node in range(len(roster.members))]
    # Notes quote values of options.
    plans = [plan._replace(notes=tuple(map(secrets.mask, plan.notes))) for plan in plans]
    forms = {"table": render.table, "json": render.as_json}
    return put(forms[request.dry_run or "table"](plans, request, here=roster.me))


class LaunchedJob(ObservedJob):
    """A job with the observers that its request needs."""

    def __init__(
        self,
        request: Request,
        environ: Mapping[str, str],
        background: Background | None = None,
        caller: Caller | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        # Ranks inherit the environment of the manifest's launcher.
        for name, value in request.restored:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._messages = messages = _messages(request, environ, is_ci=bool(environ.get("CI")))
        super().__init__(
            request,
            environ,
            log=messages.log,
            show=messages.show,
            progress=messages.progress,
            redact=messages.redact,
            keeper=keeper,
        )
        self._background, self._caller = background, caller
        self._session: Session | None = None
        self._ending: Ending | None = None

    def run(self, begin: Begin) -> int:
        """Start what BEGIN's gathering plans, watch it to its end, and return the exit code."""
        gathering, self._session = begin(self)
        outcome = Supervisor(gathering, self).run()
        # Only one host of the job notifies.
        if self._ending is not None and self.plan.node_rank == 0 and self.request.on_end:
            self._notify(self.request.on_end, self._ending)
        return outcome.exit_code

    def observing(self) -> list[Sink]:  # noqa: C901 - one branch for each observer
        """Return the observers that the request needs."""
        request, messages, session = self.request, self._messages, self._session
        is_served = request.metrics_port is not None
        if is_served and not request.metrics_period_s:
            raise UsageError(
                f"--metrics_port={request.metrics_port} serves what is measured, and "
                "--metrics_period=0 measures nothing: give seconds, or leave it out."
            )
        messages.preface = lambda: self.redact(self._preface())
        console, times = Console(self), OutputTimes(self)
        messages.ends_line = console.end_line

        def follow(cut: Cut) -> None:
            console.follow(cut)
            times.follow(cut)

        observers: list[Sink] = [messages, RunDirectory(self)]
        if self._background is not None:
            observers.append(self._background.sink(self.folder, self.log, self.pid))
        if self._caller is not None:
            observers.append(self._caller.sink(self.plan))
        if is_served:
            # A port that is taken is said before the others begin.
            observers.append(Metrics(self))
        if request.profile is not None and not request.quiet:
            observers.append(ProfileSink(self))
        if request.log_max_bytes:
            observers.append(Rotation(self, show=console.catch_up, follow=follow))
        observers += [EventLog(self), Provenance(self), console, times]
        if request.metrics_period_s and not is_served:
            observers.append(Metrics(self))
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
        """Return a function that queries our GPUs' activity; None without GPUs."""
        gpus = tuple(
            device.id
            for process in self.plan.processes
            if process.rank is not None
            for device in process.rank.devices
            if device.kind == "gpu"
        )
        # Numbers in another order than the driver's could mean any GPU.
        is_drivers = devices.is_drivers_order(self.request, self.environ)
        is_known = is_drivers or not any(map(str.isdecimal, gpus))
        return (lambda: nvml.rates(nvml.library(), gpus if is_known else None)) if gpus else None

    def _preface(self) -> str:
        """Return the first lines for the user: the banner and our remarks."""
        plan, request = self.plan, self.request
        if request.quiet or request.log_level in {"warning", "error"}:
            return ""
        notes = [visible(note) for note in plan.notes]

        width = error_columns()
        lines = [*brief.brief(request, plan, width=width), *notes]
        return "".join(f"{NAME}{line}\n" for line in lines)

    def closing(self, outcome: Outcome, at: float) -> str:
        """Return the launch's closing line."""
        paths = [spec.env.get(variables.HEARTBEAT, "") for spec in self.plan.processes]
        last, lasted_s = heartbeat.last_step(paths), at - self.began_at
        self._ending = ending.Ending(
            outcome, self.plan, lasted_s, self.began, last, tuple(self.restarts)
        )
        is_shown = not self.request.quiet and self.request.log_level in {"debug", "info"}
        return ending.line(self._ending) if is_shown else ""

    def _notify(self, command: str, end: Ending) -> None:
        """Tell the COMMAND of --on_end of the end of the job, without secrets."""
        from fleetrun.run import notification

        reported = secrets.everywhere(document(end, os.uname().nodename), self.redact)
        # The sink is closed with the job.
        log = _messages(self.request, self.environ).log
        try:
            notification.notify(command, json.dumps(reported) + "\n", log)
        except KeyboardInterrupt:
            # A signal ends the wait, and changes the exit code as little as a failure does.
            children.sweep(frozenset())
