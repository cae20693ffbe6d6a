"""The supervisor: performs the policy's actions and notifies the observers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

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
    Finish,
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
    SourceFailed,
    Spawn,
    StacksRequested,
    Started,
    StrategyReport,
    Sweep,
    TimerExpired,
    assert_never,
    signal_name,
)
from fleetrun.run.gathering import Gathering, Round
from fleetrun.run.keeper import REQUESTS
from fleetrun.run.loop import Loop, poll
from fleetrun.run.observers import ObservedJob, Observers
from fleetrun.rundir import names, variables

if TYPE_CHECKING:
    from fleetrun.postmortem.investigation import Investigation

# After this many seconds of waiting for ranks to end, print which ones.
_SILENCE_S = 1.0
# Requests to end: the rank gets them before what it has started.
_POLITE = frozenset((policy.HUP, policy.INT, policy.TERM))
# A killed descendant that still exists after this waits for a device.
_SWEEP_S = 5.0
# Orphans are reaped this long after SIGCHLD, when the exits of ranks have been handled.
_ORPHANS_S = 0.1
# How often to check whether the processes that a rank has left in its group are gone.
_GROUP_S = 0.02


class Supervisor:
    """Runs JOB to its end, one generation after the other, with the plans of GATHERING."""

    def __init__(self, gathering: Gathering, job: ObservedJob) -> None:
        self._gathering = gathering
        gathering.prepare, gathering.withdraw = self._prepare, self._withdraw
        # The plan that is ready to start.
        self._prepared: LaunchPlan | None = None
        assert job.keeper is not None
        self._job, self._keeper, self._log = job, job.keeper, job.log
        # Signals that the terminal has also sent to the process that reads it.
        self._typed: set[int] = set()
        self._is_over = False
        self._observers = Observers(job, self._declare)
        # Of the current generation.
        self._plan: LaunchPlan
        self._has_plan = False
        self._labels: list[str] = []
        self._state = policy.Policy()
        self._why_no_plan: Exception | None = None
        self._todo: list[Action] = []
        self._is_performing = False
        self._workers: dict[int, processes.Worker] = {}
        self._base_env = dict(os.environb)
        self._marker = ""
        self._outcome: Outcome | None = None
        self._in_a_hurry = False
        # When the attempt before this one failed or was asked to end.
        self._failed_at: float | None = None

    def run(self) -> Outcome:
        """Start everything, supervise it, and return when no process of the job is left.

        Raises FleetrunError if nothing can be started.
        """
        self._keeper.leave(has_terminal=terminal.is_own())
        self._loop = Loop()
        self._child_fd, wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            return self._supervise()
        finally:
            # No process is left now, unless this launcher itself has failed.
            self._sweep()
            self._loop.close()
            self._keeper.release()

    def _supervise(self) -> Outcome:
        began = time.monotonic()
        self._loop.watch(self._keeper.fd, lambda: self._take(self._keeper.read()))
        self._loop.watch(self._child_fd, self._on_child)
        self._todo += self._state.begin()
        self._perform_all()
        while not self._has_plan and self._outcome is None:
            self._loop.turn()
        if self._why_no_plan is not None and not self._has_plan:
            raise self._why_no_plan
        self._baseline = kernelfacts.baseline(began)
        while self._outcome is None:
            self._loop.turn()
        self._is_over = True
        ended_at = time.monotonic()
        self._observers.on_event(Finished(self._outcome, ended_at))
        # The last output of the ranks comes before the launcher's last lines.
        self._deliver()
        if self._outcome.cause is not None:
            self._explain_end(self._outcome)
        elif self._outcome.earlier:
            # It says what the attempts before have failed of.
            self._investigate(self._outcome)
        closing = self._job.closing(self._outcome, ended_at) if self._has_plan else ""
        for line in closing.splitlines():
            self._log(line)
            self._deliver()
        self._observers.close()
        return self._outcome

    # Generations --------------------------------------------------------------------------------

    def _gather(self, attempt: int) -> None:
        """Gather the plan of ATTEMPT, which may take long."""

        def answered(planned: LaunchPlan | Exception) -> None:
            self._feed(self._gathered(attempt, planned))

        self._round = Round(
            *(self._gathering, attempt, self._loop, answered),
            log=self._log,
            progress=self._job.progress,
        )

    def _prepare(self, planned: LaunchPlan, attempt: int) -> None:
        """Prepare everything that the ranks of a generation need; FleetrunError if that fails."""
        if not self._has_plan:
            self._withdraw()
        try:
            self._stdin = self._job.stdin(planned)
            if not self._has_plan:
                # What all generations share: the folder, the marker, the observers.
                if not os.path.samefile(planned.cwd, "."):
                    os.chdir(planned.cwd)
                own = planned.processes[0].env.get(variables.JOB) if planned.processes else None
                run = os.path.basename(planned.run_dir)
                self._marker = own or f"{run}-{self._keeper.pid}"
                self._observers.prepare(planned)
            processes.claim(planned, attempt, self._job.folder)
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
        if not self._has_plan:
            self._observers.withdraw()

    def _gathered(self, attempt: int, planned: LaunchPlan | Exception) -> Gathered | GatherFailed:
        """Adopt the prepared plan: everything that depends on a plan is created again."""
        if not isinstance(planned, Exception):
            try:
                if planned is not self._prepared:
                    self._prepare(planned, attempt)
            except FleetrunError as error:
                planned = error
        if isinstance(planned, Exception):
            self._why_no_plan = planned
            code, why = 1, repr(planned)
            if isinstance(planned, FleetrunError):
                code, why = planned.exit_code, str(planned)
            return GatherFailed(attempt, why, code, time.monotonic())
        self._plan, self._has_plan = planned, True
        self._labels = [names.label_of(spec.name) for spec in planned.processes]
        self._keeper.set_grace(planned.rules.grace_s)
        return Gathered(attempt, planned, time.monotonic())

    # The end ------------------------------------------------------------------------------------

    def _explain_end(self, outcome: Outcome) -> None:
        """Print what went wrong, and the processes that SIGKILL did not end."""
        from fleetrun.postmortem import report  # only after a failure

        shown = frozenset(i for i in range(len(self._labels)) if self._observers.shows(i))
        findings = self._investigate(outcome)
        self._job.show(report.verdict(outcome, findings, self._labels, shown))
        for index in outcome.stuck:
            if (survivor := self._workers.get(index)) is not None:
                name = f"{self._labels[index]}, pid {survivor.pid}"
                self._log(f"{name}, is still there: {proc.state_of(survivor.pid)}.")
        self._deliver()

    def _investigate(self, outcome: Outcome) -> Investigation:
        """Investigate what happened, and write it to report.json."""
        from fleetrun.postmortem import investigation  # only after a failure

        result = investigation.Investigation()
        if not self._has_plan:
            return result
        try:
            result = investigation.investigate(self._plan, outcome, self._baseline)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever /proc holds
            self._log(f"The cause could not be examined ({error!r}).")
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
                    self._signal_all(signal.SIGCONT)
                case signal.SIGKILL:
                    self._on_loss()
                case _ if signum in REQUESTS:
                    (self._typed.add if is_typed else self._typed.discard)(signum)
                    self._on_request(signum)
        if stops:
            self._pause(stops[0])

    def _on_loss(self) -> None:
        """End the job, as the keeper was killed; nobody reads what we print any more."""
        self._loop.unwatch(self._keeper.fd)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(null, fd)
        os.close(null)
        self._on_request(signal.SIGKILL)

    def _on_child(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._child_fd, 4096)
        self._loop.timer("orphans", time.monotonic() + _ORPHANS_S, self._reap_orphans)

    def _reap_orphans(self) -> None:
        children.reap_orphans({rank.pid for rank in self._workers.values()})

    def _on_request(self, signum: int) -> None:
        """Handle a signal that is a request to the launcher."""
        if self._outcome is not None:
            self._in_a_hurry = signum not in policy.FORWARDED
        else:
            self._feed(Interrupted(signum, time.monotonic()))

    def _pause(self, signum: int) -> None:
        """Stop all processes and this one, and so the keeper, until SIGCONT."""
        is_foreground = terminal.is_foreground(self._keeper.group)
        if signum == signal.SIGTTIN and is_foreground:
            # `fg` was faster.
            return
        if self._gathering.is_shared:
            self._log(
                "Ctrl-Z has no effect in a job on several hosts: the others would consider this "
                "one lost. Ctrl-C ends the job."
            )
            return
        if is_foreground and not terminal.has_shell(self._keeper.pid):
            self._log("Ctrl-Z has no effect: no shell could continue the job. Ctrl-C ends it.")
            # The terminal has stopped those of its foreground group that do not handle it.
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
            ended.ask_again()
            at = time.monotonic() + _GROUP_S
            self._loop.timer(("group", ended.index), at, partial(self._on_exit, ended))
            return
        ended.reap()
        at = time.monotonic()
        exited = Exited(
            *(ended.index, self._labels[ended.index], status, at, ended.pid, ended.attempt),
            peak_bytes=ended.peak_bytes,
            has_core=ended.has_core,
            lived_s=at - ended.started_at,
        )
        del self._workers[ended.index]
        if status.exit_code and self._state.phase == policy.RUNNING:
            exited = self._with_circumstances(exited)
        self._feed(exited)

    def _with_circumstances(self, exited: Exited) -> Exited:
        """Add the others that have failed by now; the rest is examined when all have ended."""
        by_pidfd = {peer.pidfd: index for index, peer in self._workers.items()}
        ended = {by_pidfd[fd] for fd in poll(0.0, *by_pidfd)}
        raised = (i for i in self._workers if failures.has_failed(self._plan, i, exited))
        return exited._replace(also_failed=frozenset((*ended, *raised)))

    def _examine(self, exits: tuple[Exited, ...]) -> RootCauses:
        try:
            exits = failures.examine(self._plan, exits)
        except Exception as error:  # noqa: BLE001 - the verdict must come, whatever a file holds
            self._log(f"The cause could not be examined ({error!r}).")
        return RootCauses(exits, time.monotonic())

    def _declare(self, happening: Declared) -> None:
        """Notify the observers of what a source declares, and act on it."""
        if isinstance(happening, RunWarning | StrategyReport):
            self._observers.on_event(happening)
        elif self._is_over:
            if isinstance(happening, SourceFailed) and happening.is_required:
                self._log(f"{happening.describe()}.")
        else:
            self._feed(happening)

    def _feed(self, event: Event) -> None:
        state = self._state
        phase, attempt, deadline = state.phase, state.attempt, state.deadline
        self._todo += state.step(event)
        if phase == policy.RUNNING != state.phase:
            self._failed_at = event.at
        if state.is_resting and state.attempt != attempt:
            self._log_next_attempt(event.at)
        if phase == policy.GATHERING != state.phase:
            self._round.end()
        if state.deadline != deadline:
            self._loop.timer(
                "policy", state.deadline, lambda: self._feed(TimerExpired(time.monotonic()))
            )
        if isinstance(event, Gathered):
            # In the first generation; later ones find them open.
            self._observers.open(self._loop)
        self._observers.on_event(event)
        if isinstance(event, Started) and event.process + 1 == state.total:
            self._recover(event.attempt, event.at)
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
            case Spawn(process=process, attempt=attempt):
                self._feed(self._spawn(process, attempt))
            case SignalAll(signum=signum, spared=spared):
                self._signal_all(signum, spared)
                self._observers.on_event(action)
                self._explain(signum)
            case Examine(exits=exits):
                self._feed(self._examine(exits))
            case HostStopped():
                self._observers.on_event(action)
            case Sweep():
                self._sweep()
            case Finish(outcome=outcome):
                self._outcome = outcome
            case _:  # pragma: no cover - there are no others
                assert_never(action)

    def _sweep(self) -> None:
        """Kill everything that has outlived its rank, except ranks themselves and our helpers."""
        ranks = {rank.pid for rank in self._workers.values()}
        helpers = {pid for pid in children.pids() if self._is_helper(pid)}
        children.sweep(helpers | ranks, stuck_s=_SWEEP_S)

    def _is_helper(self, pid: int) -> bool:
        """Whether the child PID does not belong to the job, but asks a driver or measures it.

        Those stay in our session; of the job, only who reads the terminal is in the same one.
        """
        try:
            is_near = os.getsid(pid) == os.getsid(0) and os.getpgid(pid) != self._keeper.group
        except ProcessLookupError:
            return False
        marker = f"\0{variables.JOB}={self._marker}\0".encode()
        return is_near and marker not in b"\0" + proc.content(f"/proc/{pid}/environ")

    def _spawn(self, index: int, attempt: int) -> Started | Exited:
        spec = self._plan.processes[index]
        has_stdin = index == self._stdin.process
        group = self._keeper.group
        has_terminal = has_stdin and self._stdin.is_terminal and terminal.is_foreground(group)
        started = processes.spawn(
            spec,
            index=index,
            attempt=attempt,
            env=processes.environment(self._base_env, spec, self._marker),
            logs=names.log_paths(self._plan, spec, attempt),
            folder=self._job.folder,
            default_signals=self._keeper.default_signals,
            # In a session of its own it could not read a terminal.
            takes_stdin=has_terminal or (has_stdin and not self._stdin.is_terminal),
            terminal_group=group if has_terminal else None,
        )
        now = time.monotonic()
        if isinstance(started, processes.SpawnRefusal):
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
        for rank in self._workers.values():
            if rank.index in spared or (rank.has_terminal and signum in self._typed):
                continue
            if signum in policy.FORWARDED:
                rank.notify(signum)
            elif signum in _POLITE:
                rank.ask(signum)
            else:
                rank.signal(signum)

    def _explain(self, signum: int) -> None:
        """Print what the launcher waits for."""
        interrupted = self._state.interrupted
        if signum == signal.SIGKILL:
            self._log(f"Killing {names.listed(self._alive())}.")
        elif interrupted is not None and interrupted == self._state.cause:
            are = "it is" if len(self._workers) == 1 else "they are"
            self._log(
                f"{signal_name(signum)}: asked {names.listed(self._alive())} to stop; "
                f"in {self._state.rules.grace_s:g} s, or when asked again, {are} killed."
            )
        elif self._state.phase == policy.STOPPING:
            self._loop.timer("wait", time.monotonic() + _SILENCE_S, self._show_late)

    def _log_next_attempt(self, at: float) -> None:
        # What ranks have printed because another one failed is not the last word.
        self._observers.flush()
        wait = (self._state.deadline or at) - at
        when = f" in {wait:.1f} s" if round(wait, 1) else ""
        plan = f"Restart {self._state.attempt} of {self._state.rules.max_restarts}{when}."
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
            self._job.progress(f"{why}Waiting up to {left:.0f} s for {late} to end.")

    def _alive(self) -> list[str]:
        return [self._labels[index] for index in sorted(self._workers)]
