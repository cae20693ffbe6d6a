"""What the page of `fleetrun ui` shows: runs, ranks over time, logs, stacks, as JSON."""

from __future__ import annotations

import base64
import os
import threading
from array import array
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from fleetrun.commands.logs import choose, collectives, show
from fleetrun.commands.report import history, page
from fleetrun.commands.stacks import newest
from fleetrun.errors import EnvironmentFault
from fleetrun.plan.visible import visible, visible_lines
from fleetrun.probe import jobs
from fleetrun.records import metricsfile, names, reading, runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetrun.records.runs import Run

_MOST_RUNS = 200
# The columns of a picture, and its cells, all of which a browser gets whenever something changes.
_LEAST_MOMENTS, _MOST_MOMENTS, _MOST_VALUES = 16, 240, 1 << 17
# The bytes of each log that are searched for steps and losses whenever it has grown.
_MOST_SEARCHED = 2 << 20
# The bytes of logs that are shown, and read unless a pattern is searched for.
_MOST_SHOWN = 256 << 10
_LEAST_OF_EACH = 4 << 10
_MOST_STACKS = 1 << 20


class Views:
    """The runs in LOG_DIR, and those of this user's other jobs on this host."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = os.path.abspath(log_dir)
        # By the keys in addresses: no path from a request is ever opened.
        self._paths: dict[str, str] = {}
        self._runs: dict[str, tuple[int, Run]] = {}
        # By key: the version that was read last, and its story.
        self._watched: dict[str, tuple[str, history.RunHistory]] = {}
        self._metrics: dict[str, metricsfile.MetricsReader] = {}
        # Requests are answered by threads.
        self._lock = threading.Lock()

    def listed(self) -> list[dict[str, object]]:
        """Return the runs in the log folder, then those elsewhere; the newest first."""
        here = [os.path.realpath(path) for path in runs.listed(self._log_dir)[:_MOST_RUNS]]
        others = [os.path.realpath(job.run_dir) for job in jobs.find() if job.run_dir]
        rows: list[dict[str, object]] = []
        with self._lock:
            for path in dict.fromkeys((*here, *reversed(others))):
                if choose.is_hidden(path) or not os.path.exists(os.path.join(path, names.LOCK)):
                    continue
                key = sha256(os.fsencode(path)).hexdigest()[:16]
                self._paths[key] = path
                run = self._read(path)
                count = len({log.process for log in run.logs})
                rows.append(
                    {
                        "key": key,
                        "name": visible(run.name),
                        "job": visible(names.job_name(run.name)),
                        "began": run.started_at,
                        "ended": run.finished_at,
                        "processes": max(run.processes, count),
                        "state": visible(choose.state(run)),
                        "is_running": runs.is_running(path),
                        "exit_code": run.exit_code,
                        "is_here": path in here,
                    }
                )
        return rows

    def run(self, key: str, seen: str) -> dict[str, object]:
        """Return all but the logs of the run KEY; only its state if it is still at version SEEN."""
        found = self._hosts(key)
        version = _version(found)
        state = {"version": version, "is_running": any(runs.is_running(one.path) for one in found)}
        if version == seen:
            return state
        story = self._story(key, found, version)
        shown = page.sections(story, 0, _unlinked)
        return {
            **state,
            "title": visible(page.title(story)),
            "result": visible(page.result(story)[0]),
            **{name: shown[name] for name in ("head", "progress", "origin")},
            "uses": list(map(_use, story.uses)),
            "processes": [bar.label for bar in story.bars if not bar.attempt],
        }

    def logs(self, key: str, asked: Mapping[str, str]) -> dict[str, object]:
        """Return the last lines of the run KEY, merged and filtered by the parameters ASKED."""
        found = self._hosts(key)
        pattern = choose.pattern(asked["grep"], "grep") if asked.get("grep") else None
        attempt = int(asked["attempt"]) if asked.get("attempt", "").isdecimal() else None

        def pick(found: Sequence[Run]) -> list[runs.LogRecord]:
            logs = choose.find_logs(
                found, rank=asked.get("rank") or None, attempt=attempt, failed="failed" in asked
            )
            return [log for log in logs if os.path.exists(log.path)]

        count = max(len(pick(found)), 1)
        kept = bytearray()
        is_cut = False

        def keep(piece: bytes) -> None:
            nonlocal is_cut
            kept.extend(piece)
            if len(kept) > _MOST_SHOWN:
                is_cut = True
                del kept[:-_MOST_SHOWN]

        most = None if pattern else max(_MOST_SHOWN // count, _LEAST_OF_EACH)
        wanted = show.LogFilter(
            pattern=pattern,
            since=None,
            is_coloured=False,
            tells_attempt=attempt is None,
            is_clean=True,
            most_bytes=most,
        )
        show.Viewer(found, pick, wanted, keep).merge()
        text = bytes(kept).decode(errors="replace")
        if is_cut:
            text = text.partition("\n")[2]
        return {"text": visible_lines(text), "is_cut": is_cut, "count": count}

    def stacks(self, key: str) -> dict[str, object]:
        """Return the newest stacks of the ranks of the run KEY, and their last collectives."""
        found = []
        hosts = self._hosts(key)
        for run in hosts:
            labels = {log.file_key: log.label for log in run.logs}
            for key_in_files, label in labels.items():
                path = os.path.join(run.path, names.stacks(key_in_files))
                dump = reading.content(path, _MOST_STACKS // len(labels) + 4096, from_end=True)
                if dump:
                    text = visible_lines(newest(dump.decode(errors="replace")))
                    found.append({"label": label, "text": text})
        try:
            recorded = collectives.text(hosts, None)
        except EnvironmentFault:
            # Nothing was recorded.
            recorded = ""
        return {"stacks": found, "collectives": recorded}

    def take_stacks(self, key: str) -> dict[str, object]:
        """Ask the launcher of the run KEY for the stacks of its ranks, as SIGQUIT does."""
        asked = jobs.ask_for_stacks([run.path for run in self._hosts(key)])
        if not asked:
            raise EnvironmentFault("The launcher of this run does not run on this host.")
        return {"asked": asked}

    def beside(self, run: str, other: str) -> dict[str, object]:
        """Return the runs RUN and OTHER beside each other."""
        stories = []
        for key in (run, other):
            found = self._hosts(key)
            stories.append(self._story(key, found, _version(found)))
        return {"beside": page.comparison(stories)}

    def _hosts(self, key: str) -> list[Run]:
        """Return the runs of all hosts of the run KEY; KeyError if it was never listed."""
        if key not in self._paths:
            self.listed()
        with self._lock:
            return runs.hosts(self._read(self._paths[key]), self._read)

    def _read(self, path: str) -> Run:
        size = reading.size(os.path.join(path, names.EVENTS))
        before = self._runs.get(path)
        if before is None or before[0] != size or before[1].plan is None:
            before = self._runs[path] = size, runs.read(path)
        return before[1]

    def _story(self, key: str, found: Sequence[Run], version: str) -> history.RunHistory:
        with self._lock:
            before = self._watched.get(key)
            if before is None or before[0] != version:
                story = history.read(found, measured=self._measured, most_bytes=_MOST_SEARCHED)
                before = self._watched[key] = version, story
            return before[1]

    def _measured(self, run: Run) -> Sequence[metricsfile.MetricsRecord]:
        if run.path not in self._metrics:
            path = os.path.join(run.path, names.METRICS)
            plan = run.plan
            ranks = 1 if plan is None else len(plan.nodes) * max(len(plan.processes), 1)
            most = max(_LEAST_MOMENTS, min(_MOST_MOMENTS, _MOST_VALUES // ranks))
            self._metrics[run.path] = metricsfile.MetricsReader(path, most)
        return self._metrics[run.path].read()


def _version(found: Sequence[Run]) -> str:
    """Return a hash that changes when files of the runs FOUND do."""
    files = [
        os.path.join(run.path, name) for run in found for name in (names.EVENTS, names.METRICS)
    ]
    files += [path for run in found for log in run.logs[:8] for path in log.paths]
    sizes = ",".join(str(reading.size(path)) for path in files)
    running = "".join(str(int(runs.is_running(run.path))) for run in found)
    return sha256(f"{sizes} {running}".encode()).hexdigest()[:16]


def _use(used: history.Use) -> dict[str, Any]:
    """Return USED for a picture: its numbers row by row, as 32-bit floats in base64."""
    numbers = array("f")
    for row in used.values:
        numbers.extend(float("nan") if value is None else value for value in row)
    packed = base64.b64encode(numbers.tobytes()).decode()
    return {**used._asdict(), "rows": [*map(visible, used.rows)], "values": packed}


def _unlinked(path: str, text: str) -> str:
    """Name a log where the page of a file would have a link to it."""
    return f"{page.escaped(text)}: {page.escaped(path)}"
