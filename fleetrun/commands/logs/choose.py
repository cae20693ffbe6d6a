"""Chooses which logs of which runs to show."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.rundir import lockfile, names, runs
from fleetrun.text import parse_range, suggestion


def find_runs(
    words: Sequence[str], log_dir: str, *, prefers_running: bool = False
) -> list[runs.Run]:
    """Return the runs that WORDS name, or the latest in LOG_DIR, with those of their other hosts.

    PREFERS_RUNNING: if that one has ended, the newest that still runs comes before it. Raises
    UsageError for a word that names none or several, or without one where several jobs run;
    EnvironmentFault if there is no run.
    """
    if words:
        named = (run for word in words for run in runs.hosts(runs.read(_run_dir(word, log_dir))))
        return [*{run.path: run for run in named}.values()]
    newest = runs.latest(log_dir)
    if newest is None:
        raise EnvironmentFault(
            f"There is no launch in {log_dir}: go to the folder that it was started in, or "
            "name its log folder with --log_dir."
        )
    running = list(map(os.path.realpath, filter(lockfile.is_running, lockfile.listed(log_dir))))
    if prefers_running and running and newest not in running:
        newest = running[0]
    chosen = runs.hosts(runs.read(newest))
    others = set(running) - {os.path.realpath(run.path) for run in chosen}
    if others and newest in running:
        listed = ", ".join(os.path.basename(path) for path in running)
        raise UsageError(
            f"{1 + len(others)} jobs with logs in {log_dir} run; name one, or a part of its "
            f"name: {listed}."
        )
    return chosen


def state(run: runs.Run) -> str:
    """Return the state of RUN, or how it ended."""
    if run.is_running:
        return "running"
    return "its launcher was killed" if run.finished_at is None else run.verdict


def _run_dir(word: str, log_dir: str) -> str:
    """Return the run directory that WORD names."""
    paths = runs.find(word, log_dir)
    if len(paths) == 1:
        return paths[0]
    known = [os.path.basename(path) for path in paths or lockfile.listed(log_dir)]
    if paths:
        shown = ", ".join(known[:3]) + (", ..." if len(known) > 3 else "")
        raise UsageError(f"{word} matches {len(known)} runs ({shown}): give more of the name.")
    listed = f"`fleetrun logs --runs` lists those in {log_dir}."
    raise UsageError(f"no such run: {word}{suggestion(word, known, listed)}")


def find_logs(
    chosen: Sequence[runs.Run], *, rank: str | None, attempt: int | None, failed: bool
) -> list[runs.LogRecord]:
    """Return the requested logs of CHOSEN, trainers first; UsageError for what is not there."""
    logs = [log for run in chosen for log in run.logs]
    logs.sort(
        key=lambda log: (
            *(log.attempt, not log.process.startswith("trainer.")),
            *(log.rank or 0, log.process),
        )
    )
    if rank is not None:
        requested, known = processes(rank), {log.process for log in logs}
        missing = sorted(requested - known, key=lambda name: (len(name), name))
        if missing and known:
            existing = names.listed([names.label_of(name) for name in known])
            raise UsageError(
                f"--rank={rank}: there is no {names.label_of(missing[0])}; the job has {existing}."
            )
        logs = [log for log in logs if log.process in requested]
    return [
        log
        for log in logs
        if (attempt is None or log.attempt == attempt) and (log.has_failed or not failed)
    ]


def processes(text: str) -> set[str]:
    """Return the processes that TEXT names: ranks, ranges of ranks, and other names.

    >>> sorted(processes("0,3-4,server.1"))
    ['server.1', 'trainer.0', 'trainer.3', 'trainer.4']
    """
    known: set[str] = set()
    for word in text.replace(",", " ").split():
        span = parse_range(word)
        if span is not None and span.stop <= 10_000_000:
            known |= {f"trainer.{rank}" for rank in span}
        elif re.fullmatch(r"[a-z]+[._]\d+", word):
            known.add(word.replace("_", "."))
        else:
            raise UsageError(f"--rank={text}: give ranks as 0,3-5, other processes as server.0.")
    if not known:
        raise UsageError("--rank needs a value: ranks, such as 0,3-5.")
    return known
