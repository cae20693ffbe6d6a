"""The loop: performs what the policy decides, and tells its listeners."""

# pathlib costs start-up time.
# ruff: noqa: PTH110, PTH119, PTH121

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault, FleetrunError
from fleetrun.model import Rules
from fleetrun.records import names, variables
from fleetrun.run import children, descriptors, policy, proc, terminal, worker
from fleetrun.run.awaiting import Awaiting
from fleetrun.run.events import (
    Action,
    Arbitrate,
    Await,
    Elapsed,
    Event,
    Examine,
    Examined,
    Exited,
    Finish,
    Finished,
    Gather,
    Gathered,
    GatherFailed,
    Interrupted,
    Judged,
    Noticed,
    Outcome,
    Ready,
    SignalAll,
    SourceFailed,
    Spawn,
    StacksWanted,
    Started,
    StopGathering,
    Sweep,
    assert_never,
    signal_name,
)
from fleetrun.run.gathering import Round
from fleetrun.run.guard import Guard
from fleetrun.run.listeners import Listeners
from fleetrun.run.loop import Loop, nothing
from fleetrun.run.signals import Signals, TerminalSignals, defaults_for_children

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from fleetrun.model import LaunchPlan
    from fleetrun.postmortem.findings import Findings
    from fleetrun.run.events import Declared
    from fleetrun.run.gathering import Gathering
    from fleetrun.run.listeners import Equipment
    from fleetrun.run.terminal import Stdin

# After this many seconds of waiting for ranks to end, say for whom.
_SILENCE_S = 1.0
# A Python that is about to start may swallow an INT; it has nothing to save, and gets TERM then.
_SWALLOWED_S = 1.0
# Killed descendants that are not gone by then wait for a device.
_SWEEP_S = 5.0
# Orphans are reaped this much after the news, when the exits that came with it are dealt with.
_ORPHANS_S = 0.1
# What a rank has left in its group may leave the group, too; nothing tells us but a look.
_GROUP_S = 0.05


class Supervisor:
    """Runs a job to its end, plan by plan, as GATHERING makes them.

    EQUIP returns who hears of it, for the first plan; the others hear of the next plans. `say` gets
    the launcher's own lines, `show` its longer texts; `closing` is the very last line, if any.
    """

    def __init__(
        self,
        gathering: Gathering,
        equip: Callable[[LaunchPlan], Equipment],
        *,
        say: Callable[[str], None],
        show: Callable[[str], None],
        files: descriptors.FileLimit | None = None,
        hide: Callable[[str], str] = str,
        stdin: Callable[[LaunchPlan], Stdin] = terminal.choose,
        closing: Callable[[], str] = str,
    ) -> None:
        self._gathering = gathering
        self._equip = equip
        self._hide = hide
        self._closing = closing
        self._files = files or descriptors.FileLimit(0)
        self._choose_stdin = stdin
        self._terminal: TerminalSignals | None = None
        self._settings: terminal.Settings | None = None
        # Signals that the terminal has sent to who reads it, too.
        self._typed: set[int] = set()
        self._listeners = Listeners((), (), say=say, declare=self._declare)
        self._is_over = False
        self._say = say
        self._show = show
        # Of the generation that runs.
        self._plan: LaunchPlan
        self._has_plan = False
        self._labels: list[str] = []
        self._rules = Rules()
        self._why_no_plan: Exception | None = None
        self._todo: list[Action] = []
        self._workers: dict[int, worker.Worker] = {}
        self._base_env = dict(os.environb)
        self._guard: Guard
        self._has_guard = False
        self._outcome: Outcome | None = None
        # What ranks that ended well have left running, and was ended.
        self._left: list[children.Left] = []
        self._in_a_hurry = False

    def run(self) -> Outcome:
        """Start everything, watch it, and return when nothing of the job runs any more.

        Raises FleetrunError when nothing can be started.
        """
        trouble = proc.trouble()
        if trouble:
            raise EnvironmentFault(
                f"{trouble}: give it one of its own, as `unshare --pid --fork --mount-proc` does, "
                "or `mount -t proc proc /proc`."
            )
        descriptors.hold_standard()
        children.become_subreaper()
        self._loop = Loop()
        self._signals = Signals()
        self._default_signals = defaults_for_children()
        self._awaiting = Awaiting(
            self._loop, self._say, is_alive=self._workers.__contains__, ready=self._is_ready
        )
        try:
            return self._supervise()
        finally:
            if self._settings is not None and terminal.is_foreground():
                self._settings.restore()
            # Nothing is left by now, unless this launcher itself has failed.
            if self._has_guard:
                self._guard.dismiss()
            children.sweep(frozenset(), _SWEEP_S)
            self._signals.close()
            if self._terminal is not None:
                self._terminal.close()
            self._loop.close()
            self._files.restore()

    def _supervise(self) -> Outcome:
        began = time.monotonic()
        self._loop.watch(self._signals.fd, self._on_signals)
        self._state, actions = policy.begin(began, self._gathering.patience_s)
        self._loop.alarm("policy", self._state.deadline, self._on_deadline)
        self._todo += actions
        self._work()
        while not self._has_plan and self._outcome is None:
            self._loop.turn()
            self._work()
        if self._why_no_plan is not None and not self._has_plan:
            raise self._why_no_plan
        self._listeners.open(self._loop)
        from fleetrun.postmortem import evidence  # noqa: PLC0415 - starting goes first

        self._baseline = evidence.baseline(began)
        while self._outcome is None:
            self._loop.turn()
            # Whatever was fed in this turn is performed before we sleep again.
            self._work()
        self._is_over = True
        self._listeners.tell(Finished(self._outcome, time.monotonic()))
        # The ranks' last words come before ours.
        self._deliver()
        if self._outcome.cause is not None:
            shown = [i for i in range(len(self._labels)) if self._listeners.shows(i)]
            findings = self._investigate(self._outcome)
            from fleetrun.postmortem import report  # noqa: PLC0415 - only after a failure

            self._show(report.verdict(self._outcome, findings, self._labels, frozenset(shown)))
            for index in self._outcome.stuck:
                self._say_where_it_stands(index)
            self._deliver()
        closing = self._closing()
        if closing:
            self._say(closing)
            self._deliver()
        self._listeners.close()
        return self._outcome

    # Generations --------------------------------------------------------------------------------

    def _gather(self, attempt: int) -> None:
        """Ask for the plan of ATTEMPT; the answer may take long."""

        def answered(planned: LaunchPlan | Exception) -> None:
            self._feed(self._gathered(attempt, planned))
            self._work()

        self._round = Round(self._gathering, attempt, self._loop, self._say, answered)
        self._round.begin()

    def _no_plan(self, attempt: int, error: Exception) -> GatherFailed:
        self._why_no_plan = error
        code = error.exit_code if isinstance(error, FleetrunError) else FleetrunError.exit_code
        why = str(error) if isinstance(error, FleetrunError) else repr(error)
        return GatherFailed(attempt, why, code, time.monotonic())

    def _gathered(self, attempt: int, planned: LaunchPlan | Exception) -> Gathered | GatherFailed:
        """Make ready for a generation: all that follows from its plan is made anew."""
        if isinstance(planned, Exception):
            return self._no_plan(attempt, planned)
        try:
            self._files.hold(len(planned.processes))
            self._stdin = self._choose_stdin(planned)
            if not self._has_plan:
                self._set_up(planned)
        except FleetrunError as error:
            return self._no_plan(attempt, error)
        self._plan, self._rules, self._has_plan = planned, planned.rules, True
        self._labels = [names.label(spec) for spec in planned.processes]
        if self._stdin.is_terminal and self._terminal is None:
            self._settings = self._settings or terminal.Settings()
            self._terminal = TerminalSignals()
            self._loop.watch(self._terminal.fd, self._on_signals)
        return Gathered(attempt, planned, time.monotonic())

    def _set_up(self, plan: LaunchPlan) -> None:
        """Make what all generations share: the listeners, the run directory, the guard."""
        equipment = self._equip(plan)
        self._listeners = Listeners(
            equipment.sinks, equipment.sources, say=self._say, declare=self._declare
        )
        self._listeners.prepare()
        self._folder = equipment.folder
        _enter(plan.cwd)
        own = plan.processes[0].env.get(variables.JOB) if plan.processes else None
        self._marker = own or f"{os.path.basename(plan.run_dir)}-{os.getpid()}"
        self._settings = terminal.Settings() if self._stdin.is_terminal else None
        try:
            self._guard = Guard(f"{variables.JOB}={self._marker}", self._files, self._settings)
        except OSError as error:
            raise EnvironmentFault(
                f"No process can be started ({error.strerror}): look at `ulimit -u`, `ulimit -n` "
                "and the pids limit of the container."
            ) from None
        self._has_guard = True

    # The end ------------------------------------------------------------------------------------

    def _say_where_it_stands(self, index: int) -> None:
        """Say what holds a process that even SIGKILL did not end; only its kernel knows."""
        one = self._workers.get(index)
        if one is not None:
            who = f"{self._labels[index]}, pid {one.pid}"
            self._say(f"{who}, is still there: {proc.standing(one.pid)}.")

    def _investigate(self, outcome: Outcome) -> Findings:
        """Find out what happened, and leave word of it for programs."""
        from fleetrun.postmortem import findings  # noqa: PLC0415 - only after a failure

        if not self._has_plan:
            return findings.Findings()
        try:
            found = findings.investigate(self._plan, outcome, self._baseline)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever /proc holds
            self._say(f"The cause could not be looked into ({error!r}).")
            found = findings.Findings()
        try:
            findings.write(self._folder, self._plan, outcome, found, self._hide)
        except OSError as error:
            self._say(f"{names.REPORT} could not be written ({error.strerror}).")
        return found

    def _deliver(self) -> None:
        """Let the listeners finish; a signal ends the wait."""
        while not self._in_a_hurry and self._listeners.is_busy():
            self._loop.turn()

    # What happens -------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        self._read_signals()
        self._work()

    def _read_signals(self) -> None:
        for signum, is_typed in self._terminal.read() if self._terminal is not None else ():
            (self._typed.add if is_typed else self._typed.discard)(signum)
            self._heed(signum)
        for signum in self._signals.read():
            match signum:
                case signal.SIGCHLD:
                    self._loop.alarm("orphans", time.monotonic() + _ORPHANS_S, self._reap_orphans)
                case signal.SIGQUIT:
                    self._listeners.tell(StacksWanted(time.monotonic()))
                case signal.SIGTSTP:
                    self._pause()
                case signal.SIGTTIN:
                    # If `fg` was faster, it is history.
                    if not terminal.is_foreground():
                        self._pause()
                case signal.SIGCONT:
                    self._signal_all(signal.SIGCONT)
                case _:
                    self._heed(signum)

    def _heed(self, signum: int) -> None:
        """Take note of a signal that asks for something."""
        if self._outcome is not None:
            self._in_a_hurry = signum not in policy.PASSED_ON
        else:
            self._feed(Interrupted(signum, time.monotonic()))

    def _pause(self) -> None:
        """Ctrl-Z: stop everybody, then ourselves, until somebody lets us go on."""
        # Ranks lead sessions without a terminal; there TSTP has no effect. Who reads the terminal
        # has stopped by itself, or will.
        self._signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_all(signal.SIGCONT)

    def _reap_orphans(self) -> None:
        # Our own, unless the guard was killed.
        ours = {one.pid for one in self._workers.values()}
        children.reap_orphans(ours | (self._guard.pids if self._has_guard else set()))

    def _on_exit(self, one: worker.Worker) -> None:
        self._loop.unwatch(one.pidfd)
        # A scheduler signals ranks and launcher at once: then the signal is the cause, and the
        # others hear of it now, whatever is waited for here.
        self._read_signals()
        self._work()
        if self._state.phase == policy.STOPPING:
            left = one.left_behind()
            if left is not None:
                if one.index in self._state.spared:
                    # Its leader has ended by itself; what it leaves has not been asked to.
                    one.signal(signal.SIGTERM)
                self._wait_for_group(one, left)
                return
        status = one.reap()
        self._left += one.left
        at = time.monotonic()
        exited = Exited(one.index, self._labels[one.index], status, at, one.pid, one.attempt)
        exited = exited._replace(
            peak_bytes=one.peak_bytes, has_core=one.has_core, lived_s=at - one.started_at
        )
        del self._workers[one.index]
        if status.exit_code and self._state.phase == policy.RUNNING:
            exited = self._with_circumstances(exited)
        self._feed(exited)
        # Not after the turn: the others shall hear of it now.
        self._work()

    def _with_circumstances(self, exited: Exited) -> Exited:
        """Add who else had failed by now: what is not needed at once waits until all have ended."""
        also_failed = frozenset(
            index
            for index, one in self._workers.items()
            if one.has_ended() or self._has_raised(index, one.attempt)
        )
        return exited._replace(also_failed=also_failed)

    def _has_raised(self, index: int, attempt: int) -> bool:
        spec = self._plan.processes[index]
        path = spec.env.get(variables.ERROR_FILE, "")
        # The others wait for their signals: the 4 ms of this import only if there is anything.
        if not os.path.exists(path) and not os.path.exists(names.exit_note(path)):
            return False
        from fleetrun.postmortem import failures  # noqa: PLC0415 - only after a failure

        return failures.has_raised(spec, attempt)

    def _examine(self, exits: tuple[Exited, ...]) -> Examined:
        from fleetrun.postmortem import failures  # noqa: PLC0415 - only after a failure

        try:
            exits = failures.examine(self._plan, exits)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever a file holds
            self._say(f"The cause could not be looked into ({error!r}).")
        return Examined(exits, time.monotonic())

    def _wait_for_group(self, one: worker.Worker, left: int) -> None:
        """Give what a rank has left behind its grace; the rank has ended when all of it has."""
        try:
            pidfd = os.pidfd_open(left)
        except ProcessLookupError:
            self._on_exit(one)
            return
        key = ("group", one.index)

        def look_again() -> None:
            self._loop.alarm(key, None, nothing)
            self._loop.unwatch(pidfd)
            os.close(pidfd)
            self._on_exit(one)

        self._loop.watch(pidfd, look_again)
        self._loop.alarm(key, time.monotonic() + _GROUP_S, look_again)

    def _on_deadline(self) -> None:
        self._feed(Elapsed(time.monotonic()))
        self._work()

    def _declare(self, happening: Declared) -> None:
        """Take what a source tells, tell the others, and act on it."""
        if isinstance(happening, Noticed | Judged):
            self._listeners.tell(happening)
        elif self._is_over:
            if isinstance(happening, SourceFailed) and happening.is_required:
                self._say(f"{happening.describe()}.")
        else:
            self._feed(happening)
            self._work()

    def _feed(self, event: Event) -> None:
        before = self._state
        self._state, actions = policy.step(before, event, self._rules)
        self._todo += actions
        if self._state.phase == policy.WAITING and before.phase != policy.WAITING:
            self._say_what_comes_next(event.at)
        if self._state.phase != policy.RUNNING:
            self._awaiting.stop()
        if before.phase == policy.GATHERING != self._state.phase:
            self._round.end(is_answered=isinstance(event, Gathered | GatherFailed))
        if self._state.deadline != before.deadline:
            self._loop.alarm("policy", self._state.deadline, self._on_deadline)
        self._listeners.tell(event)

    # What is done -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Perform what is to be done, signals first."""
        while self._todo:
            if isinstance(self._todo[0], Gather | Spawn | Await):
                self._read_signals()
            action = self._todo.pop(0)
            if policy.stands(self._state, action):
                self._perform(action)

    def _perform(self, action: Action) -> None:  # noqa: C901 - one case for each kind
        match action:
            case Gather(attempt=attempt):
                self._gather(attempt)
            case StopGathering(attempt=attempt):
                self._feed(self._no_plan(attempt, self._round.late()))
            case Spawn():
                self._feed(self._spawn(action))
            case Await():
                self._awaiting.begin(self._plan, action.process, action.attempt)
            case SignalAll(signum=signum, spared=spared):
                self._signal_all(signum, spared)
                self._listeners.tell(action)
                self._explain(signum)
            case Examine(exits=exits):
                self._feed(self._examine(exits))
            case Arbitrate():
                self._listeners.tell(action)
            case Sweep():
                ranks = {one.pid for one in self._workers.values()}
                if self._has_guard:
                    self._left += self._guard.sweep(ranks, _SWEEP_S).ended
                self._say_what_was_left()
            case Finish(outcome=outcome):
                self._outcome = outcome
            case _:  # pragma: no cover - there are no others
                assert_never(action)

    def _say_what_was_left(self) -> None:
        """Name what was ended after a success: somebody may have wanted it to stay."""
        is_well = self._state.phase == policy.FINISHED and self._state.cause is None
        left, self._left = self._left, []
        if not left or not is_well:
            return
        from fleetrun.postmortem import report  # noqa: PLC0415 - seldom

        said = report.left_running(left)
        if said:
            self._say(said)
            self._listeners.tell(Noticed("ended", said, time.monotonic()))

    def _is_ready(self, process: int, attempt: int) -> None:
        self._feed(Ready(process, time.monotonic(), attempt))
        self._work()

    def _spawn(self, action: Spawn) -> Started | Exited:
        index, attempt = action
        spec = self._plan.processes[index]
        started = worker.spawn(
            spec,
            index=index,
            attempt=attempt,
            env=worker.environment(self._base_env, spec, {variables.JOB: self._marker}),
            log=names.log_path(self._plan, spec, attempt),
            default_signals=self._default_signals,
            guard=self._guard,
            folder=self._folder,
            stdin=self._stdin,
        )
        now = time.monotonic()
        if isinstance(started, worker.Refusal):
            return Exited(
                index, self._labels[index], started.status, now, attempt=attempt, fault=started.why
            )
        self._workers[index] = started
        self._loop.watch(started.pidfd, lambda: self._on_exit(started))
        return Started(index, self._labels[index], started.pid, now, attempt)

    def _signal_all(self, signum: int, spared: AbstractSet[int] = frozenset()) -> None:
        starting = []
        for one in self._workers.values():
            if one.index in spared:
                continue
            if signum == signal.SIGINT and worker.is_starting(one, self._plan.processes[one.index]):
                starting.append(one)
            if not (one.has_terminal and signum in self._typed):
                one.signal(signum)
        if starting:
            self._loop.alarm(
                "swallowed", time.monotonic() + _SWALLOWED_S, partial(self._insist, starting)
            )

    def _insist(self, starting: Sequence[worker.Worker]) -> None:
        """Send TERM to those of STARTING that INT did not end."""
        for one in starting:
            if self._workers.get(one.index) is one:
                one.signal(signal.SIGTERM)

    def _explain(self, signum: int) -> None:
        """Tell the user what we wait for."""
        interrupted = self._state.interrupted
        if signum == signal.SIGKILL:
            self._say(f"Killing {names.listed(self._alive())}.")
        elif interrupted is not None and interrupted == self._state.cause:
            self._say(
                f"{signal_name(signum)}: asked {names.listed(self._alive())} to stop; "
                f"in {self._rules.grace_s:g} s, or when asked again, they are killed."
            )
        elif self._state.phase == policy.STOPPING:
            self._loop.alarm("wait", time.monotonic() + _SILENCE_S, self._say_who_is_late)

    def _say_what_comes_next(self, at: float) -> None:
        # The first start is attempt 0, as in log files' names and $PADDLE_RESTART_COUNT.
        attempt, most = self._state.attempt + 1, self._rules.max_restarts
        wait = (self._state.deadline or at) - at
        self._say(
            f"{self._state.outcome().describe()}. Attempt {attempt} of {most} in {wait:.1f} s."
        )

    def _say_who_is_late(self) -> None:
        if self._state.phase == policy.STOPPING and self._state.deadline is not None:
            left = self._state.kill_at - time.monotonic()
            why = "" if self._state.cause is None else f"{self._state.outcome().describe()}. "
            self._say(f"{why}Waiting up to {left:.0f} s for {names.listed(self._alive())} to end.")

    def _alive(self) -> list[str]:
        return [self._labels[index] for index in sorted(self._workers)]


def _enter(folder: str) -> None:
    """Workers start where the plan says; that is where we are, except in tests."""
    if not os.path.samefile(folder, "."):
        os.chdir(folder)
