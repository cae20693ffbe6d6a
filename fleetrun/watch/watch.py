"""Samples the ranks periodically: which are stopped, which should have ended, whether all hang.

It costs a short read per rank in five seconds. Only `--hang_timeout` looks at all processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from fleetrun.model import LaunchPlan
from fleetrun.postmortem import stack_groups
from fleetrun.postmortem.stackdumps import Collection
from fleetrun.run import proc
from fleetrun.run.events import (
    Exited,
    Finished,
    Gathered,
    Happening,
    RunWarning,
    SignalAll,
    StacksRequested,
    Started,
)
from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Source
from fleetrun.run.policy import TEARDOWN_S
from fleetrun.run.proc import Io, Stat
from fleetrun.rundir import flightfile, heartbeat, names, reading, variables
from fleetrun.text import sentence
from fleetrun.watch import raised
from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.life import GpuLoad, IdleClock, Sample

if TYPE_CHECKING:
    # Only with --hang_timeout, or with other hosts.
    from fleetrun.session.driver import Session
    from fleetrun.watch.hang_judge import HangJudge

# What Paddle prints while ranks wait: for the server of its store, and of what is not done.
_WAITING = b"retry to connect", b"] find timeout ", b"] find last group comm task:"
# A rank that writes more than this between two looks is not waiting.
_MOST_READ = 65536


class _Rank:
    """A process that runs: its leader, its logs, its heartbeat and its record of collectives."""

    def __init__(self, plan: LaunchPlan, started: Started, since_ns: int) -> None:
        spec = plan.processes[started.process]
        self.pid, self.attempt = started.pid, started.attempt
        self._heartbeat = spec.env.get(variables.HEARTBEAT, "")
        self._ring = spec.env.get(variables.FLIGHT_RECORDER, "")
        self._since_ns = since_ns
        self._sizes = dict.fromkeys(names.log_paths(plan, spec, started.attempt), 0)
        # The bytes of log lines that only report waiting.
        self._idle_bytes = 0

    def signs(self, state: str) -> Sample:
        """Return its sample, without its processes."""
        beat = heartbeat.beat(self._heartbeat, self._since_ns)
        step = heartbeat.read(self._heartbeat) if beat else None
        is_scripts = beat > 0 and (step is None or step.is_scripts)
        for log, before in self._sizes.items():
            size = self._sizes[log] = reading.size(log)
            if before < size <= before + _MOST_READ and _only_waits(log, before, size):
                self._idle_bytes += size - before
        output = sum(self._sizes.values()) - self._idle_bytes
        return Sample(state, beat, is_scripts, output, flightfile.issued(self._ring))


class Watch(Source):
    """Watches the processes of JOB, and reports stopped ranks and hangs.

    This source may fail: a job that trains well is not ended because hangs are no longer noticed.
    """

    name = "watching the ranks"
    without = "without reporting stopped ranks"

    def __init__(
        self,
        job: ObservedJob,
        *,
        session: Session | None = None,
        gpus: Callable[[], Callable[[], IsolatedCall] | None] = lambda: None,
        driver_s: float = 10.0,
        pace_s: float = 5.0,
        window_s: float = 30.0,
    ) -> None:
        self._job = job
        # While a debugger holds a rank, the others wait for it.
        self._has_debugger = job.request.debug is not None
        self._timeout_s = 0.0 if self._has_debugger else job.plan.rules.hang_timeout_s
        if self._timeout_s:
            self.without = "without detecting hangs: --hang_timeout no longer has an effect"
        self._session = session
        self._gpus, self._driver_s = gpus, driver_s
        self._pace_s, self._window_s = pace_s, window_s
        self._judge: HangJudge | None = None
        self._records: FlightRecords | None = None
        self._ranks: dict[int, _Rank] = {}
        self._clock = IdleClock(self._timeout_s)
        # When the ranks were silent: their samples then, and what was missing.
        self._silent: tuple[Mapping[int, Sample], str] = {}, "life"
        self._question: IsolatedCall | None = None
        self._is_driver_stuck = False
        self._collection: Collection | None = None
        # Older heartbeats belong to an earlier attempt. Not the time when a rank's start is
        # handled: by then it may have sent its only heartbeat.
        self._since_ns = 0
        self._begin()

    def _begin(self) -> None:
        """Take over the processes of a generation."""
        self._labels = [names.label(spec) for spec in self._job.plan.processes]
        self._ask_gpus = self._gpus()
        # The sizes of records that report no exception, and signs of life of ranks that should end.
        self._without_report: dict[int, int] = {}
        self._exit_clock: IdleClock | None = None
        # When processes of this attempt exited with 0: any other exit ends it.
        self._ended: dict[int, float] = {}
        self._is_ending = self._has_said_ended = False
        self._stopped: frozenset[int] = frozenset()
        self._clock.revive(time.monotonic())

    # The supervisor's side ------------------------------------------------------------------------

    def open(self, waiting: Waiting) -> None:
        """Begin to look at the ranks, after a pause."""
        super().open(waiting)
        now = time.monotonic()
        waiting.timer("ranks", now + self._pace_s, self._look)
        if self._timeout_s or self._job.request.flight_recorder:
            period_s = min(self._timeout_s / 4 or self._pace_s, self._pace_s)
            self._records = FlightRecords(self._job, self._session)
            self._records.open(waiting, period_s=period_s, declare=self._declare)
        if self._timeout_s:
            from fleetrun.watch.hang_judge import HangJudge  # loads the session

            period_s = self._clock.period_s
            self._judge = HangJudge(
                self._job, self._session, period_s, records=self._records, declare=self._declare
            )
            waiting.timer("hang", now + min(period_s, self._pace_s), self._look_for_hang)

    def on_event(self, happening: Happening) -> None:
        """Track which processes run, and which were asked to end."""
        match happening:
            case Gathered(attempt=attempt) if attempt:
                self._begin()
                for part in (self._judge, self._records):
                    if part is not None:
                        part.restart()
                self._since_ns = heartbeat.file_clock_ns()
            case Started(process=process):
                self._is_ending = False
                self._ranks[process] = _Rank(self._job.plan, happening, self._since_ns)
            case Exited():
                self._forget(happening)
            case SignalAll() if happening.ends_ranks and not self._is_ending:
                if self._records is not None:
                    # Before the coordinator's host hears that this one ended.
                    self._records.send()
                self.close()
            case Finished():
                self.close()
            case StacksRequested():
                self._collect("fleetrun was asked for its stack", self._say_where)
            case _:
                pass

    def _forget(self, exited: Exited) -> None:
        self._ranks.pop(exited.process, None)
        if not exited.status.exit_code:
            self._ended[exited.process] = exited.at
        if not self._ranks and not self._is_ending and self._records is not None:
            # Others may fail because these have ended.
            self._records.send()
            # A device may pair calls that differ, so that the job goes on.
            self._records.look()

    def close(self) -> None:
        """Ask and report nothing more."""
        self._is_ending = True
        if self._judge is not None:
            self._judge.restart()
        if self._question is not None:
            question, self._question = self._question, None
            how = question.abandon()
            if question.is_left:
                self._job.log(f"The NVIDIA driver does not answer ({how}).")
        if self._collection is not None:
            self._collection.cancel()
            self._collection = None

    def _notice(self, kind: str, text: str, processes: Sequence[int]) -> None:
        self._job.log(sentence(text))
        labels = tuple(self._labels[process] for process in processes)
        self._declare(RunWarning(kind, text, time.monotonic(), labels))

    # Ranks that are stopped, have ended, or should have ------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        self._waiting.timer("ranks", now + self._pace_s, self._look)
        if self._is_ending:
            return
        self._end_overdue(is_silent=False)
        stats = {process: proc.stat(rank.pid) for process, rank in self._ranks.items()}
        self._report_stopped({process: stat.state for process, stat in stats.items() if stat})
        self._report_ended(now)

    def _report_stopped(self, states: Mapping[int, str]) -> None:
        """Report once that a process is stopped, and once that it continues."""
        stopped = frozenset(process for process, state in states.items() if state in "Tt")
        for process in sorted(stopped - self._stopped):
            pid = self._ranks[process].pid
            why = f"is stopped (T); `kill -CONT {pid}` lets it go on"
            why = "is held by a debugger (t)" if states[process] == "t" else why
            self._notice("stopped", f"{self._labels[process]}, pid {pid}, {why}.", (process,))
        for process in sorted((self._stopped - stopped) & self._ranks.keys()):
            self._notice("continued", f"{self._labels[process]} goes on.", (process,))
        self._stopped = stopped

    def _report_ended(self, now: float) -> None:
        """Report once that ranks ended a while ago, and that others still run."""
        trainers = self._job.plan.trainers.values()
        ended = {process: at for process, at in self._ended.items() if process in trainers}
        first = min(ended.values(), default=now)
        if self._has_debugger or self._has_said_ended or now - first < self._window_s:
            return
        self._has_said_ended = True
        running = [self._labels[process] for process in self._ranks if process in trainers]
        who = names.listed([self._labels[process] for process in ended])
        others = names.listed(running) if running else "ranks on other hosts"
        at = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - first)))
        text = (
            f"{who} exited with 0{', the first' if len(ended) > 1 else ''} at {at}, and {others} "
            f"still {'runs' if len(running) == 1 else 'run'} {now - first:.0f} s later: do they "
            f"wait for {'them' if len(ended) > 1 else 'it'}?"
        )
        self._notice("ended early", text, sorted(ended))

    def _end_overdue(self, *, is_silent: bool) -> None:
        """Declare the failure of a rank that has raised and does not end, if there is one.

        An exit handler may work as long as it likes. One that shows no other activity than
        processor time has what it has when another rank fails, unless the job IS_SILENT anyway.
        """
        if self._is_ending or self._has_debugger:
            return
        running = {process: (rank.pid, rank.attempt) for process, rank in self._ranks.items()}
        reports = raised.find(self._job.plan, running, self._without_report, with_exits=is_silent)
        if not reports:
            self._exit_clock = None
        elif is_silent or self._is_still(reports):
            self._declare(raised.failure(self._job, running, reports))

    def _is_still(self, processes: Container[int]) -> bool:
        """Whether PROCESSES, which should end, have shown no activity for the time they have."""
        allowed_s = max(self._job.plan.rules.grace_s, TEARDOWN_S)
        if self._exit_clock is None:
            self._exit_clock = IdleClock(allowed_s)
        clock, now = self._exit_clock, time.monotonic()
        at = now + clock.period_s
        self._waiting.timer("overdue", at, lambda: self._end_overdue(is_silent=False))
        # Whatever the script has reported, no update follows.
        samples = {n: sample._replace(beat=0) for n, sample in self._sample(processes).items()}
        clock.see(samples, now)
        return clock.still_s(now) >= allowed_s

    # Hangs ----------------------------------------------------------------------------------------

    def _families(self) -> dict[int, list[Stat]]:
        """Return the processes of each rank: its leader and all below it."""
        leaders = {rank.pid: process for process, rank in self._ranks.items()}
        families = proc.families(proc.all_processes(), leaders)
        return {leaders[pid]: family for pid, family in families.items()}

    def _sample(self, processes: Container[int] | None = None) -> dict[int, Sample]:
        """Return a sample of each rank, or of those of PROCESSES."""
        return {
            process: _with_family(self._ranks[process], family)
            for process, family in self._families().items()
            if (processes is None or process in processes) and family
        }

    def _look_for_hang(self) -> None:
        now, clock = time.monotonic(), self._clock
        self._waiting.timer("hang", now + clock.period_s, self._look_for_hang)
        if self._question is not None or self._collection is not None:
            clock.ignore(now)
            return
        if self._is_ending or not self._ranks:
            clock.revive(now)
            if not self._is_ending:
                self._report_silence(None)
            return
        samples = self._sample()
        self._report_stopped({process: sample.state for process, sample in samples.items()})
        clock.see(samples, now)
        if clock.is_hung(now):
            sign = "stacks" if clock.is_still else "steps" if clock.has_beats else "life"
            self._unless_a_gpu_works(lambda: self._suspect(samples, sign, clock.silent_s(now)))
            return
        self._report_silence(0.0)
        if clock.wants_stacks(now):
            self._unless_a_gpu_works(self._compare_stacks)

    def _suspect(self, samples: Mapping[int, Sample], sign: str, silent_s: float) -> None:
        """Report that the ranks here are silent, unless one has raised and should have ended."""
        self._silent = samples, sign
        self._end_overdue(is_silent=True)
        if not self._ranks or self._is_ending or self._judge is None:
            return
        if self._judge.has_reported:
            self._report_silence(silent_s)
            return

        def reported(texts: dict[int, str]) -> None:
            process = self._gone_on()
            if process is None:
                stacks = {index: stack_groups.main_thread(text) for index, text in texts.items()}
                self._report_silence(silent_s, stacks)
                return
            text = (
                f"nothing had happened for {silent_s:.0f} s, but {self._labels[process]} went "
                f"on just now; the stacks are in {self._stacks_of(tuple(texts))}."
            )
            self._notice("went on", text, (process,))
            self._clock.revive(time.monotonic())

        self._collect(f"nothing has happened for {silent_s:.0f} s", reported)

    def _report_silence(
        self,
        silent_s: float | None,
        stacks: Mapping[int, Sequence[tuple[str, str, int]]] = MappingProxyType({}),
    ) -> None:
        if self._judge is not None:
            self._judge.report(silent_s, stacks, sign=self._silent[1], ended=self._ended)

    def _compare_stacks(self) -> None:
        """Take the stacks of all ranks now, and let the clock compare them."""

        def done(texts: dict[int, str]) -> None:
            self._collection = None
            if texts.keys() == self._ranks.keys():
                seen = [stack_groups.of_processes(text) for text in texts.values()]
                stacks = {pid: stack for by_pid in seen for pid, stack in by_pid.items()}
                self._clock.see_stacks(stacks, time.monotonic())

        self._take_stacks(done)

    def _unless_a_gpu_works(self, then: Callable[[], None]) -> None:
        """Call THEN unless the ranks have a GPU that works; the driver may be what hangs."""
        if self._clock.has_promises or self._ask_gpus is None or self._is_driver_stuck:
            then()
            return
        try:
            question = self._question = self._ask_gpus()
        except OSError as error:
            self._job.log(f"Whether a GPU computes cannot be determined ({error.strerror}).")
            then()
            return

        def answered(answer: CallResult) -> None:
            self._question = None
            if answer.is_late:
                self._is_driver_stuck = True
                self._job.log(f"Whether a GPU computes is not known: {answer.trouble}.")
            reported = cast("Mapping[str, tuple[int, int, int]]", answer.value or {})
            loads = {uuid: GpuLoad(*load) for uuid, load in reported.items()}
            if not answer.is_late and self._clock.see_gpus(loads, time.monotonic()):
                self._report_silence(0.0)
            else:
                then()

        question.watch(self._waiting, answered, self._driver_s, callee="the NVIDIA driver")

    def _gone_on(self) -> int | None:
        """Return a process that has shown a sign of life since all were silent, if any."""
        for process, rank in self._ranks.items():
            now, past = rank.signs(""), self._silent[0].get(process)
            if past is None or now.beat != past.beat:
                return process
            has_called = now.calls != past.calls and not (now.beat and now.is_scripts)
            if has_called or (now.output != past.output and not now.beat):
                return process
        return None

    # Stacks ---------------------------------------------------------------------------------------

    def _take_stacks(self, done: Callable[[dict[int, str]], None]) -> None:
        if self._collection is not None:
            # Each rank answers one question at a time.
            self._waiting.timer(
                ("stacks", done), time.monotonic() + 0.1, lambda: self._take_stacks(done)
            )
        elif self._ranks:
            pids = {process: rank.pid for process, rank in sorted(self._ranks.items())}
            self._collection = Collection(pids, self._waiting, done)
            self._collection.begin()

    def _collect(self, reason: str, then: Callable[[dict[int, str]], None]) -> None:
        """Write all stacks to files, with their REASON, and call THEN with them."""

        def done(texts: dict[int, str]) -> None:
            self._collection = None
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            for process, text in texts.items():
                head = f"# {when} {self._labels[process]}: {reason}\n"
                try:
                    self._job.folder.add(self._stacks_name(process), f"{head}{text}\n")
                except OSError as error:
                    self._job.log(f"Stacks cannot be written ({error.strerror}).")
                    break
            then(texts)

        self._take_stacks(done)

    def _say_where(self, texts: dict[int, str]) -> None:
        where = self._stacks_of(tuple(texts))
        self._notice("stacks", f"the stacks of {len(texts)} processes are in {where}.", ())

    def _stacks_name(self, process: int) -> str:
        spec = self._job.plan.processes[process]
        return names.stacks(str(process) if spec.rank is None else names.rank_name(spec.rank))

    def _stacks_of(self, processes: tuple[int, ...]) -> str:
        """Name the files as a shell would."""
        name = self._stacks_name(processes[0]) if len(processes) == 1 else names.stacks("*")
        return names.run_path(self._job.plan, name)


def _with_family(rank: _Rank, family: Sequence[Stat]) -> Sample:
    """Return the sample of RANK, whose processes are FAMILY, the leader first."""
    pids = [member.pid for member in family]
    totals = [total for total in map(proc.io, pids) if total is not None]
    leader = next((member for member in family if member.pid == rank.pid), family[0])
    return rank.signs(leader.state)._replace(
        cpu_s={member.pid: member.cpu_s for member in family},
        reaped_s=sum(member.reaped_s for member in family),
        io=Io(*map(sum, zip(*totals, strict=True))) if totals else Io(0, 0, 0),
        faults=sum(member.faults for member in family),
        is_at_prompt=any(map(proc.reads_terminal, pids)),
    )


def _only_waits(log: str, begin: int, end: int) -> bool:
    """Whether LOG from BEGIN to END only reports waiting for a connection."""
    written = [line for line in reading.piece(log, begin, end - begin).splitlines() if line.strip()]
    return bool(written) and all(any(mark in line.lower() for mark in _WAITING) for line in written)
