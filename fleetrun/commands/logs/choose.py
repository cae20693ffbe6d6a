"""Chooses which logs of which runs to show."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.rundir import lockfile, names, runs
from fleetrun.text import parse_duration, parse_pattern, parse_range, suggestion

_CLOCKS = ("%H:%M", "%H:%M:%S")


def find_runs(
    words: Sequence[str], log_dir: str, *, prefers_running: bool = False
) -> list[runs.Run]:
    """Return the runs that WORDS name, or the latest in LOG_DIR.

    PREFERS_RUNNING: if that one has ended, the newest that still runs comes before it.

    Each comes with the runs of the job's other hosts in the same folder. Raises UsageError for a
    word that names none or several, or without one where several jobs run; EnvironmentFault if
    there is no run or it is another user's.
    """
    if not words:
        newest = runs.latest(log_dir)
        if newest is not None and prefers_running and not lockfile.is_running(newest):
            newest = next(filter(lockfile.is_running, lockfile.listed(log_dir)), newest)
        if newest is None:
            raise EnvironmentFault(
                f"There is no launch in {log_dir}: go to the folder that it was started in, or "
                "name its log folder with --log_dir."
            )
        chosen = runs.hosts(_read(newest))
        if lockfile.is_running(newest):
            _refuse_several(newest, chosen, log_dir)
        return chosen
    by_path: dict[str, runs.Run] = {}
    for word in words:
        for run in runs.hosts(_read(_run_dir(word, log_dir))):
            by_path.setdefault(run.path, run)
    return list(by_path.values())


def _refuse_several(newest: str, chosen: Sequence[runs.Run], log_dir: str) -> None:
    """Raise UsageError if runs in LOG_DIR other than CHOSEN, those of NEWEST, are running."""
    own = {os.path.realpath(run.path) for run in chosen}
    others = [
        path
        for path in lockfile.listed(log_dir)
        if os.path.realpath(path) not in own and lockfile.is_running(path)
    ]
    if others:
        listed = ", ".join(map(os.path.basename, (newest, *others)))
        raise UsageError(
            f"{1 + len(others)} jobs with logs in {log_dir} run; name one, or a part of its "
            f"name: {listed}."
        )


def is_hidden(path: str) -> bool:
    """Whether only another user may read the run directory PATH."""
    events = os.path.join(path, names.EVENTS)
    return os.path.exists(events) and not os.access(events, os.R_OK)


def state(run: runs.Run) -> str:
    """Return the state of RUN, or how it ended."""
    if run.is_running:
        return "running"
    if is_hidden(run.path):
        return "another user's"
    return "its launcher was killed" if run.finished_at is None else run.verdict


def _read(path: str) -> runs.Run:
    """Return the run in PATH; EnvironmentFault if it is another user's."""
    if is_hidden(path):
        raise EnvironmentFault(
            f"{path} is another user's: only who started the job can read its {names.EVENTS}."
        )
    return runs.read(path)


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
    """Return the requested logs of CHOSEN, ranks in order; UsageError for a missing rank."""
    logs = [log for run in chosen for log in run.logs]
    logs.sort(key=lambda log: (log.attempt, _order(log)))
    if rank is not None:
        logs = _of_ranks(logs, rank)
    if attempt is not None:
        attempts = sorted({log.attempt for log in logs})
        if attempts and attempt not in attempts:
            existing = "only attempt 0" if len(attempts) == 1 else f"attempts 0-{attempts[-1]}"
            raise UsageError(
                f"--attempt={attempt}: there is no such attempt; the job has {existing}."
            )
        logs = [log for log in logs if log.attempt == attempt]
    return [log for log in logs if log.has_failed] if failed else logs


def _order(log: runs.LogRecord) -> tuple[bool, int, str]:
    """Return the sort key of LOG: trainers first, by rank."""
    return not log.process.startswith("trainer."), log.rank or 0, log.process


def _of_ranks(logs: list[runs.LogRecord], text: str) -> list[runs.LogRecord]:
    """Return the LOGS of the processes in TEXT; UsageError if some of several are missing."""
    requested = processes(text)
    known = {log.process for log in logs}
    missing = sorted(requested - known, key=lambda name: (len(name), name))
    if missing and known:
        existing = names.listed([names.label_of(name) for name in known])
        raise UsageError(
            f"--rank={text}: there is no {names.label_of(missing[0])}; the job has {existing}."
        )
    return [log for log in logs if log.process in requested]


def processes(text: str) -> set[str]:
    """Return the processes that TEXT names: ranks, ranges of ranks, and other names.

    >>> sorted(processes("0,3-4,server.1"))
    ['server.1', 'trainer.0', 'trainer.3', 'trainer.4']
    """
    names: set[str] = set()
    for word in text.replace(",", " ").split():
        span = parse_range(word)
        if span is not None and span.stop <= 10_000_000:
            names |= {f"trainer.{rank}" for rank in span}
            continue
        if re.fullmatch(r"[a-z]+[._]\d+", word):
            names.add(word.replace("_", "."))
            continue
        raise UsageError(
            f"--rank={text}: give ranks as 0,3-5, and other processes by name, such as server.0."
        )
    if not names:
        raise UsageError("--rank needs a value: ranks, such as 0,3-5.")
    return names


def since(text: str, now: datetime) -> float:
    """Return the time TEXT in seconds since 1970: a duration before NOW, or a time.

    >>> now = datetime(2026, 11, 22, 12, 0)
    >>> [datetime.fromtimestamp(since(text, now)).strftime("%d. %H:%M:%S")
    ...  for text in ("90s", "1h30m", "11:45", "13:00", "2026-11-20", "2026-11-20T08:30:05")]
    ['22. 11:58:30', '22. 10:30:00', '22. 11:45:00', '21. 13:00:00', '20. 00:00:00', '20. 08:30:05']
    """
    word = text.strip()
    ago = None if word.isdecimal() else parse_duration(word)
    if ago is not None:
        return now.timestamp() - ago
    for clock in _CLOCKS:
        try:
            at = datetime.strptime(word, clock)  # noqa: DTZ007 - as the user's clock shows it
        except ValueError:
            continue
        moment = now.replace(hour=at.hour, minute=at.minute, second=at.second, microsecond=0)
        # Yesterday's, if it is later than now.
        return moment.timestamp() - (86400 if moment > now else 0)
    try:
        # The formats of events.jsonl and of people; before Python 3.11 it knows no Z.
        return datetime.fromisoformat(re.sub("[zZ]$", "+00:00", word)).timestamp()
    except ValueError:
        raise UsageError(
            f"--since={text}: give how long ago (90s, 10m, 2h, 1d), or when (12:30, "
            "2026-11-22T12:30)."
        ) from None


def pattern(text: str, option: str = "--grep", groups: Sequence[str] = ()) -> re.Pattern[bytes]:
    """Return the regular expression TEXT of OPTION, for bytes; UsageError if invalid.

    It must contain one of GROUPS, if there are any.
    """
    try:
        compiled = parse_pattern(text)
    except ValueError as error:
        raise UsageError(f"{option}={text}: {error}") from None
    if groups and not set(groups) & set(compiled.groupindex):
        expected = " or ".join(f"(?P<{group}>...)" for group in groups)
        raise UsageError(f"{option}={text}: it has no group {expected}.")
    return compiled
