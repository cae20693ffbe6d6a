"""The supervisor: performs the policy's actions and notifies the observers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from fleetrun.errors import EnvironmentFault, FleetrunError
from fleetrun.model import LaunchPlan, Rules
from fleetrun.postmortem import failures, investigation, kernelfacts, report
from fleetrun.postmortem.investigation import Investigation
from fleetrun.run import children, descriptors, policy, proc, terminal, worker
from fleetrun.run.events import (
    Action,
    Await,
    Declared,
    Event,
    Examine,
    Exited,
    Finish,
    Finished,
    Gather,
    Gathered,
    GatherFailed,
    HostStopped,
    Interrupted,
    Outcome,
    Ready,
    Recovered,
    RootCauses,
    RunWarning,
    SignalAll,
    SourceFailed,
    Spawn,
    StacksRequested,
    Started,
    StopGathering,
    StrategyReport,
    Sweep,
    TimerExpired,
    assert_never,
    signal_name,
)
from fleetrun.run.gathering import Gathering, Round
from fleetrun.run.guard import Guard
from fleetrun.run.loop import Loop, nothing, poll
from fleetrun.run.observers import ObservedJob, Observers
from fleetrun.run.readiness import Readiness
from fleetrun.run.signals import Signals, TerminalSignals, defaults_for_children
from fleetrun.rundir import names, variables
from fleetrun.rundir.folder import beside

# After this many seconds of waiting for ranks to end, print which ones.
_SILENCE_S = 1.0
# A Python that is starting may swallow INT; it has nothing to save, and gets TERM after this.
_SWALLOWED_S = 1.0
# Requests to end: the rank gets them before what it has started.
_POLITE = frozenset((policy.HUP, policy.INT, policy.TERM))
# How long before the end of the grace the processes that ranks have started are asked to end.
_REST_S = 1.0
# A killed descendant that still exists after this waits for a device.
_SWEEP_S = 5.0
# Orphans are reaped this long after SIGCHLD, when the exits of ranks have been handled.
_ORPHANS_S = 0.1
# The variables that name the files in which a process reports its exception.
_ERRORS = (variables.RECORDS, variables.ERROR_FILE)
# How often to check whether the processes that a rank has left in its group are gone.
_GROUP_S = 0.05


class Supervisor:
    """Runs JOB to its end, one generation after the other, with the plans of GATHERING."""

    def __init__(
        self, gathering: Gathering, job: ObservedJob, files: descriptors.FileLimit | None = None
    ) -> None:
        self._gathering = gathering
        gathering.prepare, gathering.withdraw = self._prepare, self._withdraw
        # The plan that is ready to start.
        self._prepared: LaunchPlan | None = None
        self._logs = worker.OpenLogs()
        self._job = job
        self._log, self._show, self._progress = job.log, job.show, job.progress
        self._files = files or descriptors.FileLimit(0)
        self._terminal: TerminalSignals | None = None
        self._settings: terminal.TerminalSettings | None = None
        # Signals that the terminal has also sent to the process that reads it.
        self._typed: set[int] = set()
        self._is_over = False
        self._observers = Observers(job, self._declare)
        # Of the current generation.
        self._plan: LaunchPlan
        self._has_plan = False
        self._labels: list[str] = []
        self._rules = Rules()
        self._why_no_plan: Exception | None = None
        self._todo: list[Action] = []
        self._workers: dict[int, worker.Worker] = {}
        self._readiness: Readiness | None = None
        self._base_env = dict(os.environb)
        self._guard: Guard
        self._has_guard = False
        self._outcome: Outcome | None = None
        # Killed processes that ranks had left running when they succeeded.
        self._left: list[children.Leftover] = []
        self._in_a_hurry = False
        # When the attempt before this one failed or was asked to end.
        self._failed_at: float | None = None

    def run(self) -> Outcome:
        """Start everything, supervise it, and return when no process of the job is left.

        Raises FleetrunError if nothing can be started.
        """
        trouble = proc.fault()
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
        try:
            return self._supervise()
        finally:
            if self._settings is not None and terminal.is_foreground():
                self._settings.restore()
            # No process is left now, unless this launcher itself has failed.
            if self._has_guard:
                self._guard.dismiss()
            children.sweep(frozenset(), _SWEEP_S)
            self._logs.close()
            self._signals.close()
            if self._terminal is not None:
                self._terminal.close()
            self._loop.close()
            self._files.restore()

    def _supervise(self) -> Outcome:
        began = time.monotonic()
        self._loop.watch(self._signals.fd, self._on_signals)
        self._state, actions = policy.begin(began, self._gathering.timeout_s)
        self._loop.timer("policy", self._state.deadline, self._on_deadline)
        self._todo += actions
        self._perform_all()
        while not self._has_plan and self._outcome is None:
            self._loop.turn()
            self._perform_all()
        if self._why_no_plan is not None and not self._has_plan:
            raise self._why_no_plan
        self._baseline = kernelfacts.baseline(began)
        while self._outcome is None:
            self._loop.turn()
            # The actions for the events of this turn are performed before the next wait.
            self._perform_all()
        self._is_over = True
        ended_at = time.monotonic()
        self._observers.on_event(Finished(self._outcome, ended_at))
        # The last output of the ranks comes before the launcher's last lines.
        self._deliver()
        if self._outcome.cause is not None:
            shown = [i for i in range(len(self._labels)) if self._observers.shows(i)]
            findings = self._investigate(self._outcome)

            ranks = self._plan.ranks if self._has_plan else ()
            text = report.verdict(self._outcome, findings, self._labels, frozenset(shown), ranks)
            self._show(text)
            for index in self._outcome.stuck:
                self._log_kernel_state(index)
            self._deliver()
        elif self._job.restarts:
            # It says what the attempts before have failed of.
            self._investigate(self._outcome)
        if self._has_guard:
            self._guard.retire()
        closing = self._job.closing(self._outcome, ended_at) if self._has_plan else ""
        for line in closing.splitlines():
            self._log(line)
            self._deliver()
        self._observers.close()
        return self._outcome

    def kill_at(self, at: float | None) -> None:
        """Have the ranks killed at AT (monotonic seconds), even if this launcher is stopped."""
        if self._has_guard:
            self._guard.kill_at(at)

    def tell_at(self, target: tuple[str, int]) -> None:
        """Have the guard report to the coordinator at TARGET if this launcher is killed."""
        if self._has_guard:
            self._guard.tell_at(target)

    # Generations --------------------------------------------------------------------------------

    def _gather(self, attempt: int) -> None:
        """Gather the plan of ATTEMPT, which may take long."""

        def answered(planned: LaunchPlan | Exception) -> None:
            self._feed(self._gathered(attempt, planned))
            self._perform_all()

        self._round = Round(
            self._gathering, attempt, self._loop, self._log, answered, progress=self._progress
        )
        self._round.begin()

    def _no_plan(self, attempt: int, error: Exception) -> GatherFailed:
        self._why_no_plan = error
        code = error.exit_code if isinstance(error, FleetrunError) else FleetrunError.exit_code
        why = str(error) if isinstance(error, FleetrunError) else repr(error)
        return GatherFailed(attempt, why, code, time.monotonic())

    def _prepare(self, planned: LaunchPlan, attempt: int) -> None:
        """Prepare everything that the ranks of a generation need; FleetrunError if that fails."""
        if not self._has_plan:
            self._withdraw()
        try:
            self._files.hold(len(planned.processes))
            self._stdin = self._job.stdin(planned)
            if not self._has_plan:
                self._set_up(planned)
            worker.claim(planned, attempt, self._job.folder, self._logs)
        except OSError as error:
            self._withdraw()
            raise EnvironmentFault(names.unwritable(planned.run_dir, error.strerror)) from None
        except FleetrunError:
            self._withdraw()
            raise
        self._prepared = planned

    def _withdraw(self) -> None:
        """Undo the preparations for a first generation that does not start."""
        self._prepared = None
        self._logs.close()
        if self._has_plan:
            return
        self._observers.withdraw()
        if self._has_guard:
            self._has_guard = False
            self._guard.dismiss()

    def _gathered(self, attempt: int, planned: LaunchPlan | Exception) -> Gathered | GatherFailed:
        """Adopt the prepared plan: everything that depends on a plan is created again."""
        if isinstance(planned, Exception):
            return self._no_plan(attempt, planned)
        try:
            if planned is not self._prepared:
                self._prepare(planned, attempt)
        except FleetrunError as error:
            return self._no_plan(attempt, error)
        self._plan, self._rules, self._has_plan = planned, planned.rules, True
        self._labels = [names.label(spec) for spec in planned.processes]
        if self._stdin.is_terminal and self._terminal is None:
            self._settings = self._settings or terminal.TerminalSettings()
            self._terminal = TerminalSignals()
            self._loop.watch(self._terminal.fd, self._on_signals)
        return Gathered(attempt, planned, time.monotonic())

    def _set_up(self, plan: LaunchPlan) -> None:
        """Create what all generations share: the guard, the observers, the run directory."""
        _enter(plan.cwd)
        # Meanwhile it gets ready to start ranks, which takes a millisecond.
        self._start_guard(plan)
        self._observers.prepare(plan)

    def _start_guard(self, plan: LaunchPlan) -> None:
        own = plan.processes[0].env.get(variables.JOB) if plan.processes else None
        marker = own or f"{os.path.basename(plan.run_dir)}-{os.getpid()}"
        self._environments = worker.Environments(self._base_env, {variables.JOB: marker})
        self._settings = terminal.TerminalSettings() if self._stdin.is_terminal else None
        try:
            self._guard = Guard(
                f"{variables.JOB}={marker}",
                self._files,
                self._settings,
                grace_s=plan.rules.grace_s,
                tell_loss=self._job.tell_loss,
            )
        except OSError as error:
            raise EnvironmentFault(
                f"No process can be started ({error.strerror}): look at `ulimit -u`, `ulimit -n` "
                "and the pids limit of the container."
            ) from None
        self._has_guard = True

    # The end ------------------------------------------------------------------------------------

    def _log_kernel_state(self, index: int) -> None:
        """Print the kernel state of a process that SIGKILL did not end."""
        survivor = self._workers.get(index)
        if survivor is not None:
            name = f"{self._labels[index]}, pid {survivor.pid}"
            self._log(f"{name}, is still there: {proc.state_of(survivor.pid)}.")

    def _investigate(self, outcome: Outcome) -> Investigation:
        """Investigate what happened, and write it to report.json."""
        if not self._has_plan:
            return investigation.Investigation()
        try:
            result = investigation.investigate(self._plan, outcome, self._baseline)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever /proc holds
            self._log(f"The cause could not be examined ({error!r}).")
            result = investigation.Investigation()
        try:
            restarts, redact = tuple(self._job.restarts), self._job.redact
            investigation.write(
                self._job.folder, self._plan, outcome, result, restarts=restarts, redact=redact
            )
        except OSError as error:
            self._log(f"{names.REPORT} could not be written ({error.strerror}).")
        return result

    def _deliver(self) -> None:
        """Let the observers finish; a signal ends the wait."""
        while not self._in_a_hurry and self._observers.is_busy():
            self._loop.turn()

    # What happens -------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        self._read_signals()
        self._perform_all()

    def _read_signals(self) -> None:
        for signum, is_typed in self._terminal.read() if self._terminal is not None else ():
            (self._typed.add if is_typed else self._typed.discard)(signum)
            self._on_request(signum)
        for signum in self._signals.read():
            match signum:
                case signal.SIGCHLD:
                    self._loop.timer("orphans", time.monotonic() + _ORPHANS_S, self._reap_orphans)
                case signal.SIGQUIT:
                    self._observers.on_event(StacksRequested(time.monotonic()))
                case signal.SIGTSTP:
                    self._pause()
                case signal.SIGTTIN:
                    # Outdated if `fg` was faster.
                    if not terminal.is_foreground():
                        self._pause()
                case signal.SIGCONT:
                    self._signal_all(signal.SIGCONT)
                case _:
                    self._on_request(signum)

    def _on_request(self, signum: int) -> None:
        """Handle a signal that is a request to the launcher."""
        if self._outcome is not None:
            self._in_a_hurry = signum not in policy.FORWARDED
        else:
            self._feed(Interrupted(signum, time.monotonic()))

    def _pause(self) -> None:
        """Ctrl-Z: stop all processes, then the launcher, until SIGCONT."""
        if self._gathering.is_shared:
            self._log(
                "Ctrl-Z has no effect in a job on several hosts: the others would consider this "
                "one lost. Ctrl-C ends the job."
            )
            return
        if terminal.is_foreground() and not terminal.has_shell():
            self._log("Ctrl-Z has no effect: no shell could continue the job. Ctrl-C ends it.")
            # The terminal has stopped those of its foreground group that do not handle it.
            os.killpg(0, signal.SIGCONT)
            return
        # Ranks lead sessions without a terminal, where TSTP has no effect. A process that reads the
        # terminal gets TSTP from the terminal.
        self._signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_all(signal.SIGCONT)

    def _reap_orphans(self) -> None:
        # Only the launcher's own children, unless the guard was killed.
        own = {rank.pid for rank in self._workers.values()}
        children.reap_orphans(own | (self._guard.pids if self._has_guard else set()))

    def _on_exit(self, ended: worker.Worker) -> None:
        self._loop.unwatch(ended.pidfd)
        # A scheduler signals ranks and launcher at once: then the signal is the cause, and is
        # handled before the exit.
        self._read_signals()
        self._perform_all()
        if ended.ended is None and self._state.phase == policy.STOPPING:
            worker.reap_alone([ended, *self._ready_peers()], self._guard)
            left = ended.left_behind() if ended.ended is None else None
            if left is not None:
                ended.ask_left(left)
                self._wait_for_group(ended, left)
                return
        elif ended.ended is None:
            self._reap_together(ended)
        status = ended.reap()
        self._left += ended.left
        at = time.monotonic()
        exited = Exited(
            ended.index, self._labels[ended.index], status, at, ended.pid, ended.attempt
        )
        exited = exited._replace(
            peak_bytes=ended.peak_bytes, has_core=ended.has_core, lived_s=at - ended.started_at
        )
        del self._workers[ended.index]
        if status.exit_code and self._state.phase == policy.RUNNING:
            exited = self._with_circumstances(exited)
        self._feed(exited)
        # Now, not at the end of the turn: the others must be signalled without delay.
        self._perform_all()

    def _reap_together(self, first: worker.Worker) -> None:
        """Reap FIRST with all others that have ended, too, as far as they have succeeded.

        Of many ranks, most end at once, and each answer of the guard costs.
        """
        others = self._ready_peers()
        # Nothing follows unless other hosts fail, or evidence of these ranks; or a trainer that
        # waits for its servers is still to be started.
        is_last = len(others) + 1 == len(self._workers) and not self._gathering.is_shared
        are_all_started = self._state.next_index == self._state.total
        may_follow = self._rules.max_restarts or not are_all_started
        sweep_s = _SWEEP_S if is_last and not may_follow else None
        worker.reap_together([first, *others], self._guard, sweep_s)

    def _ready_peers(self) -> list[worker.Worker]:
        """Return the others that have ended, too, and are not reaped yet."""
        ready = self._loop.ready
        peers = self._workers.values() if ready else ()
        return [peer for peer in peers if peer.pidfd in ready and peer.ended is None]

    def _with_circumstances(self, exited: Exited) -> Exited:
        """Add the others that have failed by now; the rest is examined when all have ended."""
        by_pidfd = {peer.pidfd: index for index, peer in self._workers.items()}
        ended = {by_pidfd[fd] for fd in poll(0.0, *by_pidfd)}
        return exited._replace(also_failed=frozenset((*ended, *self._failed(exited))))

    def _failed(self, exited: Exited) -> list[int]:
        """Return the running processes that have raised an exception before EXITED ended."""
        paths = {
            index: [self._plan.processes[index].env.get(name, "") for name in _ERRORS]
            for index in self._workers
        }
        # The others are waiting for their signals: look at the folder, not at each file, and pay
        # the 4 ms of this import only for a record.
        there = beside([path for some in paths.values() for path in some if path])
        reporting = [index for index, some in paths.items() if not there.isdisjoint(some)]
        if not reporting:
            return []

        return [index for index in reporting if failures.has_failed(self._plan, index, exited)]

    def _examine(self, exits: tuple[Exited, ...]) -> RootCauses:
        try:
            exits = failures.examine(self._plan, exits)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever a file holds
            self._log(f"The cause could not be examined ({error!r}).")
        return RootCauses(exits, time.monotonic())

    def _wait_for_group(self, ended: worker.Worker, left: int) -> None:
        """Give the processes that a rank left in its group its grace; then the rank has ended."""
        try:
            pidfd = os.pidfd_open(left)
        except ProcessLookupError:
            self._on_exit(ended)
            return
        key = ("group", ended.index)

        def look_again() -> None:
            self._loop.timer(key, None, nothing)
            self._loop.unwatch(pidfd)
            os.close(pidfd)
            self._on_exit(ended)

        self._loop.watch(pidfd, look_again)
        self._loop.timer(key, time.monotonic() + _GROUP_S, look_again)

    def _on_deadline(self) -> None:
        self._feed(TimerExpired(time.monotonic()))
        self._perform_all()

    def _declare(self, happening: Declared) -> None:
        """Notify the observers of what a source declares, and act on it."""
        if isinstance(happening, RunWarning | StrategyReport):
            self._observers.on_event(happening)
        elif self._is_over:
            if isinstance(happening, SourceFailed) and happening.is_required:
                self._log(f"{happening.describe()}.")
        else:
            self._feed(happening)
            self._perform_all()

    def _feed(self, event: Event) -> None:
        before = self._state
        self._state, actions = policy.step(before, event, self._rules)
        self._todo += actions
        if before.phase == policy.RUNNING != self._state.phase:
            self._failed_at = event.at
        if self._state.is_resting and not before.is_resting:
            self._log_next_attempt(event.at)
        if self._state.phase != policy.RUNNING and self._readiness is not None:
            self._readiness.stop()
        if before.phase == policy.GATHERING != self._state.phase:
            self._round.end(is_answered=isinstance(event, Gathered | GatherFailed))
        if self._state.deadline != before.deadline:
            self._loop.timer("policy", self._state.deadline, self._on_deadline)
        if isinstance(event, Gathered):
            # In the first generation; later ones find them open.
            self._observers.open(self._loop)
        self._observers.on_event(event)
        if isinstance(event, Started) and self._state.next_index == self._state.total:
            self._recover(event.attempt, event.at)

    # What is done -------------------------------------------------------------------------------

    def _perform_all(self) -> None:
        """Perform the pending actions, signals first."""
        while self._todo:
            if isinstance(self._todo[0], Gather | Spawn | Await):
                self._read_signals()
            action = self._todo.pop(0)
            if policy.is_current(self._state, action):
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
                self._await(action)
            case SignalAll(signum=signum, spared=spared):
                self._signal_all(signum, spared)
                self._observers.on_event(action)
                self._explain(signum)
            case Examine(exits=exits):
                self._feed(self._examine(exits))
            case HostStopped():
                self._observers.on_event(action)
            case Sweep():
                ranks = {rank.pid for rank in self._workers.values()}
                if self._has_guard:
                    self._left += self._guard.sweep(ranks, _SWEEP_S).ended
                self._log_leftovers()
            case Finish(outcome=outcome):
                self._outcome = outcome
                if self._has_guard and not outcome.stuck and not self._gathering.is_shared:
                    # While the end is recorded: a process takes a millisecond to end. Other hosts
                    # still have to be told if this launcher is killed.
                    self._guard.retire()
            case _:  # pragma: no cover - there are no others
                assert_never(action)

    def _log_leftovers(self) -> None:
        """Print which processes were killed after a success: the user may want to keep them."""
        is_well = self._state.phase == policy.FINISHED and self._state.cause is None
        left, self._left = self._left, []
        if not left or not is_well:
            return

        text = report.left_running(left)
        if text:
            self._log(text)
            self._observers.on_event(RunWarning("ended", text, time.monotonic()))

    def _await(self, action: Await) -> None:
        self._readiness = self._readiness or Readiness(
            self._loop,
            self._log,
            self._progress,
            is_alive=self._workers.__contains__,
            gone=self._job.gone,
            ready=self._is_ready,
        )
        self._readiness.begin(self._plan, action.process, action.attempt)

    def _is_ready(self, process: int, attempt: int) -> None:
        self._feed(Ready(process, time.monotonic(), attempt))
        self._perform_all()

    def _spawn(self, action: Spawn) -> Started | Exited:
        index, attempt = action
        spec = self._plan.processes[index]
        started = worker.spawn(
            spec,
            index=index,
            attempt=attempt,
            env=self._environments.of(spec),
            logs=names.log_paths(self._plan, spec, attempt),
            open_logs=self._logs,
            default_signals=self._default_signals,
            guard=self._guard,
            folder=self._job.folder,
            stdin=self._stdin,
        )
        now = time.monotonic()
        if isinstance(started, worker.SpawnRefusal):
            return Exited(
                index, self._labels[index], started.status, now, attempt=attempt, fault=started.why
            )
        self._workers[index] = started
        self._loop.watch(started.pidfd, lambda: self._on_exit(started))
        return Started(index, self._labels[index], started.pid, now, attempt)

    def _recover(self, attempt: int, at: float) -> None:
        """Report how long it took until all ranks of ATTEMPT were started AT that moment."""
        if self._failed_at is None:
            return
        why = self._state.earlier[-1].reason()
        recovered = Recovered(attempt, at - self._failed_at, at, why)
        self._failed_at = None
        self._job.restarts.append(recovered)
        self._observers.on_event(recovered)

    def _signal_all(self, signum: int, spared: AbstractSet[int] = frozenset()) -> None:
        starting = []
        for rank in self._workers.values():
            if rank.index in spared:
                continue
            if signum == signal.SIGINT and worker.is_starting(
                rank, self._plan.processes[rank.index]
            ):
                starting.append(rank)
            if not (rank.has_terminal and signum in self._typed):
                if signum in policy.FORWARDED:
                    rank.notify(signum)
                elif signum in _POLITE:
                    rank.ask(signum)
                else:
                    rank.signal(signum)
        if self._state.phase == policy.STOPPING and signum in _POLITE:
            # What ranks have started, such as workers of a DataLoader, may need a moment to end.
            before_s = min(_REST_S, self._rules.grace_s / 10)
            self._loop.timer("rest", self._state.kill_at - before_s, self._ask_rest)
        if starting:
            self._loop.timer(
                "swallowed", time.monotonic() + _SWALLOWED_S, partial(self._terminate, starting)
            )

    def _ask_rest(self) -> None:
        """Ask what the ranks have started: the grace is nearly over."""
        if self._state.phase == policy.STOPPING:
            for rank in self._workers.values():
                rank.ask_rest()

    def _terminate(self, starting: Sequence[worker.Worker]) -> None:
        """Send TERM to the processes of STARTING that INT did not end."""
        for rank in starting:
            if self._workers.get(rank.index) is rank:
                rank.ask(signal.SIGTERM)

    def _explain(self, signum: int) -> None:
        """Print what the launcher waits for."""
        interrupted = self._state.interrupted
        if signum == signal.SIGKILL:
            self._log(f"Killing {names.listed(self._alive())}.")
        elif interrupted is not None and interrupted == self._state.cause:
            are = "it is" if len(self._workers) == 1 else "they are"
            self._log(
                f"{signal_name(signum)}: asked {names.listed(self._alive())} to stop; "
                f"in {self._rules.grace_s:g} s, or when asked again, {are} killed."
            )
        elif self._state.phase == policy.STOPPING:
            self._loop.timer("wait", time.monotonic() + _SILENCE_S, self._show_late)

    def _log_next_attempt(self, at: float) -> None:
        # What ranks have printed because another one failed is not the last word.
        self._observers.flush()
        wait = (self._state.deadline or at) - at
        when = f" in {wait:.1f} s" if round(wait, 1) else ""
        plan = f"Restart {self._state.attempt} of {self._rules.max_restarts}{when}."
        if self._gathering.may_change:
            # Attempts caused by hosts that come and go are not limited.
            when = f" in {wait:.1f} s or later," if round(wait, 1) else ""
            plan = f"All ranks start again{when} on the available hosts."
        self._log(f"{self._state.earlier[-1].reason()}. {plan}")

    def _show_late(self) -> None:
        if self._state.phase == policy.STOPPING and self._state.deadline is not None:
            left = self._state.kill_at - time.monotonic()
            why = "" if self._state.cause is None else f"{self._state.outcome().describe()}. "
            late = names.listed(self._alive())
            self._progress(f"{why}Waiting up to {left:.0f} s for {late} to end.")

    def _alive(self) -> list[str]:
        return [self._labels[index] for index in sorted(self._workers)]


def _enter(folder: str) -> None:
    """Change to the plan's working directory, which differs only in tests."""
    if not os.path.samefile(folder, "."):
        os.chdir(folder)
