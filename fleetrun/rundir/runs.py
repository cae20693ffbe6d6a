"""The launches of a log folder: listing them, finding one, and reading all that one has left."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from fleetrun.rundir import (
    eventfile,
    flightfile,
    heartbeat,
    lockfile,
    names,
    planfile,
    progress,
    rankfile,
    reading,
    reportfile,
)
from fleetrun.rundir.eventfile import EventRecord
from fleetrun.rundir.flightfile import FlightRecord
from fleetrun.rundir.heartbeat import ReportedStep
from fleetrun.rundir.progress import Progress
from fleetrun.rundir.rankfile import RankAxes
from fleetrun.rundir.reportfile import ReportRecord

# The number of bytes to read at the end of a log.
_TAIL = 8192


class LogRecord(NamedTuple):
    """The log of one attempt of a process, and how that attempt went."""

    # The file, and the name of its process in plans and events.
    path: str
    process: str
    rank: int | None
    attempt: int
    pid: int | None
    # Wall clock, in seconds.
    started_at: float
    ended_at: float | None = None
    code: int | None = None
    signal: str = ""
    # Whether it failed before anything was asked to end.
    has_failed: bool = False
    # The file of standard error; empty: it is in the other one.
    error_path: str = ""

    @property
    def label(self) -> str:
        """The user's name of the process: `rank 3`."""
        return names.label_of(self.process)

    def title(self, stream: str = "") -> str:
        """Name the output of this attempt, or one STREAM of it: `rank 3 stderr, attempt 1`."""
        return f"{self.label}{stream}{f', attempt {self.attempt}' if self.attempt else ''}"

    @property
    def paths(self) -> tuple[str, ...]:
        """The files with its output, standard output first."""
        return (self.path, self.error_path) if self.error_path else (self.path,)


class Run(NamedTuple):
    """One launch, as read from its run directory; its methods read the other files now."""

    path: str
    # None: it has not been written yet.
    plan: planfile.PlanRecord | None
    logs: tuple[LogRecord, ...]
    job_id: str = ""
    node_rank: int = 0
    # How many processes each attempt has here; 0: not known yet.
    processes: int = 0
    started_at: float | None = None
    # None: it runs, or its launcher was killed.
    finished_at: float | None = None
    exit_code: int | None = None
    verdict: str = ""
    attempt: int = 0
    # The job's number of the last attempt: more than that of a host that joined later.
    generation: int = 0
    events: tuple[EventRecord, ...] = ()

    @property
    def name(self) -> str:
        """The name of the folder; for a host in a shared one, with that of the run."""
        return names.run_name(self.path)

    @property
    def host(self) -> str:
        """The host it ran on, according to the plan; empty if unknown."""
        nodes = () if self.plan is None else self.plan.nodes
        return nodes[self.node_rank] if self.node_rank < len(nodes) else ""

    @property
    def is_running(self) -> bool:
        """Whether its launcher is alive now."""
        return lockfile.is_running(self.path)

    def file(self, name: str) -> str:
        """Return the path of its file NAME."""
        return os.path.join(self.path, name)

    def report(self) -> ReportRecord | None:
        """Return what is known about its failure, if it has failed."""
        return reportfile.read(self.file(names.REPORT))

    def collectives(self) -> dict[int, FlightRecord]:
        """Return the records of its last attempt's collectives, by rank of a trainer."""
        return flightfile.in_folder(self.path, self.generation)

    def axes(self) -> RankAxes | None:
        """Return the axes of its ranks, as the first rank has recorded them."""
        ranks = sorted({log.rank for log in self.logs if log.rank is not None})
        return rankfile.topology(self.file(names.rank_records(rank)) for rank in ranks)

    def heartbeat_path(self, log: LogRecord) -> str:
        """Return the path of the heartbeat of LOG's process."""
        # By the rank, or such as `server.0`.
        return self.file(names.heartbeat(log.process.removeprefix("trainer.")))

    def heartbeat(self, log: LogRecord) -> ReportedStep | None:
        """Return the heartbeat of LOG's process, if there is one of this attempt."""
        path = self.heartbeat_path(log)
        return heartbeat.read(path) if reading.written_at(path) >= log.started_at else None

    def progress(self, log: LogRecord) -> Progress:
        """Return the progress of LOG's process, by its heartbeat and the end of LOG."""
        # What was written last comes last.
        paths = sorted(log.paths, key=reading.written_at)
        ends = [reading.content(path, _TAIL, from_end=True) or b"" for path in paths]
        printed = progress.printed(b"\n".join(ends))
        beat = self.heartbeat(log)
        if beat is None or not beat.points:
            return printed
        # The last updates of a rank that has ended have no times.
        return printed._replace(step=beat.step, step_at=beat.points[-1][0])


def read(path: str) -> Run:
    """Read the run directory PATH; a launch that has just begun has few files."""
    logs: dict[tuple[str, int], LogRecord] = {}
    launched = finished = None
    attempt = 0
    events = tuple(eventfile.read(os.path.join(path, names.EVENTS)))
    for event in events:
        attempt = max(attempt, event.attempt)
        key = (event.process, event.attempt)
        match event.event:
            case "launched":
                launched = event
            case "finished":
                finished = event
            case "started":
                log, errors = (_path(path, event.more.get(key)) for key in ("log", "error_log"))
                logs[key] = LogRecord(
                    *(log, event.process, event.rank, event.attempt, event.more.get("pid")),
                    event.time,
                    error_path=errors,
                )
            case "exited" if key in logs:
                code, signal = event.more.get("code"), event.more.get("signal") or ""
                logs[key] = logs[key]._replace(ended_at=event.time, code=code, signal=signal)
            case "root_cause":
                for name in event.more.get("failed") or ():
                    if failed_log := logs.get((name, event.attempt)):
                        logs[name, event.attempt] = failed_log._replace(has_failed=True)
            case _:
                pass
    reported = dict(launched.more) if launched else {}
    return reading.record(
        Run,
        reported | (dict(finished.more) if finished else {}),
        path=path,
        plan=planfile.read(os.path.join(path, names.PLAN)),
        logs=tuple(logs.values()),
        started_at=launched.time if launched else None,
        finished_at=finished.time if finished else None,
        attempt=attempt,
        generation=reported.get("generation", 0) + attempt,
        events=events,
    )


def _path(run_dir: str, value: object) -> str:
    """Return the path of the file VALUE of RUN_DIR, and of none elsewhere."""
    name = os.path.basename(reading.text(value))
    return os.path.join(run_dir, name) if name else ""


class RunReader:
    """Reads run directories, each again only once its events have changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Run]] = {}

    def read(self, path: str) -> Run:
        """Return the launch in PATH as it is now."""
        size = reading.size(os.path.join(path, names.EVENTS))
        known = self._known.get(path)
        if known is None or known[0] != size or known[1].plan is None:
            known = self._known[path] = size, read(path)
        return known[1]


def latest(log_dir: str) -> str | None:
    """Return the run directory of the newest launch into LOG_DIR; None if there is none."""
    link = os.path.join(log_dir, names.LATEST)
    if os.path.isdir(link):
        return os.path.realpath(link)
    # On a disk that takes no links.
    return next(iter(lockfile.listed(log_dir)), None)


def find(word: str, log_dir: str) -> list[str]:
    """Return the run directories that WORD, a path or part of a name in LOG_DIR, may mean."""
    for path in (word, os.path.join(log_dir, names.RUNS, word)):
        if os.path.exists(os.path.join(path, names.LOCK)):
            return [os.path.realpath(path)]
    if os.path.isdir(word) and (newest := latest(word)):
        return [newest]
    return [path for path in lockfile.listed(log_dir) if word in os.path.basename(path)]


def hosts(run: Run, read: Callable[[str], Run] = read) -> list[Run]:
    """Return RUN, and those of the job's other hosts in its run directory, which READ reads."""
    above, name = os.path.split(run.path)
    whole = above if names.is_node_folder(name) else run.path
    folders = os.listdir(whole) if os.path.isdir(whole) else []
    parts = sorted(filter(names.is_node_folder, folders), key=lambda name: (len(name), name))
    paths = [whole, *(os.path.join(whole, name) for name in parts)]
    return [
        run if path == run.path else read(path)
        for path in paths
        if path == run.path or os.path.exists(os.path.join(path, names.LOCK))
    ]
