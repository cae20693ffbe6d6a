"""The pages as one file, and the web server of `fleetrun ui` with its access control.

Everything about a run needs the token, in a header that no page of another origin can send: there
are no cookies and no CORS headers. A request for another host name than this machine's was led here
by foreign DNS (rebinding), and gets nothing at all.
"""

from __future__ import annotations

import html
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from string import Template

from fleetrun.commands.logs import choose
from fleetrun.commands.pages import rundata
from fleetrun.rundir import lockfile, names, runs
from fleetrun.text import visible

# Unreachable from other machines.
ADDRESS = "127.0.0.1"
_NAMES = {ADDRESS, "localhost"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_SCRIPTS = ("words.js", "chart.js", "page.js")
_TEXT, _SCRIPT = "text/plain", "text/javascript"
# They need no token, as they are about no run.
_FILES = {"ui.html": "text/html", "page.css": "text/css", "ui.js": _SCRIPT}
_FILES |= dict.fromkeys(_SCRIPTS, _SCRIPT)
_RUN = re.compile(r"/api/runs(?:/(?P<key>\w+))?")
_MOST_RUNS = 200
# The bytes of each log that are searched for steps and losses.
_MOST_SEARCHED = 2 << 20


def _part(name: str) -> str:
    """Return the file NAME, a part of the page."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def page(stories: Sequence[rundata.Document]) -> str:
    """Return the page of one run or two as one file."""
    # No text may end the script.
    data = json.dumps(stories, allow_nan=False).replace("<", "\\u003c")
    return Template(_part("page.html")).substitute(
        title=html.escape(", ".join(f"{run['title']}: {run['verdict']}" for run in stories)),
        style=_part("page.css"),
        script="".join(map(_part, _SCRIPTS)) + f"show({data});",
    )


class PageServer(ThreadingTCPServer):
    """Answers at PORT (0: a free one) about the runs in LOG_DIR to whoever has its `token`."""

    allow_reuse_address = True
    # Neither an idle connection nor a long search keeps it from ending.
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, log_dir: str) -> None:
        self.token = secrets.token_urlsafe(32)
        self._log_dir = log_dir
        # By the keys in addresses, so that no path from a request is ever opened.
        self._paths: dict[str, str] = {}
        self._reader = runs.RunReader()
        # Threads answer requests.
        self._lock = threading.Lock()
        super().__init__((ADDRESS, port), _PageRequest)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore that a browser has gone; report anything else."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def content(self, key: str | None) -> object:
        """Return the runs, or the run KEY; KeyError if it was never listed."""
        with self._lock:
            if key is None or key not in self._paths:
                listed = self._listed()
            if key is None:
                return listed
            hosts = runs.hosts(self._reader.read(self._paths[key]), self._reader.read)
            return rundata.read(hosts, most_bytes=_MOST_SEARCHED)

    def _listed(self) -> list[dict[str, object]]:
        """Return the runs in the log folder, newest first."""
        rows: list[dict[str, object]] = []
        for path in map(os.path.realpath, lockfile.listed(self._log_dir)[:_MOST_RUNS]):
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
                "is_running": run.is_running,
                "exit_code": run.exit_code,
            }
            rows.append(row)
        return rows


class _PageRequest(BaseHTTPRequestHandler):
    """A request of a browser."""

    server: PageServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a GET request; there are no others."""
        status, kind, text = self._answer()
        body = text.encode(errors="replace")
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**headers, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self) -> tuple[int, str, str]:
        """Return the status, type and text of the answer."""
        name, match = self.path[1:] or "ui.html", _RUN.fullmatch(self.path)
        host, colon, port = self.headers.get("Host", "").rpartition(":")
        if (host if colon else port) not in _NAMES:
            return 421, _TEXT, "fleetrun ui answers to 127.0.0.1 and localhost only."
        if name in _FILES:
            return 200, _FILES[name], _part(name)
        given = self.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return 401, _TEXT, "This needs the token that fleetrun ui has printed."
        if match is None:
            return 404, _TEXT, "There is no such page."
        try:
            content = self.server.content(match["key"])
        except KeyError:
            return 404, _TEXT, "There is no such run any more."
        return 200, "application/json", json.dumps(content, allow_nan=False)
