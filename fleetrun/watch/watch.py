"""Samples the ranks periodically: which are stopped, which lag, and whether all hang.

It costs two wake-ups and one short read per rank in ten seconds. Only `--hang_timeout` looks at all
processes, and only while no rank's leader shows activity.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from fleetrun.model import LaunchPlan
from fleetrun.plan.environment import STACK_SIGNAL
from fleetrun.postmortem import places, stackdumps
from fleetrun.postmortem.stackdumps import Collection
from fleetrun.run import proc
from fleetrun.run.events import (
    Declared,
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
from fleetrun.run.proc import Stat
from fleetrun.rundir import flightfile, heartbeat, names, reading, variables
from fleetrun.text import sentence, visible
from fleetrun.watch import hang
from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.hang import Comparison, IdleClock
from fleetrun.watch.raised import RaisedRanks

if TYPE_CHECKING:
    # Only with other hosts.
    from fleetrun.session.driver import Session
    from fleetrun.session.exchange import StoppedRank
    from fleetrun.watch.hang_judge import HangJudge

# What Paddle prints while ranks wait: for the server of its store, and of what is not done.
_WAITING = b"retry to connect", b"] find timeout ", b"] find last group comm task:"
# By then, even on a busy host, a Python has loaded what PYTHONPATH leads to.
_LOADED_S = 5.0
# A rank that writes more than this between two looks is not waiting.
_MOST_READ = 65536


class _Rank:
    """A process that runs: its leader, its log and its heartbeat file."""

    def __init__(
        self,
        pid: int,
        logs: Sequence[str],
        heartbeat: str,
        since_ns: int,
        attempt: int = 0,
        *,
        ring: str = "",
    ) -> None:
        self.pid = pid
        self.attempt = attempt
        self.started_at = time.monotonic()
        self.is_looked_inside = self.is_seen_inside = self.was_unseen = False
        self.heartbeat = heartbeat
        # Where it records its collectives.
        self.ring = ring
        self.since_ns = since_ns
        self._sizes = dict.fromkeys(logs, 0)
        # The bytes of log lines that only report waiting.
        self._idle_bytes = 0

    def output(self) -> int:
        """Return a number that changes with each output, except lines that only report waiting."""
        for log, before in self._sizes.items():
            size = self._sizes[log] = reading.size(log)
            if before < size <= before + _MOST_READ and _only_waits(log, before):
                self._idle_bytes += size - before
        return sum(self._sizes.values()) - self._idle_bytes


class Watch(Source):
    """Watches the processes of JOB and reports stopped ranks, stragglers and hangs.

    This source may fail: a job that trains well is not ended because hangs are no longer noticed.
    """

    name = "watching the ranks"
    without = "without reporting stopped and slow ranks"

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
        self._reports_stragglers = job.request.debug is None
        self._timeout_s = job.plan.rules.hang_timeout_s if self._reports_stragglers else 0.0
        if self._timeout_s:
            self.without = "without detecting hangs: --hang_timeout no longer has an effect"
        # The job hangs only if all hosts report silence.
        self._session = session
        self._judge: HangJudge | None = None
        self._records: FlightRecords | None = None
        self._silent_samples: Mapping[int, hang.Sample] = {}
        self._sign = "life"
        self._gpus = gpus
        self._driver_s = driver_s
        self._question: IsolatedCall | None = None
        # The current sample of stacks, and what waits for its end.
        self._sample_of_stacks: Collection | None = None
        self._after_sample: Callable[[], None] | None = None
        # Which remarks have been made.
        self._has_said_unseen = self._has_said_unsampled = False
        # Why the driver is no longer asked.
        self._is_driver_stuck = False
        self._pace_s = pace_s
        self._window_s = window_s
        self._take(job.plan)
        self._ranks: dict[int, _Rank] = {}
        # When processes of this attempt exited with 0: any other exit ends it.
        self._ended: dict[int, float] = {}
        self._has_said_ended = False
        # Older heartbeats belong to an earlier attempt. Not the time when a rank's start is
        # handled: by then it may have sent its only heartbeat.
        self._since_ns = 0
        self._is_ending = False
        self._clock: IdleClock | None = None
        self._comparison: Comparison | None = None
        self._reported_stopped: frozenset[int] = frozenset()
        self._collection: Collection | None = None

    # The supervisor's side ----------------------------------------------------------------------

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Begin to look at the ranks, after a pause."""
        super().open(waiting, declare)
        now = time.monotonic()
        waiting.timer("compare", now + self._pace_s, self._look)
        if self._session is not None:
            from fleetrun.session.exchange import StoppedRank

            self._session.hearers[StoppedRank] = self._hear_of_stopped
        if self._timeout_s or self._job.request.flight_recorder:
            period_s = min(self._timeout_s / 4 or self._pace_s, self._pace_s)
            self._records = FlightRecords(self._job, self._session)
            self._records.open(waiting, period_s=period_s, declare=self._declare)
        if self._timeout_s:
            period_s = hang.IdleClock(self._timeout_s).period_s
            from fleetrun.watch.hang_judge import HangJudge  # loads the session

            self._judge = HangJudge(
                self._job,
                self._session,
                period_s=period_s,
                records=self._records,
            )
            self._judge.open(waiting, collect=self._collect_for_all, declare=self._declare)
            waiting.timer("hang", now + min(self._timeout_s / 4, self._pace_s), self._look_for_hang)

    def on_event(self, happening: Happening) -> None:
        """Track which processes run, and which were asked to end."""
        match happening:
            case Gathered(attempt=attempt, plan=plan) if attempt:
                self._take(plan)
                for part in (self._judge, self._records):
                    if part is not None:
                        part.restart()
                self._since_ns = heartbeat.file_clock_ns()
            case Started(process=process, pid=pid, attempt=attempt):
                if attempt and not self._ranks:
                    self._begin_again()
                spec = self._job.plan.processes[process]
                logs = names.log_paths(self._job.plan, spec, attempt)
                beats = spec.env.get(variables.HEARTBEAT, "")
                ring = spec.env.get(variables.FLIGHT_RECORDER, "")
                self._ranks[process] = _Rank(pid, logs, beats, self._since_ns, attempt, ring=ring)
            case Exited():
                self._forget(happening)
            case SignalAll() if happening.ends_ranks and not self._is_ending:
                self._send_records()
                self.close()
            case Finished():
                self.close()
            case StacksRequested():
                self._collect("fleetrun was asked for its stack", self._say_where)
            case _:
                pass

    def _take(self, plan: LaunchPlan) -> None:
        """Take over the processes of a generation, and the query for their GPUs."""
        self._labels = [names.label(spec) for spec in plan.processes]
        self._ask_gpus = self._gpus()
        self._raised: RaisedRanks | None = None
        # The activity of ranks that should end.
        self._exit_clock: IdleClock | None = None

    def _forget(self, exited: Exited) -> None:
        self._ranks.pop(exited.process, None)
        if not exited.status.exit_code:
            self._ended[exited.process] = exited.at
        if not self._ranks and not self._is_ending and self._records is not None:
            # Others may fail because these have ended.
            self._records.send()
            # A device may pair calls that differ, so that the job goes on.
            self._records.look()

    def _begin_again(self) -> None:
        self._is_ending = self._has_said_ended = False
        self._ended.clear()
        self._reported_stopped = frozenset()
        if self._clock is not None:
            self._clock.restart(time.monotonic())
        if self._comparison is not None:
            self._comparison.restart()

    def _send_records(self) -> None:
        """Send the records for the coordinator's report, before it hears that this host ended."""
        if self._records is not None:
            self._records.send()

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
        for collection in (self._collection, self._sample_of_stacks):
            if collection is not None:
                collection.cancel()
        if self._sample_of_stacks is not None:
            self._remove_samples()
        self._collection = self._sample_of_stacks = self._after_sample = None

    # Stopped ranks and stragglers -----------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        self._waiting.timer("compare", now + self._pace_s, self._look)
        if self._is_ending:
            return
        self._end_overdue(is_silent=False)
        if self._comparison is None:
            self._comparison = hang.Comparison(self._pace_s, self._window_s)
        stats = {process: proc.stat(rank.pid) for process, rank in self._ranks.items()}
        states = {process: stat_.state for process, stat_ in stats.items() if stat_ is not None}
        self._report_stopped(frozenset(hang.stopped(states)), states, now)
        trainers = self._job.plan.trainers.values()
        cpu_s = {
            process: stat.cpu_s
            for process, stat in stats.items()
            if stat is not None and process in trainers
        }
        lag = None if self._reported_stopped else self._comparison.see(cpu_s, now)
        if lag is not None and self._reports_stragglers:
            self._notice("straggler", _lag_sentence(lag, self._labels), lag.ranks, now)
        self._report_ended(now)

    def _report_ended(self, now: float) -> None:
        """Report once that ranks have ended for as long as a straggler may lag, and others run."""
        trainers = self._job.plan.trainers.values()
        ended = {process: at for process, at in self._ended.items() if process in trainers}
        running = [self._labels[process] for process in self._ranks if process in trainers]
        is_wanted = self._reports_stragglers and not self._has_said_ended
        if not is_wanted or not ended or now - min(ended.values()) < self._window_s:
            return
        self._has_said_ended = True
        first_at = time.time() - (now - min(ended.values()))
        who = names.listed([self._labels[process] for process in sorted(ended)])
        others = names.listed(running) if running else "ranks on other hosts"
        first, them = ("", "it") if len(ended) == 1 else (", the first", "them")
        text = (
            f"{who} exited with 0{first} at {time.strftime('%H:%M:%S', time.localtime(first_at))}, "
            f"and {others} still {'runs' if len(running) == 1 else 'run'} "
            f"{now - min(ended.values()):.0f} s later: do they wait for {them}?"
        )
        self._notice("ended early", text, tuple(sorted(ended)), now)

    def _end_overdue(self, *, is_silent: bool) -> None:
        """Declare the failure of a rank that has raised and does not end, if there is one.

        An exit handler may work as long as it likes. One that shows no other activity than
        processor time has what it has when another rank fails, unless the job IS_SILENT anyway.
        """
        if self._is_ending or not self._reports_stragglers:
            return
        if self._raised is None:
            self._raised = RaisedRanks(self._job)
        running = {process: (rank.pid, rank.attempt) for process, rank in self._ranks.items()}
        raised = self._raised.look(running, with_exits=is_silent)
        if not raised:
            self._exit_clock = None
        elif is_silent or self._is_still(raised):
            self._declare(self._raised.failure(running, raised))

    def _is_still(self, processes: Container[int]) -> bool:
        """Whether PROCESSES, which should end, have shown no activity for the time they have."""
        allowed_s = max(self._job.plan.rules.grace_s, TEARDOWN_S)
        if self._exit_clock is None:
            self._exit_clock = hang.IdleClock(allowed_s)
        clock, now = self._exit_clock, time.monotonic()
        self._waiting.timer(
            "overdue", now + clock.period_s, lambda: self._end_overdue(is_silent=False)
        )
        samples = {
            # Whatever the script has reported, no update follows.
            process: sample._replace(beat=0)
            for process, sample in self._sample().items()
            if process in processes
        }
        if clock.look(samples, now):
            depths = self._depths().items()
            clock.look_closer(
                {process: depth for process, depth in depths if process in samples}, now
            )
        return clock.still_s(now) >= allowed_s

    def _report_stopped(
        self, stopped: frozenset[int], states: Mapping[int, str], at: float
    ) -> None:
        """Report once that a process is stopped, and once that it continues."""
        for process in sorted(stopped - self._reported_stopped):
            pid = self._ranks[process].pid
            why = (
                "is held by a debugger (t)"
                if states[process] == "t"
                else f"is stopped (T); `kill -CONT {pid}` lets it go on"
            )
            self._notice("stopped", f"{self._labels[process]}, pid {pid}, {why}.", (process,), at)
            self._tell_stopped(process, is_stopped=True)
        for process in sorted((self._reported_stopped - stopped) & self._ranks.keys()):
            self._notice("continued", f"{self._labels[process]} goes on.", (process,), at)
            self._tell_stopped(process, is_stopped=False)
        if stopped != self._reported_stopped and self._comparison is not None:
            self._comparison.restart()
        self._reported_stopped = stopped

    def _tell_stopped(self, process: int, *, is_stopped: bool) -> None:
        """Tell the coordinator's host, where a rank may fail for want of this one."""
        plan, session = self._job.plan, self._session
        spec = plan.processes[process].rank
        if session is not None and not session.serves and spec is not None:
            place = plan.ranks.index(spec)
            from fleetrun.session.exchange import StoppedRank

            session.to_coordinator(StoppedRank(plan.generation, place, is_stopped))

    def _hear_of_stopped(self, node_rank: int, message: StoppedRank) -> None:
        plan = self._job.plan
        from fleetrun.session.exchange import rank_of

        spec = rank_of(message, node_rank, plan)
        if spec is None:
            return
        what, state = ("stopped", "is stopped") if message.is_stopped else ("continued", "goes on")
        label = names.spec_label(spec)
        text = f"{label} on {visible(plan.nodes[node_rank])} {state}."
        self._job.log(sentence(text))
        self._declare(RunWarning(what, text, time.monotonic(), (label,)))

    def _notice(self, kind: str, text: str, processes: tuple[int, ...], at: float) -> None:
        self._job.log(sentence(text))
        self._declare(
            RunWarning(kind, text, at, tuple(self._labels[process] for process in processes))
        )

    # Hangs ----------------------------------------------------------------------------------------

    def _sample(self) -> dict[int, hang.Sample]:
        samples: dict[int, hang.Sample] = {}
        for process, rank in self._ranks.items():
            stat = proc.stat(rank.pid)
            if stat is not None:
                beat = heartbeat.beat(rank.heartbeat, rank.since_ns)
                read = heartbeat.read(rank.heartbeat) if beat else None
                is_scripts = beat > 0 and (read is None or read.is_scripts)
                output, calls = rank.output(), flightfile.issued(rank.ring)
                sample = hang.Sample(stat.state, stat.cpu_s, output, beat, is_scripts, calls)
                samples[process] = sample
        return samples

    def _look_for_hang(self) -> None:
        now = time.monotonic()
        if self._clock is None:
            self._clock = hang.IdleClock(self._timeout_s)
        self._waiting.timer("hang", now + self._clock.period_s, self._look_for_hang)
        if self._question is not None:
            return
        if self._is_ending or self._collection is not None or not self._ranks:
            self._clock.revive(now)
            if not self._ranks and not self._is_ending:
                self._report_silence(None)
            return
        signs = self._sample()
        states = {process: sample.state for process, sample in signs.items()}
        self._report_stopped(frozenset(hang.stopped(states)), states, now)
        if self._clock.look(signs, now):
            self._clock.look_closer(self._depths(), now)
        self._look_inside(now)
        if self._sample_of_stacks is not None:
            return
        if self._clock.is_hung(now):
            self._suspect(self._clock, signs, now)
            return
        self._report_silence(0.0)
        if self._clock.wants_stacks(now):
            self._unless_a_gpu_works(self._sample_stacks)

    def _suspect(self, clock: IdleClock, signs: Mapping[int, hang.Sample], now: float) -> None:
        """Declare a hang, unless a GPU works or a rank goes on meanwhile."""
        silence_s = clock.silent_s(now)
        sign = "stacks" if clock.is_still else "steps" if clock.has_beats else "life"

        def conclude() -> None:
            self._silent_samples, self._sign = signs, sign
            self._end_overdue(is_silent=True)
            if self._ranks and not self._is_ending:
                self._report_silence(silence_s)

        self._unless_a_gpu_works(conclude)

    def _look_inside(self, now: float) -> None:
        """Report which ranks run a Python that has not loaded our `sitecustomize`."""
        for process, rank in self._ranks.items():
            if rank.is_looked_inside:
                continue
            rank.is_seen_inside = proc.catches(rank.pid, STACK_SIGNAL)
            has_loaded = now >= rank.started_at + _LOADED_S
            # An interpreter that ends has given up its signals: one look late is not enough.
            rank.is_looked_inside = rank.is_seen_inside or rank.was_unseen
            rank.was_unseen = has_loaded
            if rank.is_looked_inside and proc.is_python(rank.pid):
                self._say_unseen((process,))

    def _say_unseen(self, processes: Sequence[int]) -> None:
        # An interpreter that ends has no stack any more.
        processes = tuple(
            process for process in processes if not self._ranks[process].is_seen_inside
        )
        if processes and not self._has_said_unseen:
            self._has_said_unseen = True
            labels = names.listed([self._labels[process] for process in processes])
            self._notice(
                "unseen",
                f"{labels} cannot be watched from inside (no Python, or one that ignores "
                "PYTHONPATH: -I, -E, -S): there, --hang_timeout sees no updates, and counts "
                "processor use as a sign of life.",
                processes,
                time.monotonic(),
            )

    def _sample_stacks(self) -> None:
        """Take the stacks of all ranks now, and let the clock compare them."""

        def done(texts: dict[int, str]) -> None:
            self._sample_of_stacks = None
            self._remove_samples()
            if self._clock is not None and texts.keys() == self._ranks.keys():
                seen = {process: places.of_processes(text) for process, text in texts.items()}
                self._say_unseen([process for process in sorted(seen) if not seen[process]])
                stacks = {pid: stack for by_pid in seen.values() for pid, stack in by_pid.items()}
                self._clock.see_stacks(stacks, time.monotonic())
            after, self._after_sample = self._after_sample, None
            if after is not None:
                after()

        if self._collection is not None or not self._ranks or self._is_ending:
            return
        try:
            self._sample_of_stacks = self._collect_to(".", "a sample", done)
            self._sample_of_stacks.begin()
        except OSError as error:
            self._sample_of_stacks = None
            if not self._has_said_unsampled:
                self._has_said_unsampled = True
                self._job.log(
                    f"Stacks cannot be sampled ({error.strerror}), so spinning ranks look busy."
                )

    def _remove_samples(self) -> None:
        for process in range(len(self._job.plan.processes)):
            with suppress(OSError):
                os.unlink(self._stacks_path(process, "."))

    def _unless_a_gpu_works(self, then: Callable[[], None]) -> None:
        """Call THEN unless the ranks have a GPU that works."""
        is_promised = self._clock is not None and self._clock.has_promises
        if is_promised or self._ask_gpus is None or self._is_driver_stuck:
            then()
        else:
            self._ask_driver(self._ask_gpus, then)

    def _ask_driver(self, query: Callable[[], IsolatedCall], conclude: Callable[[], None]) -> None:
        """Call CONCLUDE unless a GPU works; the driver itself may be what hangs."""
        try:
            question = self._question = query()
        except OSError as error:
            self._job.log(f"Whether a GPU computes cannot be determined ({error.strerror}).")
            conclude()
            return

        def answered(answer: CallResult) -> None:
            self._question = None
            if answer.is_late:
                self._is_driver_stuck = True
                self._job.log(f"Whether a GPU computes is not known: {answer.trouble}.")
            reported = cast("Mapping[str, tuple[int, int, int]]", answer.value or {})
            loads = {uuid: hang.GpuLoad(*load) for uuid, load in reported.items()}
            clock = None if answer.is_late else self._clock
            if clock is not None and clock.see_gpus(loads, time.monotonic()):
                self._report_silence(0.0)
            else:
                conclude()

        question.watch(self._waiting, answered, self._driver_s, callee="the NVIDIA driver")

    def _families(self) -> dict[int, list[Stat]]:
        """Return the processes of each rank: its leader and all below it."""
        leaders = {rank.pid: process for process, rank in self._ranks.items()}
        families = proc.families(proc.all_processes(), leaders)
        return {leaders[pid]: family for pid, family in families.items()}

    def _depths(self) -> dict[int, hang.DeepSample]:
        def sample(family: list[Stat]) -> hang.DeepSample:
            pids = [member.pid for member in family]
            totals = [total for total in map(proc.io, pids) if total is not None]
            return hang.DeepSample(
                cpu_s={member.pid: member.cpu_s for member in family},
                written=sum(total.written for total in totals),
                reaped_s=sum(member.reaped_s for member in family),
                fetched=sum(total.fetched for total in totals),
                moved=sum(total.moved for total in totals),
                faults=sum(member.faults for member in family),
                disk_waits={
                    member.pid: proc.switches(member.pid)
                    for member in family
                    if member.state == "D"
                },
                runnable={pid: threads for pid in pids if (threads := proc.runnable(pid))},
                is_at_prompt=any(map(proc.reads_terminal, pids)),
            )

        return {process: sample(family) for process, family in self._families().items()}

    def _unreached(self) -> list[tuple[int, str]]:
        """Return which processes wait for an answer to a connection, and the endpoint."""
        # It takes 25 ms to import, and most jobs never get here.
        import psutil

        ranks = {
            member.pid: process for process, family in self._families().items() for member in family
        }
        return sorted(
            {
                (ranks[link.pid], f"{link.raddr.ip}:{link.raddr.port}")
                for link in psutil.net_connections("tcp")
                if link.status == psutil.CONN_SYN_SENT and link.raddr and link.pid in ranks
            }
        )

    def _gone_on(self, before: Mapping[int, hang.Sample]) -> int | None:
        """Return a process that has shown a sign of life since BEFORE; None if there is none."""
        for process, now in self._sample().items():
            past = before.get(process)
            if past is None or now.beat != past.beat:
                return process
            has_called = now.calls != past.calls and not (now.beat and now.is_scripts)
            if has_called or (now.output != past.output and not now.beat):
                return process
        return None

    # With the judge ------------------------------------------------------------------------------

    def _report_silence(self, silent_s: float | None) -> None:
        if self._judge is not None:
            self._judge.report(silent_s)

    def _collect_for_all(self, silence_s: float) -> None:
        """Fetch the stacks, and tell the coordinator's host where the ranks here stand."""
        before = self._silent_samples
        where = "" if self._session is None else " on any host"
        judge = self._judge
        assert judge is not None

        def reported(texts: dict[int, str]) -> None:
            process = self._gone_on(before)
            if process is not None:
                text = (
                    f"nothing had happened for {silence_s:.0f} s, but {self._labels[process]} "
                    f"went on just now; the stacks are in {self._stacks_of(tuple(texts))}."
                )
                self._notice("went on", text, (process,), time.monotonic())
            judge.collected(
                {process: places.main_thread(text) for process, text in texts.items()},
                went_on=process,
                sign=self._sign,
                unreached=self._unreached(),
                ended=self._ended,
            )

        if self._ranks and not self._is_ending:
            self._collect(f"nothing has happened for {silence_s:.0f} s{where}", reported)
        else:
            judge.collected({}, went_on=None, sign="life", unreached=(), ended=self._ended)

    # Stacks -------------------------------------------------------------------------------------

    def _collect(self, reason: str, then: Callable[[dict[int, str]], None]) -> None:
        if self._sample_of_stacks is not None:
            # Each rank answers one question at a time.
            self._after_sample = lambda: self._collect(reason, then)
            return
        if self._collection is not None or not self._ranks:
            return

        def done(texts: dict[int, str]) -> None:
            self._collection = None
            then(texts)

        self._collection = self._collect_to("", reason, done)
        self._collection.begin()

    def _collect_to(
        self, prefix: str, reason: str, done: Callable[[dict[int, str]], None]
    ) -> Collection:
        """Return a collection that writes all stacks to files whose names begin with PREFIX."""
        return stackdumps.Collection(
            [
                stackdumps.StackTarget(
                    process, self._labels[process], rank.pid, self._stacks_path(process, prefix)
                )
                for process, rank in sorted(self._ranks.items())
            ],
            reason=reason,
            waiting=self._waiting,
            spy=stackdumps.find_spy(),
            environ=os.environ,
            done=done,
        )

    def _say_where(self, texts: dict[int, str]) -> None:
        where = self._stacks_of(tuple(texts))
        text = f"the stacks of {len(texts)} processes are in {where}."
        self._notice("stacks", text, (), time.monotonic())

    def _stacks_path(self, process: int, prefix: str = "") -> str:
        spec = self._job.plan.processes[process]
        name = str(process) if spec.rank is None else names.rank_name(spec.rank)
        return names.run_path(self._job.plan, prefix + names.stacks(name))

    def _stacks_of(self, processes: tuple[int, ...]) -> str:
        """Name the files as a shell would."""
        if len(processes) == 1:
            return self._stacks_path(processes[0])
        return names.run_path(self._job.plan, names.stacks("*"))


def _lag_sentence(lag: hang.Lag, labels: list[str]) -> str:
    stragglers, others = (
        names.listed([labels[process] for process in lag.ranks]),
        names.listed([labels[process] for process in lag.others]),
    )
    have = "has" if len(lag.ranks) == 1 else "have"
    are, them = ("is", "it") if len(lag.others) == 1 else ("are", "them")
    if lag.is_idle:
        # In a collective over gloo, too, a rank uses no processor.
        return (
            f"{stragglers} {have} used no processor for {lag.seconds:.0f} s while {others} {are} "
            f"busy: waiting for {them}, data, a disk, a lock or a processor?"
        )
    return (
        f"{stragglers} {have} been busy for {lag.seconds:.0f} s while {others} {are} "
        "idle and, it seems, waiting."
    )


def _only_waits(log: str, offset: int) -> bool:
    """Whether LOG from OFFSET on only reports waiting for a connection."""
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            lines = file.read(_MOST_READ).splitlines()
    except OSError:
        return False
    written = [line for line in lines if line.strip()]
    return bool(written) and all(any(mark in line.lower() for mark in _WAITING) for line in written)
