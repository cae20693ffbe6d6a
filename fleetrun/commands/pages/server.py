"""The web server of `fleetrun ui`, and its access control.

Everything about a run needs the token, in a header that no page of another origin can send: there
are no cookies and no CORS headers. A request for another host name than this machine's was led here
by foreign DNS (rebinding), and gets nothing at all.
"""

from __future__ import annotations

import json
import re
import resource
import secrets
import sys
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from urllib.parse import parse_qsl

from fleetrun.commands.pages.page import SCRIPTS, part
from fleetrun.commands.pages.views import Views
from fleetrun.errors import FleetrunError

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
_TEXT, _SCRIPT = "text/plain", "text/javascript"
# They need no token, as they are about no run.
_FILES = {"ui.html": "text/html", "page.css": "text/css", "ui.js": _SCRIPT}
_FILES |= dict.fromkeys(SCRIPTS, _SCRIPT)
_RUN = re.compile(r"/api/runs(?:/(?P<key>\w+)(?P<what>/logs|/stacks)?)?")


class PageServer(ThreadingTCPServer):
    """Answers at PORT (0: a free one) about the runs in LOG_DIR to whoever has its `token`."""

    allow_reuse_address = True
    # Neither an idle connection nor a long search keeps it from ending.
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, log_dir: str) -> None:
        # Every merged log is an open file, and there may be thousands.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.token = secrets.token_urlsafe(32)
        self.views = Views(log_dir)
        super().__init__((ADDRESS, port), _PageRequest)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore that a browser has gone; report anything else."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _PageRequest(BaseHTTPRequestHandler):
    """A request of a browser."""

    server: PageServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a GET request."""
        self._send(*self._answer())

    def do_POST(self) -> None:
        """Answer a POST request, whose body is not read."""
        self.close_connection = True
        self._send(*self._answer())

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self) -> tuple[int, str, str]:
        """Return the status, type and text of the answer."""
        path, _, query = self.path.partition("?")
        name, match = path[1:] or "ui.html", _RUN.fullmatch(path)
        if refusal := self._refusal(is_file=name in _FILES):
            return refusal
        if name in _FILES:
            return 200, _FILES[name], part(name)
        if match is None:
            return 404, _TEXT, "There is no such page."
        try:
            content = self._content(match["key"], match["what"], dict(parse_qsl(query)))
        except KeyError:
            return 404, _TEXT, "There is no such run any more."
        except FleetrunError as error:
            return 400, _TEXT, str(error)
        return 200, "application/json", json.dumps(content, allow_nan=False)

    def _refusal(self, *, is_file: bool) -> tuple[int, str, str] | None:
        """Return the answer that refuses the request; None if it may be answered."""
        host, colon, port = self.headers.get("Host", "").rpartition(":")
        if (host if colon else port) not in _NAMES:
            return 421, _TEXT, "fleetrun ui answers to 127.0.0.1 and localhost only."
        given = self.headers.get("Authorization", "").encode()
        if is_file or secrets.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return None
        return 401, _TEXT, "This needs the token that fleetrun ui has printed."

    def _content(self, key: str | None, what: str | None, query: dict[str, str]) -> object:
        views = self.server.views
        if key is None:
            return views.listed()
        match self.command, what:
            case "POST", "/stacks":
                return views.take_stacks(key)
            case _, "/stacks":
                return views.stacks(key)
            case _, "/logs":
                return views.logs(key, query)
        return views.run(key, query.get("seen", ""))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**headers, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
