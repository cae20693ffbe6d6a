"""The web server of `fleetrun ui`, and its access control.

Everything about a run needs the token, in a header that no page of another origin can send: there
are no cookies and no CORS headers. A request for another host name than this machine's was led here
by foreign DNS (rebinding), and gets nothing at all.
"""

from __future__ import annotations

import resource
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fleetrun.commands.pages.page import SCRIPTS, part
from fleetrun.commands.pages.views import Views
from fleetrun.errors import FleetrunError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

_NAMES = {"127.0.0.1", "localhost"}
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
_FILES = {
    "ui.html": "text/html",
    "page.css": "text/css",
    **dict.fromkeys((*SCRIPTS, "ui.js"), "text/javascript"),
}


def serve(listening: socket.socket, token: str, log_dir: str) -> None:
    """Answer at the socket LISTENING about the runs in LOG_DIR until a signal ends it."""
    # Every merged log is an open file, and there may be thousands.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    config = uvicorn.Config(
        application(token, Views(log_dir)),
        access_log=False,
        interface="asgi3",
        lifespan="off",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listening])


def application(token: str, views: Views) -> ASGIApp:
    """Return the application that answers requests with TOKEN from VIEWS."""

    def answer(path: str, get: Callable[[Request], object], *, method: str = "GET") -> Route:
        def endpoint(request: Request) -> Response:
            # In a thread, so that a long search delays no other request.
            try:
                return JSONResponse(get(request))
            except KeyError:
                return PlainTextResponse("There is no such run any more.", 404)
            except FleetrunError as error:
                return PlainTextResponse(str(error), 400)

        return Route(path, endpoint, methods=[method])

    def query(request: Request) -> dict[str, str]:
        return dict(request.query_params)

    run = "/api/runs/{run}"
    routes = [
        *(_fixed("/" if name == "ui.html" else f"/{name}", name) for name in _FILES),
        answer("/api/runs", lambda _: views.listed()),
        answer(run, lambda req: views.run(req.path_params["run"], query(req).get("seen", ""))),
        answer(f"{run}/logs", lambda req: views.logs(req.path_params["run"], query(req))),
        answer(f"{run}/stacks", lambda req: views.stacks(req.path_params["run"])),
        answer(
            f"{run}/stacks", lambda req: views.take_stacks(req.path_params["run"]), method="POST"
        ),
    ]
    return _guarded(Starlette(routes=routes), token)


def _fixed(path: str, name: str) -> Route:
    """Return the route of the file NAME; it needs no token, as it is about no run."""
    text = part(name)
    return Route(path, lambda _: Response(text, media_type=_FILES[name]))


def _guarded(inner: ASGIApp, token: str) -> ASGIApp:
    """Return INNER behind a check of each request, with security headers on each response."""
    expected = f"Bearer {token}".encode()

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = _refusal(scope["path"], headers, expected)

        async def locked(message: Any) -> None:  # noqa: ANN401 - as ASGI has it
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), text.encode()) for name, text in _HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await (inner if refusal is None else refusal)(scope, receive, locked)

    return outer


def _refusal(path: str, headers: dict[bytes, bytes], expected: bytes) -> Response | None:
    """Return the response that refuses a request; None if it may be answered."""
    name = headers.get(b"host", b"").decode("latin-1").rpartition(":")
    if (name[0] or name[2]) not in _NAMES:
        return PlainTextResponse("fleetrun ui answers to 127.0.0.1 and localhost only.", 421)
    if path.startswith("/api/") and not secrets.compare_digest(
        headers.get(b"authorization", b""), expected
    ):
        return PlainTextResponse("This needs the token that fleetrun ui has printed.", 401)
    return None
