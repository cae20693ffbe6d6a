"""Samples the ranks periodically: which are stopped, which should have ended, whether all hang.

It costs a short read per rank in five seconds. Only `--hang_timeout` looks at all processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from fleetrun.model import ExitStatus, LaunchPlan
from fleetrun.postmortem import failures, stack_groups
from fleetrun.postmortem.stackdumps import Collection
from fleetrun.run import proc
from fleetrun.run.events import (
    Exited,
    Finished,
    Gathered,
    Happening,
    Overdue,
    RunWarning,
    SignalAll,
    StacksRequested,
    Started,
)
from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Source
from fleetrun.run.proc import Stat
from fleetrun.rundir import flightfile, heartbeat, names, reading, variables
from fleetrun.rundir.rankfile import ErrorReport
from fleetrun.text import counted, sentence
from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.silence import Sample, SilenceClock, works

if TYPE_CHECKING:
    # Only with --hang_timeout, or with other hosts.
    from fleetrun.session.driver import Session
    from fleetrun.watch.hang_judge import HangJudge

# A rank that has raised may take this long to end, or the grace if that is longer.
_TEARDOWN_S = 3.0


class _Rank:
    """A process that runs: its leader, its logs, its heartbeat and its record of collectives."""

    def __init__(self, plan: LaunchPlan, started: Started, since_ns: int) -> None:
        spec = plan.processes[started.process]
        self.pid, self.attempt = started.pid, started.attempt
        self._heartbeat = spec.env.get(variables.HEARTBEAT, "")
        self._ring = spec.env.get(variables.FLIGHT_RECORDER, "")
        self._since_ns = since_ns
        self._logs = names.log_paths(plan, spec, started.attempt)

    def sample(self, family: Sequence[Stat]) -> Sample:
        """Return its sample; FAMILY are its processes."""
        totals = [total for total in (proc.io(member.pid) for member in family) if total]
        return Sample(
            beat=heartbeat.beat(self._heartbeat, self._since_ns),
            output=sum(map(reading.size, self._logs)),
            calls=flightfile.issued(self._ring),
            written=sum(written for written, _ in totals),
            fetched=sum(fetched for _, fetched in totals),
            cpu_s=sum(member.cpu_s for member in family),
            programs=_programs(family),
            is_held=any(it.pid == self.pid and it.state in "Tt" for it in family)
            or any(proc.reads_terminal(member.pid) for member in family),
        )


def _programs(family: Sequence[Stat]) -> dict[int, float]:
    """Return processor times of those of FAMILY that a Python has started and that are none."""
    pythons = {member.pid for member in family if proc.is_python(member.pid)}
    programs: dict[int, float] = {}
    for member in family:
        if member.pid not in pythons and (member.parent in pythons or member.parent in programs):
            programs[member.pid] = member.cpu_s
    return programs


class Watch(Source):
    """Watches the processes of JOB, and reports stopped ranks and hangs.

    This source may fail: a job that trains well is not ended because hangs are no longer noticed.
    """

    name = "watching the ranks"

    def __init__(
        self,
        job: ObservedJob,
        *,
        session: Session | None = None,
        records: FlightRecords | None = None,
        gpus: Callable[[], Callable[[], object] | None] = lambda: None,
        driver_s: float = 10.0,
        pace_s: float = 5.0,
    ) -> None:
        self._job, self._session, self._records = job, session, records
        self._timeout_s = job.plan.rules.hang_timeout_s
        self._gpus, self._driver_s, self._pace_s = gpus, driver_s, pace_s
        self._judge: HangJudge | None = None
        self._ranks: dict[int, _Rank] = {}
        self._silence = SilenceClock(self._timeout_s)
        self._abandon: Callable[[], object] | None = None
        self._is_driver_stuck = False
        self._collection: Collection | None = None
        # Older heartbeats belong to an earlier attempt. Not the time when a rank's start is
        # handled: by then it may have sent its only heartbeat.
        self._since_ns = 0
        self._begin()

    def _begin(self) -> None:
        """Take over the processes of a generation."""
        self._labels = [names.label_of(spec.name) for spec in self._job.plan.processes]
        self._ask_gpus = self._gpus()
        # The signs of life of ranks that should end.
        self._overdue: SilenceClock | None = None
        self._stopped: frozenset[int] = frozenset()
        self._is_ending = False
        self._silence.end(time.monotonic())

    # The supervisor's side ------------------------------------------------------------------------

    def open(self, waiting: Waiting) -> None:
        """Begin to look at the ranks, after a pause."""
        super().open(waiting)
        now = time.monotonic()
        waiting.timer("ranks", now + self._pace_s, self._look)
        if self._records is not None and self._timeout_s:
            from fleetrun.watch.hang_judge import HangJudge  # loads the session

            self._judge = HangJudge(self._job, self._session, self._records, self.declare)
            waiting.timer("hang", now + self._silence.period_s, self._look_for_hang)

    def on_event(self, happening: Happening) -> None:
        """Track which processes run, and which were asked to end."""
        match happening:
            case Gathered(attempt=attempt) if attempt:
                self.close()
                self._begin()
                # CLOCK_REALTIME_COARSE dates files; `time.time()` may be ahead of it.
                self._since_ns = time.clock_gettime_ns(5)
            case Started(process=process):
                self._is_ending = False
                self._ranks[process] = _Rank(self._job.plan, happening, self._since_ns)
            case Exited(process=process):
                self._ranks.pop(process, None)
            case SignalAll(ends_ranks=True) | Finished():
                self.close()
            case StacksRequested():
                self._take_stacks(self._answer)

    def close(self) -> None:
        """Ask and report nothing more."""
        self._is_ending = True
        if self._judge is not None:
            self._judge.restart()
        if self._abandon is not None:
            self._abandon()
            self._abandon = None
        if self._collection is not None:
            self._collection.cancel()
            self._collection = None

    def _notice(self, kind: str, text: str, *processes: int) -> None:
        self._job.log(sentence(text))
        labels = tuple(self._labels[process] for process in processes)
        self.declare(RunWarning(kind, text, time.monotonic(), labels))

    # Ranks that are stopped, or should have ended -------------------------------------------------

    def _look(self) -> None:
        self._waiting.timer("ranks", time.monotonic() + self._pace_s, self._look)
        if not self._is_ending:
            self._end_overdue(is_silent=False)
            self._report_stopped()

    def _report_stopped(self) -> None:
        """Report once that a process is stopped, and once that it continues."""
        stats = {process: proc.stat(rank.pid) for process, rank in self._ranks.items()}
        states = {process: stat.state for process, stat in stats.items() if stat is not None}
        stopped = frozenset(process for process, state in states.items() if state in "Tt")
        for process in sorted(stopped - self._stopped):
            pid = self._ranks[process].pid
            why = f"is stopped (T); `kill -CONT {pid}` lets it go on"
            why = "is held by a debugger (t)" if states[process] == "t" else why
            self._notice("stopped", f"{self._labels[process]}, pid {pid}, {why}.", process)
        for process in sorted((self._stopped - stopped) & self._ranks.keys()):
            self._notice("continued", f"{self._labels[process]} goes on.", process)
        self._stopped = stopped

    def _end_overdue(self, *, is_silent: bool) -> None:
        """Declare the failure of a rank that has raised and does not end, if there is one.

        An exit handler may work as long as it likes. One that shows no other activity than
        processor time has what it has when another rank fails, unless the job IS_SILENT anyway.
        """
        if self._is_ending:
            return
        reports = {
            process: report
            for process in self._ranks
            if (report := failures.raised(self._job.plan.processes[process])) is not None
            # Else its user looks at the exception with a debugger.
            and not proc.reads_terminal(report.pid or 0)
        }
        # A failing sys.exit alone: the script's `finally` may be at work.
        is_due = is_silent or any(report.code is None for report in reports.values())
        if not (reports and is_due):
            self._overdue = None
        elif is_silent or self._is_still(reports):
            self._declare_overdue(reports)

    def _is_still(self, processes: Container[int]) -> bool:
        """Whether PROCESSES, which should end, have shown no activity for the time they have."""
        if self._overdue is None:
            self._overdue = SilenceClock(max(self._job.plan.rules.grace_s, _TEARDOWN_S))
        silence, now = self._overdue, time.monotonic()
        at = now + silence.period_s
        self._waiting.timer("overdue", at, lambda: self._end_overdue(is_silent=False))
        samples = {
            # Whatever the script has reported, no update follows; and waiting may be busy.
            process: sample._replace(beat=0, cpu_s=0.0)
            for process, sample in self._sample().items()
            if process in processes
        }
        silence.see(samples, now)
        return silence.is_hang(now)

    def _declare_overdue(self, reports: Mapping[int, ErrorReport]) -> None:
        """Declare the failure of the first of REPORTS as the exit that it announces."""
        now = time.monotonic()
        at, process = min((failures.moment(it, now), process) for process, it in reports.items())
        report, label, rank = reports[process], self._labels[process], self._ranks[process]
        what = f"raised {report.class_ or 'an exception'}"
        if report.code is not None:
            what = f"called sys.exit({report.code})"
        self._job.log(
            f"{sentence(label)} {what} {now - at:.0f} s ago and has not ended; the job ends."
        )
        status = ExitStatus(code=report.code or 1)
        exited = Exited(
            *(process, label, status, now, rank.pid, rank.attempt),
            also_failed=frozenset(reports),
            failed_at=at,
            raised=status.exit_code,
        )
        self.declare(Overdue(exited, exited.at))

    # Hangs ----------------------------------------------------------------------------------------

    def _sample(self) -> dict[int, Sample]:
        """Return a sample of each rank: its leader and all processes below it."""
        leaders = {rank.pid: rank for rank in self._ranks.values()}
        families = proc.families(proc.all_processes(), leaders)
        return {
            process: rank.sample(families[rank.pid])
            for process, rank in self._ranks.items()
            if families[rank.pid]
        }

    def _look_for_hang(self) -> None:
        now, silence = time.monotonic(), self._silence
        self._waiting.timer("hang", now + silence.period_s, self._look_for_hang)
        if self._abandon is not None or self._collection is not None:
            silence.ignore(now)
        elif self._is_ending or not self._ranks:
            silence.end(now)
            if not self._is_ending:
                self._report(None)
        else:
            self._report_stopped()
            silence.see(self._sample(), now)
            if silence.is_hang(now):
                self._unless_a_gpu_works(self._suspect)
            else:
                self._report(0.0)

    def _suspect(self) -> None:
        """Report that the ranks here are silent, unless one has raised and should have ended."""
        seconds = self._silence.seconds(time.monotonic())
        self._end_overdue(is_silent=True)
        if not self._ranks or self._is_ending or self._judge is None:
            return
        if self._judge.has_reported:
            self._report(seconds)
            return

        def taken(texts: dict[int, str]) -> None:
            now = time.monotonic()
            self._silence.see(self._sample(), now)
            stacks = [stack_groups.of_processes(text) for text in texts.values()]
            if self._silence.is_hang(now) and self._silence.still(stacks, now):
                self._write_stacks(f"nothing has happened for {seconds:.0f} s", texts)
                self._report(seconds, {n: stack_groups.main_thread(it) for n, it in texts.items()})

        self._take_stacks(taken)

    def _report(
        self,
        seconds: float | None,
        stacks: Mapping[int, Sequence[tuple[str, str, int]]] | None = None,
    ) -> None:
        if self._judge is not None:
            self._judge.report(seconds, stacks or {})

    def _unless_a_gpu_works(self, then: Callable[[], None]) -> None:
        """Call THEN unless the ranks have a GPU that works; the driver may be what hangs."""
        if self._ask_gpus is None or self._is_driver_stuck:
            then()
            return

        def answered(answer: CallResult) -> None:
            self._abandon = None
            if answer.is_late:
                self._is_driver_stuck = True
                self._job.log(f"Whether a GPU computes is not known: {answer.trouble}.")
            rates = cast("list[tuple[int, int]]", answer.value or [])
            if any(works(kernels, memory) for kernels, memory in rates):
                self._silence.end(time.monotonic())
                self._report(0.0)
            else:
                then()

        self._abandon = IsolatedCall(self._ask_gpus).watch(
            *(self._waiting, answered, self._driver_s), callee="the NVIDIA driver"
        )

    # Stacks ---------------------------------------------------------------------------------------

    def _take_stacks(self, then: Callable[[dict[int, str]], None]) -> None:
        """Call THEN with the stacks of all ranks; each rank answers one question at a time."""
        if self._collection is not None:
            again = time.monotonic() + 0.1
            self._waiting.timer(("stacks", then), again, lambda: self._take_stacks(then))
            return

        def done(texts: dict[int, str]) -> None:
            self._collection = None
            then(texts)

        if self._ranks:
            pids = {process: rank.pid for process, rank in sorted(self._ranks.items())}
            self._collection = Collection(pids, self._waiting, done)
            self._collection.begin()

    def _write_stacks(self, reason: str, texts: Mapping[int, str]) -> bool:
        """Write all stacks to files, with their REASON; return whether that succeeds."""
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        for process, text in texts.items():
            head = f"# {when} {self._labels[process]}: {reason}\n"
            try:
                self._job.folder.add(self._stacks_name(process), f"{head}{text}\n")
            except OSError as error:
                self._notice("stacks", f"stacks cannot be written ({error.strerror}).")
                return False
        return True

    def _answer(self, texts: dict[int, str]) -> None:
        """Write the stacks that were asked for, and name their files as a shell would."""
        if not self._write_stacks("fleetrun was asked for its stack", texts):
            return
        name = names.stacks("*") if len(texts) > 1 else self._stacks_name(next(iter(texts)))
        where = names.run_path(self._job.plan, name)
        self._notice("stacks", f"the stacks of {counted(len(texts), 'process')} are in {where}.")

    def _stacks_name(self, process: int) -> str:
        spec = self._job.plan.processes[process]
        return names.stacks(str(process) if spec.rank is None else names.rank_name(spec.rank))
