"""The answers of `fleetrun ui` as JSON: runs, what a run has recorded, its logs and stacks."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from hashlib import sha256

from fleetrun.commands.job_commands import newest
from fleetrun.commands.logs import choose, collectives, show
from fleetrun.commands.pages import rundata, series
from fleetrun.errors import EnvironmentFault
from fleetrun.host import jobs
from fleetrun.rundir import lockfile, metricsfile, names, reading, runs
from fleetrun.rundir.runs import Run
from fleetrun.text import visible, visible_lines

_MOST_RUNS = 200
# The bytes of each log that are searched for steps and losses when it has grown.
_MOST_SEARCHED = 2 << 20
# The bytes of logs that are shown, and read unless a pattern is given.
_MOST_SHOWN = 256 << 10
_LEAST_OF_EACH = 4 << 10
_MOST_STACKS = 1 << 20


class Views:
    """The runs in LOG_DIR, and those of this user's other jobs on this host."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = os.path.abspath(log_dir)
        # By the keys in addresses, so that no path from a request is ever opened.
        self._paths: dict[str, str] = {}
        self._reader = runs.RunReader()
        self._metrics: dict[str, metricsfile.MetricsReader] = {}
        # Threads answer requests.
        self._lock = threading.Lock()

    def listed(self) -> list[dict[str, object]]:
        """Return the runs in the log folder, then those elsewhere, newest first."""
        here = [os.path.realpath(path) for path in lockfile.listed(self._log_dir)[:_MOST_RUNS]]
        elsewhere = [os.path.realpath(job.run_dir) for job in jobs.find() if job.run_dir]
        rows: list[dict[str, object]] = []
        with self._lock:
            for path in dict.fromkeys((*here, *reversed(elsewhere))):
                if choose.is_hidden(path) or not os.path.exists(os.path.join(path, names.LOCK)):
                    continue
                key = sha256(os.fsencode(path)).hexdigest()[:16]
                self._paths[key] = path
                run = self._reader.read(path)
                row: dict[str, object] = {
                    "key": key,
                    "name": visible(run.name),
                    "job": visible(names.job_name(run.name)),
                    "began": run.started_at,
                    "processes": max(run.processes, len({log.process for log in run.logs})),
                    "state": visible(choose.state(run)),
                    "is_running": lockfile.is_running(path),
                    "exit_code": run.exit_code,
                    "is_here": path in here,
                }
                rows.append(row)
        return rows

    def run(self, key: str, seen: str) -> dict[str, object]:
        """Return everything but the logs of the run KEY; only its state if SEEN is its version."""
        hosts = self._hosts(key)
        version = _version(hosts)
        state: dict[str, object] = {
            "version": version,
            "is_running": any(run.is_running for run in hosts),
        }
        if version == seen:
            return state
        with self._lock:
            document = rundata.read(hosts, measured=self._measured, most_bytes=_MOST_SEARCHED)
        return {**state, "run": document}

    def logs(self, key: str, query: Mapping[str, str]) -> dict[str, object]:
        """Return the last lines of the run KEY, merged and filtered by the parameters QUERY."""
        hosts = self._hosts(key)
        pattern = choose.pattern(query["grep"], "grep") if query.get("grep") else None

        def pick(chosen: Sequence[Run]) -> list[runs.LogRecord]:
            rank, failed = query.get("rank") or None, "failed" in query
            logs = choose.find_logs(chosen, rank=rank, attempt=None, failed=failed)
            return [log for log in logs if os.path.exists(log.path)]

        count = len(pick(hosts))
        tail = bytearray()
        is_cut = False

        def keep(piece: bytes) -> None:
            nonlocal is_cut
            tail.extend(piece)
            if len(tail) > _MOST_SHOWN:
                is_cut = True
                del tail[:-_MOST_SHOWN]

        log_filter = show.LogFilter(
            pattern=pattern,
            is_clean=True,
            most_bytes=None if pattern else max(_MOST_SHOWN // max(count, 1), _LEAST_OF_EACH),
        )
        show.Viewer(hosts, pick, log_filter, is_prefixed=True, out=keep).show()
        text = bytes(tail).decode(errors="replace")
        text = text.partition("\n")[2] if is_cut else text
        return {"text": visible_lines(text), "is_cut": is_cut, "count": count}

    def stacks(self, key: str) -> dict[str, object]:
        """Return the newest stacks of the ranks of the run KEY, and their last collectives."""
        dumps = []
        hosts = self._hosts(key)
        for run in hosts:
            labels = {log.file_key: log.label for log in run.logs}
            for file_key, label in labels.items():
                path = os.path.join(run.path, names.stacks(file_key))
                dump = reading.content(path, _MOST_STACKS // len(labels) + 4096, from_end=True)
                if dump:
                    text = visible_lines(newest(dump.decode(errors="replace")))
                    dumps.append({"label": label, "text": text})
        try:
            recorded = collectives.text(hosts, None)
        except EnvironmentFault:
            # Nothing was recorded.
            recorded = ""
        return {"stacks": dumps, "collectives": recorded}

    def take_stacks(self, key: str) -> dict[str, object]:
        """Ask the launcher of the run KEY for the stacks of its ranks, as SIGQUIT does."""
        asked = jobs.ask_for_stacks([run.path for run in self._hosts(key)])
        if not asked:
            raise EnvironmentFault("The launcher of this run does not run on this host.")
        return {"asked": asked}

    def _hosts(self, key: str) -> list[Run]:
        """Return the runs of all hosts of the run KEY; KeyError if it was never listed."""
        if key not in self._paths:
            self.listed()
        with self._lock:
            return runs.hosts(self._reader.read(self._paths[key]), self._reader.read)

    def _measured(self, run: Run) -> Sequence[metricsfile.MetricsRecord]:
        if run.path not in self._metrics:
            self._metrics[run.path] = series.metrics_reader(run)
        return self._metrics[run.path].read()


def _version(hosts: Sequence[Run]) -> str:
    """Return a hash that changes with the files of the runs HOSTS."""
    files = [
        os.path.join(run.path, name) for run in hosts for name in (names.EVENTS, names.METRICS)
    ]
    files += [path for run in hosts for log in run.logs[:8] for path in log.paths]
    sizes = [reading.size(path) for path in files]
    return sha256(str((sizes, [run.is_running for run in hosts])).encode()).hexdigest()
