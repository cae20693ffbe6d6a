"""The supervisor: performs the policy's actions and notifies the observers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from fleetrun.errors import EnvironmentFault, FleetrunError
from fleetrun.model import LaunchPlan
from fleetrun.postmortem import failures, kernelfacts
from fleetrun.run import children, policy, proc, processes, terminal
from fleetrun.run.events import (
    Action,
    Declared,
    Event,
    Examine,
    Exited,
    Finished,
    Gather,
    Gathered,
    GatherFailed,
    HostStopped,
    Interrupted,
    Outcome,
    Recovered,
    RootCauses,
    RunWarning,
    SignalAll,
    Spawn,
    StacksRequested,
    Started,
    StrategyReport,
    Sweep,
    TimerExpired,
    signal_name,
)
from fleetrun.run.gathering import Gathering
from fleetrun.run.keeper import REQUESTS
from fleetrun.run.loop import Loop, LoopShare, poll
from fleetrun.run.observers import ObservedJob, Observers
from fleetrun.rundir import names

# How often to log which hosts are awaited.
_PROGRESS_S = 10.0
# Orphans are reaped this long after SIGCHLD, when the exits of ranks have been handled.
_ORPHANS_S = 0.1
# How often to check whether the processes that a rank has left in its group are gone.
_GROUP_S = 0.02


class Supervisor:
    """Runs JOB to its end, one generation after the other, with the plans of GATHERING."""

    def __init__(self, gathering: Gathering, job: ObservedJob) -> None:
        self._gathering = gathering
        gathering.prepare, gathering.withdraw = self._prepare, self._withdraw
        assert job.keeper is not None
        self._job, self._keeper, self._log = job, job.keeper, job.log
        self._loop = Loop()
        self._observers = Observers(job, self._declare)
        self._state = policy.Policy()
        self._todo: list[Action] = []
        self._is_performing = False
        # The plan that is ready to start; whether there has been one; else why not.
        self._prepared: LaunchPlan | None = None
        self._has_plan = False
        self._why_no_plan: Exception | None = None
        # The callbacks of the gathering that has not answered yet.
        self._awaited: LoopShare | None = None
        self._workers: dict[int, processes.Worker] = {}
        self._base_env = dict(os.environb)
        # Signals that the terminal has also sent to the process that reads it.
        self._typed: set[int] = set()
        # When the attempt before this one failed or was asked to end.
        self._failed_at: float | None = None
        self._in_a_hurry = False

    def run(self) -> Outcome:
        """Start everything, supervise it, and return when no process of the job is left.

        Raises FleetrunError if nothing can be started.
        """
        self._keeper.leave(has_terminal=terminal.is_own())
        self._child_fd, wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            self._loop.watch(self._keeper.fd, lambda: self._take(self._keeper.read()))
            self._loop.watch(self._child_fd, self._on_child)
            self._todo += self._state.begin()
            self._perform_all()
            while self._state.phase != policy.FINISHED:
                self._loop.turn()
            if self._why_no_plan is not None and not self._has_plan:
                raise self._why_no_plan
            return self._end(self._state.outcome())
        finally:
            # Only our helpers are left now, unless this launcher itself has failed.
            children.sweep(frozenset())
            self._loop.close()
            self._keeper.release()

    # Generations --------------------------------------------------------------------------------

    def _gather(self, attempt: int) -> None:
        """Gather the plan of ATTEMPT, which may take long.

        What the gathering raises, now or in a callback of the loop, counts as an answer.
        """
        answers: list[LaunchPlan | Exception] = []

        def guarded(call: Callable[[], None]) -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - what cannot be planned is a verdict
                answers.append(error)
            if answers and self._awaited is share:
                share.clear()
                self._awaited = None
                # What fails from here on is not the gathering's fault.
                self._feed(self._gathered(attempt, answers[0]))

        def answer(planned: LaunchPlan | FleetrunError) -> None:
            if isinstance(planned, LaunchPlan) and planned is not self._prepared:
                self._prepare(planned, attempt)
            answers.append(planned)

        def log_progress() -> None:
            if text := self._gathering.progress():
                self._log(text)
            share.timer("progress", time.monotonic() + _PROGRESS_S, log_progress)

        now = time.monotonic()
        share = self._awaited = LoopShare(self._loop, guarded)
        share.timer("progress", now + _PROGRESS_S, log_progress)
        share.timer("begin", now, lambda: self._gathering.begin(attempt, share, answer))

    def _prepare(self, planned: LaunchPlan, attempt: int) -> None:
        """Prepare everything that the ranks of a generation need; FleetrunError if that fails."""
        self._withdraw()
        try:
            if not self._has_plan:
                # What all generations share: the folder, the marker, the observers.
                if not os.path.samefile(planned.cwd, "."):
                    os.chdir(planned.cwd)
                self._marker = f"{os.path.basename(planned.run_dir)}-{self._keeper.pid}"
                self._observers.prepare(planned)
                self._baseline = kernelfacts.baseline(self._job.began_at)
            processes.claim(planned, attempt, self._job.folder)
            self._prepared = planned
        except OSError as error:
            raise EnvironmentFault(names.unwritable(planned.run_dir, error.strerror)) from None
        finally:
            if self._prepared is None:
                self._withdraw()

    def _withdraw(self) -> None:
        """Undo the preparations for a first generation that does not start."""
        self._prepared = None
        if not self._has_plan:
            self._observers.withdraw()

    def _gathered(self, attempt: int, planned: LaunchPlan | Exception) -> Gathered | GatherFailed:
        """Adopt the prepared plan."""
        now = time.monotonic()
        if isinstance(planned, Exception):
            self._why_no_plan = planned
            if isinstance(planned, FleetrunError):
                return GatherFailed(attempt, str(planned), planned.exit_code, now)
            return GatherFailed(attempt, repr(planned), 1, now)
        self._job.plan, self._has_plan = planned, True
        self._reader = terminal.choose(planned, self._job.shown(planned), self._keeper.group)
        self._keeper.set_grace(planned.rules.grace_s)
        return Gathered(attempt, planned, now)

    # The end ------------------------------------------------------------------------------------

    def _end(self, outcome: Outcome) -> Outcome:
        """Let the observers and the user know of OUTCOME, and return it."""
        ended_at = time.monotonic()
        self._observers.on_event(Finished(outcome, ended_at))
        self._deliver()
        if outcome.cause is not None or outcome.earlier:
            self._explain_end(outcome)
        if self._has_plan and (closing := self._job.closing(outcome, ended_at)):
            self._log(closing)
            self._deliver()
        self._observers.close()
        return outcome

    def _explain_end(self, outcome: Outcome) -> None:
        """Investigate and print what went wrong, and the processes that SIGKILL did not end."""
        from fleetrun.postmortem import investigation, report  # only after a failure

        job, findings, labels = self._job, investigation.Investigation(), list[str]()
        try:
            if self._has_plan:
                labels = [self._label(index) for index in range(len(job.plan.processes))]
                findings = investigation.investigate(job.plan, outcome, self._baseline)
                made = job.folder, job.plan, outcome, findings
                investigation.write(*made, restarts=tuple(job.restarts), redact=job.redact)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever /proc holds
            why = error.strerror if isinstance(error, OSError) else repr(error)
            self._log(f"The cause could not be examined, or {names.REPORT} written ({why}).")
        if outcome.cause is None:
            # The report says what the attempts before have failed of.
            return
        shown = frozenset(i for i in range(len(labels)) if self._observers.shows(i))
        job.show(report.verdict(outcome, findings, labels, shown))
        for index in outcome.stuck:
            pid = self._workers[index].pid
            self._log(f"{labels[index]}, pid {pid}, is still there: {proc.state_of(pid)}.")
        self._deliver()

    def _deliver(self) -> None:
        """Let the observers finish; a signal ends the wait."""
        while not self._in_a_hurry and self._observers.is_busy():
            self._loop.turn()

    # What happens -------------------------------------------------------------------------------

    def _take(self, signals: Sequence[tuple[int, bool]]) -> None:
        """Handle SIGNALS that the keeper has passed on."""
        stops = []
        for signum, is_typed in signals:
            match signum:
                case signal.SIGQUIT:
                    self._observers.on_event(StacksRequested(time.monotonic()))
                case signal.SIGTSTP | signal.SIGTTIN:
                    stops.append(signum)
                case signal.SIGCONT:
                    stops.clear()
                    self._signal_all(signal.SIGCONT)
                case signal.SIGKILL:
                    # The keeper was killed.
                    self._loop.unwatch(self._keeper.fd)
                    self._on_request(signum)
                case _ if signum in REQUESTS:
                    (self._typed.add if is_typed else self._typed.discard)(signum)
                    self._on_request(signum)
        if stops:
            self._pause(stops[0])

    def _on_child(self) -> None:
        # Where orphans end all the time, waiting for a pause would leave them zombies.
        self._loop.unwatch(self._child_fd)
        self._loop.timer("orphans", time.monotonic() + _ORPHANS_S, self._reap_orphans)

    def _reap_orphans(self) -> None:
        os.read(self._child_fd, 4096)
        for pid in set(children.pids()) - self._spared():
            children.reap(pid)
        self._loop.watch(self._child_fd, self._on_child)

    def _spared(self) -> set[int]:
        """Return the ranks and our helpers, who are no orphans."""
        ranks = {rank.pid for rank in self._workers.values()}
        return ranks | set(filter(children.is_helper, children.pids()))

    def _on_request(self, signum: int) -> None:
        """Handle a signal that is a request to the launcher."""
        if self._state.phase == policy.FINISHED:
            self._in_a_hurry = signum not in policy.FORWARDED
        else:
            self._feed(Interrupted(signum, time.monotonic()))

    def _pause(self, signum: int) -> None:
        """Stop all processes and this one, and so the keeper, until SIGCONT."""
        is_foreground = terminal.is_foreground(self._keeper.group)
        if signum == signal.SIGTTIN and is_foreground:
            # `fg` was faster.
            return
        is_shared = self._gathering.is_shared
        # Who leads a session has no shell there: `ssh -t HOST fleetrun`, a container's process 1.
        if is_shared or (is_foreground and os.getsid(self._keeper.pid) == self._keeper.pid):
            why = "other hosts would lose us" if is_shared else "no shell could continue the job"
            self._log(f"Ctrl-Z has no effect: {why}. Ctrl-C ends the job.")
            # The terminal has stopped those of its foreground group that do not handle it.
            if is_foreground:
                os.killpg(self._keeper.group, signal.SIGCONT)
            return
        # Ranks lead sessions without a terminal, where TSTP has no effect. A process that reads the
        # terminal gets TSTP from the terminal.
        self._signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_all(signal.SIGCONT)

    def _on_exit(self, ended: processes.Worker) -> None:
        self._loop.unwatch(ended.pidfd)
        status = ended.status()
        if status.exit_code and self._state.phase == policy.RUNNING:
            # A scheduler signals ranks and launcher at once: then the signal is the cause.
            self._take(self._keeper.catch_up())
        if self._state.phase == policy.STOPPING and ended.left_behind():
            # SIGTERM ends a wrapper shell, while the Python that it runs still saves a checkpoint.
            ended.ask()
            at = time.monotonic() + _GROUP_S
            self._loop.timer(ended, at, partial(self._on_exit, ended))
            return
        ended.reap()
        at = time.monotonic()
        exited = Exited(
            *(ended.index, self._label(ended.index), status, at, ended.pid, ended.attempt),
            peak_bytes=ended.peak_bytes,
            has_core=ended.has_core,
            lived_s=at - ended.started_at,
        )
        del self._workers[ended.index]
        if status.exit_code and self._state.phase == policy.RUNNING:
            # The others that have failed by now; the rest is examined when all have ended.
            by_pidfd = {peer.pidfd: index for index, peer in self._workers.items()}
            lost = {by_pidfd[fd] for fd in poll(0.0, *by_pidfd)}
            # The verdict must come, whatever a file holds.
            with suppress(Exception):
                lost |= {i for i in self._workers if failures.has_failed(self._job.plan, i, exited)}
            exited = exited._replace(also_failed=frozenset(lost))
        self._feed(exited)

    def _examine(self, exits: tuple[Exited, ...]) -> RootCauses:
        try:
            exits = failures.examine(self._job.plan, exits)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever a file holds
            self._log(f"The cause could not be examined ({error!r}).")
        return RootCauses(exits, time.monotonic())

    def _declare(self, happening: Declared) -> None:
        """Notify the observers of what a source declares, and act on it."""
        if isinstance(happening, RunWarning | StrategyReport):
            self._observers.on_event(happening)
        else:
            self._feed(happening)

    def _feed(self, event: Event) -> None:
        state = self._state
        phase, attempt, deadline = state.phase, state.attempt, state.deadline
        self._todo += state.step(event)
        if phase == policy.RUNNING != state.phase:
            self._failed_at = event.at
        if state.phase != policy.GATHERING and self._awaited is not None:
            self._awaited.clear()
            self._awaited = None
            with suppress(Exception):
                self._gathering.cancel()
        if state.deadline != deadline:
            self._loop.timer(
                "policy", state.deadline, lambda: self._feed(TimerExpired(time.monotonic()))
            )
        if isinstance(event, Gathered):
            self._observers.open(self._loop)
        self._observers.on_event(event)
        if state.attempt != attempt and state.phase == policy.GATHERING:
            self._log_next_attempt()
        is_last = isinstance(event, Started) and event.process + 1 == state.total
        if is_last and self._failed_at is not None:
            seconds, why = event.at - self._failed_at, state.earlier[-1].reason()
            self._failed_at = None
            self._job.restarts.append(Recovered(state.attempt, seconds, event.at, why))
            self._observers.on_event(self._job.restarts[-1])
        # Now, not at the end of the turn: the others must be signalled without delay.
        self._perform_all()

    # What is done -------------------------------------------------------------------------------

    def _perform_all(self) -> None:
        """Perform the pending actions, signals first; what follows from one comes last."""
        if self._is_performing:
            return
        self._is_performing = True
        while self._todo:
            if isinstance(self._todo[0], Gather | Spawn):
                self._take(self._keeper.read())
            action = self._todo.pop(0)
            if self._state.is_current(action):
                self._perform(action)
        self._is_performing = False

    def _perform(self, action: Action) -> None:
        match action:
            case Gather(attempt=attempt):
                self._gather(attempt)
            case Spawn():
                self._feed(self._spawn(action.process, action.attempt))
            case SignalAll(signum=signum):
                self._signal_all(signum)
                self._observers.on_event(action)
                self._explain(signum)
            case Examine(exits=exits):
                self._feed(self._examine(exits))
            case HostStopped():
                self._observers.on_event(action)
            case Sweep():
                self._sweep()

    def _sweep(self) -> None:
        """Kill everything that has outlived its rank."""
        children.sweep(self._spared())

    def _spawn(self, index: int, attempt: int) -> Started | Exited:
        plan, group = self._job.plan, self._keeper.group
        spec, label = plan.processes[index], self._label(index)
        takes_stdin = index == self._reader
        has_terminal = takes_stdin and terminal.is_foreground(group)
        started = processes.spawn(
            spec,
            index=index,
            attempt=attempt,
            env=processes.environment(self._base_env, spec, self._marker),
            logs=names.log_paths(plan, spec, attempt),
            folder=self._job.folder,
            default_signals=self._keeper.default_signals,
            open_files=self._keeper.open_files,
            # In a session of its own it could not read a terminal.
            takes_stdin=takes_stdin and (has_terminal or not os.isatty(0)),
            terminal_group=group if has_terminal else None,
        )
        now = time.monotonic()
        if isinstance(started, processes.SpawnRefusal):
            return Exited(index, label, started.status, now, attempt=attempt, fault=started.why)
        self._workers[index] = started
        self._loop.watch(started.pidfd, lambda: self._on_exit(started))
        return Started(index, label, started.pid, now, attempt)

    def _signal_all(self, signum: int) -> None:
        for rank in self._workers.values():
            if rank.has_terminal and signum in self._typed:
                continue
            if signum in policy.FORWARDED:
                rank.notify(signum)
            elif signum in policy.POLITE:
                rank.ask(signum)
            else:
                rank.signal(signum)

    def _explain(self, signum: int) -> None:
        """Print what the launcher waits for."""
        interrupted = self._state.interrupted
        if signum == signal.SIGKILL:
            self._log(f"Killing {self._alive()}.")
        elif interrupted is not None and interrupted == self._state.cause:
            are = "it is" if len(self._workers) == 1 else "they are"
            self._log(
                f"{signal_name(signum)}: asked {self._alive()} to stop; "
                f"in {self._state.rules.grace_s:g} s, or when asked again, {are} killed."
            )

    def _log_next_attempt(self) -> None:
        plan = f"Restart {self._state.attempt} of {self._state.rules.max_restarts}."
        if self._gathering.may_change:
            # Attempts caused by hosts that come and go are not limited.
            plan = "All ranks start again on the available hosts."
        self._log(f"{self._state.earlier[-1].reason()}. {plan}")

    def _label(self, index: int) -> str:
        return names.label_of(self._job.plan.processes[index].name)

    def _alive(self) -> str:
        return names.listed([self._label(index) for index in sorted(self._workers)])
