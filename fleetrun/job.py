"""The way from a request to an exit code: probe, share out, gather, plan, then show or run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fleetrun import colors, engines, planner, probe
from fleetrun.errors import FleetrunError, UsageError
from fleetrun.plan import hosts, secrets
from fleetrun.plan.visible import visible
from fleetrun.records.folder import Folder
from fleetrun.run import terminal
from fleetrun.run.descriptors import FileLimit
from fleetrun.run.gathering import AtOnce
from fleetrun.run.observers import Equipment
from fleetrun.run.supervisor import Supervisor
from fleetrun.sinks.closing import EndingSink
from fleetrun.sinks.console import Console
from fleetrun.sinks.eventlog import EventLog
from fleetrun.sinks.launchfile import LaunchFile
from fleetrun.sinks.manifest import ManifestFile
from fleetrun.sinks.metrics import Metrics
from fleetrun.sinks.outputtimes import OutputTimes
from fleetrun.sinks.rundir import RunDirectory
from fleetrun.sinks.stderr import Messages
from fleetrun.sources.watch import Watch

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from fleetrun.engines import SelectedEngine
    from fleetrun.model import Endpoint, LaunchPlan, Request, Roster, Task
    from fleetrun.postmortem.ending import Ending
    from fleetrun.run.background import Background
    from fleetrun.run.gathering import Gathering
    from fleetrun.run.isolation import IsolatedCall
    from fleetrun.run.observers import Caller, Sink, Source
    from fleetrun.session.driver import GuardLink, Session
    from fleetrun.sinks.rotate import Cut
    from fleetrun.sources.hang_hosts import HangOfHosts

    # Begins to gather; it is given what prints a line, and what hides secrets.
    Begin: TypeAlias = Callable[
        [Callable[[str], None], Callable[[str], str]], tuple[Gathering, Session | None]
    ]


def launch(  # noqa: C901 - one way, in order
    request: Request,
    environ: Mapping[str, str],
    tasks: tuple[Task, ...] = (),
    alive: Mapping[int, int] | None = None,
    caller: Caller | None = None,
) -> int:
    """Do what REQUEST says and return the exit code; TASKS are the ranks' own, of an engine.

    ALIVE has a descriptor for each of the other tasks, readable once that is gone. CALLER hears of
    the job. Raises FleetrunError when the request cannot be carried out; nothing is left running
    then.
    """
    is_real = request.dry_run is None
    request = _with_meeting(request, environ)
    found = engines.find(request, environ, planner.places(request))
    try:
        _has_screen(request, environ)
        if request.preflight and is_real:
            from fleetrun import checkup  # only where it is wanted

            checkup.preflight(request, environ)
    except FleetrunError as error:
        return tell(error, request._replace(ui=False), environ, found, caller)
    background: Background | None = None
    if request.detach and is_real:
        from fleetrun.run.background import begin  # most launches stay in front

        probe.current_folder()
        begun = begin(os.path.abspath(request.log_dir))
        if isinstance(begun, int):
            return begun
        background = begun
    is_alone = _is_alone(request, found)
    count = (
        1 if is_alone else max(len(found.hosts), hosts.bounds(request.nnodes)[1] + request.spares)
    )
    try:
        facts = probe.read(request, environ, found.hosts)._replace(tasks=tasks)
        if request.debug is not None:
            from fleetrun.plan import debug  # only where a debugger is wanted

            request = debug.at_terminal(request, facts)
        share = planner.share(request, facts)
        slots = planner.slots(request, facts, share)
        # Before ports are held, each of which is an open file; a dry run opens none.
        files = FileLimit(len(slots.slots), count) if is_real else None
    except FleetrunError as error:
        return tell(error, request, environ, found, caller)
    engine = found.engine(facts.pid)

    def gather(attempt: int) -> Roster:
        nonlocal engine
        if attempt:
            engine.close()
            engine = found.engine(facts.pid, attempt)
        return engine.gather(request, facts, slots)._replace(generation=attempt)

    def plan(roster: Roster) -> LaunchPlan:
        return planner.plan(request, facts, share, roster)

    def gathered(
        say: Callable[[str], None], hide: Callable[[str], str]
    ) -> tuple[Gathering, Session | None]:
        if is_alone:
            return AtOnce(lambda attempt: plan(gather(attempt))), None
        from fleetrun.session import joining  # only with other hosts

        session, gathering = joining.join(
            request, facts, found, slots, gather=gather, plan=plan, say=say, hide=hide
        )
        return gathering, session

    try:
        if files is not None:
            if caller is not None and not is_alone:
                caller.gathering()
            return _run(
                gathered,
                request,
                environ,
                files=files,
                background=background,
                alive=alive,
                caller=caller,
            )
        roster = engine.gather(request, facts, slots)
        plans = [
            planner.plan(request, facts, share, roster._replace(me=node))
            for node in range(len(roster.members))
        ]
        return _show(plans, request, here=roster.me)
    finally:
        engine.close()
        if files is not None:
            files.restore()


def _with_meeting(request: Request, environ: Mapping[str, str]) -> Request:
    """Return REQUEST with the place where hosts meet; where that is here, say so for the others."""
    is_here = hosts.own_port(request.master) is not None
    if not is_here or request.nnodes == "1" or request.ips:
        return request
    from fleetrun.engines import meeting  # only on the first of several hosts

    request = meeting.at_this_host(request)
    if request.dry_run is None:
        is_coloured = colors.is_wanted(request.color, environ, is_terminal=os.isatty(2))
        hide = secrets.of_launch(request, environ)
        Messages(is_coloured=is_coloured, hide=hide).show(meeting.invitation(request))
    return request


def _is_alone(request: Request, found: SelectedEngine) -> bool:
    """Whether the job has no other hosts."""
    return len(found.hosts) < 2 and hosts.meets_at(request) is None  # one is us


def tell(
    fault: FleetrunError,
    request: Request,
    environ: Mapping[str, str],
    found: SelectedEngine,
    caller: Caller | None,
) -> int:
    """Tell the other hosts, which would wait for this one, that it has a FAULT, and raise it."""
    if _is_alone(request, found) or request.dry_run is not None:
        raise fault

    def begin(
        say: Callable[[str], None], hide: Callable[[str], str]
    ) -> tuple[Gathering, Session | None]:
        from fleetrun.session import joining  # only with other hosts

        try:
            facts = probe.reach(request, environ, found.hosts)
            session, gathering = joining.tell(request, facts, found, fault, say=say, hide=hide)
        except FleetrunError:
            raise fault from None
        return gathering, session

    return _run(begin, request, environ, caller=caller)


def _show(plans: Sequence[LaunchPlan], request: Request, *, here: int) -> int:
    """Print what would run, in the form that was asked for."""
    from fleetrun.plan import render  # a plain launch shows only the banner
    from fleetrun.printing import put

    forms = {"table": render.table, "json": render.as_json, "sh": render.as_sh}
    # They quote values of options.
    noted = [plan._replace(notes=tuple(map(secrets.mask, plan.notes))) for plan in plans]
    text = forms[request.dry_run or "table"](noted, request, here=here)
    return put(text)


def _run(
    begin: Begin,
    request: Request,
    environ: Mapping[str, str],
    *,
    files: FileLimit | None = None,
    background: Background | None = None,
    alive: Mapping[int, int] | None = None,
    caller: Caller | None = None,
) -> int:
    """Start what BEGIN's gathering plans, watch it to its end, and return the exit code."""
    _restore(request)
    is_coloured = colors.is_wanted(request.color, environ, is_terminal=os.isatty(2))
    hide = secrets.of_launch(request, environ)
    messages = Messages(is_coloured=is_coloured, is_ci=bool(environ.get("CI")), hide=hide)
    gathering, session = begin(messages.say, hide)

    has_screen = background is None and _has_screen(request, environ)

    def shown(plan: LaunchPlan) -> tuple[int, ...]:
        return () if has_screen else _shown(plan, request)

    def stdin(plan: LaunchPlan) -> terminal.Stdin:
        return terminal.choose(plan, shown(plan), request.stdin)

    endings: list[EndingSink] = []

    def closing() -> str:
        is_shown = not request.quiet and request.log_level in {"debug", "info"}
        return endings[-1].line() if endings and is_shown else ""

    # Servers of other hosts that will never listen.
    gone: set[Endpoint] = set()

    def equip(plan: LaunchPlan) -> Equipment:
        endings.append(EndingSink(plan))
        # One for all: whoever writes into it means the folder that was made.
        folder = Folder(os.path.normpath(os.path.join(plan.cwd, plan.run_dir)))
        rundir = RunDirectory(
            plan,
            keep=request.log_keep,
            overwrite=request.log_overwrite,
            say=messages.say,
            folder=folder,
            hide=hide,
        )
        prefix = colors.prefix(is_coloured=is_coloured)
        messages.preface = lambda: hide(_preface(plan, request, prefix, has_links=rundir.has_links))
        console = Console(
            plan,
            shown,
            say=messages.say,
            pattern=_pattern(request),
            is_prompt=stdin(plan).is_terminal,
        )
        times = OutputTimes(plan, folder)
        sinks: tuple[Sink, ...] = (
            messages,
            rundir,
            *([] if background is None else [background.sink(folder, messages.say)]),
            *([] if caller is None else [caller.sink(plan)]),
            EventLog(plan, folder, hide),
            ManifestFile(plan, request, environ, folder, hide),
            LaunchFile(plan, request, folder, hide, has_links=lambda: rundir.has_links),
            console,
            times,
            endings[-1],
            *_metrics(folder, request, messages),
            *_profile(plan, request, messages),
            *(_screen(folder, messages) if has_screen else ()),
            *_rotation(plan, request, (console.follow, times.follow), messages),
        )
        sources: tuple[Source, ...] = (
            Watch(
                plan,
                say=messages.say,
                # A rank that a debugger holds lets the others wait.
                hang_timeout_s=0.0 if request.debug else plan.rules.hang_timeout_s,
                reports_stragglers=request.debug is None,
                hosts=_hang_of_hosts(session, folder, plan, request),
                gpus=lambda plan: _gpu_watch(plan, request, environ),
            ),
            *_proof(plan, request, messages, session),
            *_session(plan, session, request, messages, hide, folder, supervisor, gone),
            *_lost_tasks(alive or {}, messages),
        )
        return Equipment(sinks, sources, folder)

    supervisor = Supervisor(
        gathering,
        equip,
        say=messages.say,
        show=messages.show,
        progress=messages.progress,
        files=files,
        hide=hide,
        stdin=stdin,
        closing=closing,
        gone=gone,
        tell_loss=None if session is None else session.loss_report,
    )
    outcome = supervisor.run()
    ending = endings[-1].ending if endings else None
    # Only one host of the job notifies.
    if ending is not None and ending.plan.node_rank == 0 and (request.on_end or request.webhook):
        _notify_others(ending, request, messages, hide)
    return outcome.exit_code


def _notify_others(
    ending: Ending, request: Request, messages: Messages, hide: secrets.Hider
) -> None:
    """Notify --on_end and --webhook how the job ended, without secrets."""
    import json  # only where somebody is told

    from fleetrun.postmortem.ending import document
    from fleetrun.run import notification

    reported = secrets.everywhere(document(ending, os.uname().nodename), hide)
    # The sink is closed with the job.
    say = Messages(is_coloured=messages.is_coloured, hide=hide).say
    notification.notify(
        json.dumps(reported) + "\n", command=request.on_end, url=request.webhook, say=say
    )


def _restore(request: Request) -> None:
    """Let the ranks inherit what the launcher of the manifest had."""
    for name, value in request.restored:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _has_screen(request: Request, environ: Mapping[str, str]) -> bool:
    """Whether `top` has the terminal; UsageError where a rank wants it, too."""
    if not request.ui:
        return False
    if request.debug is not None or request.stdin not in {None, terminal.NO_PROCESS}:
        other = "--debug" if request.debug is not None else "--stdin"
        raise UsageError(f"--ui and {other} both want the terminal: leave one of them out.")
    is_able = environ.get("TERM", "") not in {"", "dumb"} and os.isatty(1)
    return is_able and terminal.is_foreground()


def _screen(folder: Folder, messages: Messages) -> tuple[Sink, ...]:
    """Return what shows the job on the whole terminal."""
    from fleetrun.sinks.ui import Screen  # only with --ui

    return (Screen(folder.path, messages),)


def _metrics(folder: Folder, request: Request, messages: Messages) -> tuple[Sink, ...]:
    """Return the sink that measures the job, unless metrics are off."""
    if not request.metrics_period_s:
        if request.metrics_port is not None:
            raise UsageError(
                f"--metrics_port={request.metrics_port} serves what is measured, and "
                "--metrics_period=0 measures nothing: give seconds, or leave it out."
            )
        return ()
    period_s, port = request.metrics_period_s, request.metrics_port
    return (Metrics(folder.path, period_s=period_s, port=port, say=messages.say),)


def _profile(plan: LaunchPlan, request: Request, messages: Messages) -> tuple[Sink, ...]:
    """Return the sink for the steps that ranks record, if any do."""
    if request.profile is None or request.quiet:
        return ()
    from fleetrun.sinks.profile import ProfileSink  # few launches have it

    return (ProfileSink(plan, messages.say),)


def _rotation(
    plan: LaunchPlan,
    request: Request,
    observers: Sequence[Callable[[Cut], None]],
    messages: Messages,
) -> tuple[Sink, ...]:
    """Return what cuts logs that grow too long, if that is wanted."""
    if not request.log_max_bytes:
        return ()
    from fleetrun.sinks.rotate import Rotation  # off by default

    def follow(cut: Cut) -> None:
        for observe in observers:
            observe(cut)

    rotation = Rotation(
        plan,
        max_bytes=request.log_max_bytes,
        files=request.log_max_files,
        say=messages.say,
        follow=follow,
    )
    return (rotation,)


def _proof(
    plan: LaunchPlan, request: Request, messages: Messages, session: Session | None
) -> tuple[Source, ...]:
    """Return what shows which of the strategy is in effect, if there is one."""
    if not plan.files:
        return ()
    from fleetrun.sources import proof  # most launches have no strategy

    if proof.find(plan) is None:
        return ()
    hosts = None
    if session is not None:
        from fleetrun.sources.proof_hosts import ProofOfHosts  # only with others

        hosts = ProofOfHosts(session)
    say, show = messages.say, messages.show
    return (proof.Proof(plan, say=say, show=show, is_quiet=request.quiet, hosts=hosts),)


def _session(  # noqa: PLR0917 - as _run has them
    plan: LaunchPlan,
    session: Session | None,
    request: Request,
    messages: Messages,
    hide: Callable[[str], str],
    folder: Folder,
    link: GuardLink,
    gone: set[Endpoint],
) -> tuple[Source, ...]:
    """Return what agrees with the launchers of the other hosts, if there are any."""
    if session is None:
        return ()
    from fleetrun.sources.session import JobSession  # only with other hosts
    from fleetrun.sources.session_end import SessionEnd

    say, gather_logs = messages.say, request.gather_logs
    end = SessionEnd(plan, session, folder, say=say, hide=hide, gather_logs=gather_logs)
    source = JobSession(plan, session, say=say, hide=hide, end=end, link=link, gone=gone)
    return (source,)


def _lost_tasks(alive: Mapping[int, int], messages: Messages) -> tuple[Source, ...]:
    """Return what watches the engine's other tasks of this host, if there are any."""
    if not alive:
        return ()
    from fleetrun.sources.losttasks import LostTasks  # only with a task for each rank

    return (LostTasks(alive, say=messages.say),)


def _hang_of_hosts(
    session: Session | None, folder: Folder, plan: LaunchPlan, request: Request
) -> HangOfHosts | None:
    """Return what agrees with the other hosts that the job hangs, if there are any."""
    hang_timeout_s = plan.rules.hang_timeout_s
    if session is None or not hang_timeout_s or request.debug is not None:
        return None
    from fleetrun.sources import hang  # only with other hosts
    from fleetrun.sources.hang_hosts import HangOfHosts

    period_s = hang.IdleClock(hang_timeout_s).period_s
    return HangOfHosts(session, folder, period_s=period_s)


def _gpu_watch(
    plan: LaunchPlan, request: Request, environ: Mapping[str, str]
) -> Callable[[], IsolatedCall] | None:
    """Return what asks what our GPUs do; nothing where there are none."""
    gpus = tuple(
        device.id
        for process in plan.processes
        if process.rank is not None
        for device in process.rank.devices
        if device.kind == "gpu"
    )

    def ask() -> IsolatedCall:
        from fleetrun.plan import devices  # only before a job is called hung
        from fleetrun.probe import nvml

        # Numbers that are not the driver's could mean any GPU.
        known = devices.is_drivers_order(request, environ) or not any(map(str.isdecimal, gpus))
        return nvml.ask_loads(gpus if known else None)

    return ask if gpus else None


def _shown(plan: LaunchPlan, request: Request) -> tuple[int, ...]:
    """Return which of our processes the console shows: --tee's global ranks, or the first one."""
    if request.tee == "all":
        return tuple(range(len(plan.processes)))
    trainers = [
        index
        for index, process in enumerate(plan.processes)
        if process.rank is not None and process.rank.role == "TRAINER"
    ]
    asked = request.tee or (request.stdin if request.stdin != terminal.NO_PROCESS else None)
    if asked is None:
        # A host may have servers only.
        return tuple(trainers[:1]) or (0,)
    wanted = {int(rank) for rank in asked.split(",")}
    return tuple(
        index
        for index in trainers
        if (rank := plan.processes[index].rank) is not None and rank.rank in wanted
    )


def _pattern(request: Request) -> re.Pattern[bytes] | None:
    """Return what the lines that the console shows have in them; None: anything."""
    if request.log_filter is None:
        return None
    import re  # few launches have it

    return re.compile(request.log_filter.encode(errors="surrogateescape"))


def _preface(plan: LaunchPlan, request: Request, prefix: str, *, has_links: bool) -> str:
    """Return what people see first: the banner and our remarks, each line after PREFIX."""
    if request.quiet or request.log_level in {"warning", "error"}:
        return ""
    notes = "".join(f"{prefix}{visible(note)}\n" for note in plan.notes)
    return _banner(plan, request, prefix, has_links=has_links) + notes


def _banner(plan: LaunchPlan, request: Request, prefix: str, *, has_links: bool) -> str:
    if request.banner == "none":
        return ""
    if request.banner == "full":
        from fleetrun.plan import render  # the ranks are started; now there is time

        return render.banner(request, plan, has_links=has_links)
    from fleetrun.plan import brief

    try:
        width = os.get_terminal_size(2).columns or brief.WIDTH
    except OSError:
        width = brief.WIDTH
    lines = brief.brief(request, plan, has_links=has_links, width=width)
    return "".join(f"{prefix}{line}\n" for line in lines)
