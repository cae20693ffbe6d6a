"""`fleetrun ui`: serves a live page about the runs of a log folder, on this machine only."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from importlib.util import find_spec

import click

from fleetrun.cli import parser
from fleetrun.errors import EnvironmentFault
from fleetrun.printing import put

# Unreachable from other machines.
_ADDRESS = "127.0.0.1"
_NEEDED = ("starlette", "uvicorn")
_NICE = 10


def _ui(log_dir: str, port: int) -> int:
    """Serve the page until Ctrl-C; EnvironmentFault if that is impossible."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise EnvironmentFault(
            f"ui needs {' and '.join(_NEEDED)}, which are not installed here: "
            f"{sys.executable} -m pip install {' '.join(_NEEDED)}."
        )
    from fleetrun.commands.ui import server  # only with what it needs

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_ADDRESS, port))
            # A browser that opens the address at once waits for the answer.
            listener.listen()
        except OSError as error:
            raise EnvironmentFault(
                f"ui: port {port} of {_ADDRESS} cannot be used ({error.strerror}): leave --port "
                "out to get a free one."
            ) from None
        token = secrets.token_urlsafe(32)
        port = listener.getsockname()[1]
        put(
            f"http://{_ADDRESS}:{port}/#token={token}\n"
            "Open this address in a browser of this machine; whoever has it can read the runs.\n"
            f"From another machine: ssh -L {port}:{_ADDRESS}:{port} {socket.gethostname()}. "
            "Ctrl-C ends it.\n"
        )
        # Jobs on this host go first.
        os.nice(_NICE)
        server.serve(listener, token, log_dir)
    return 0


command = click.Command(
    "ui",
    help="Serve a live page about the runs in the log folder and the jobs that run on this host, "
    "for the browser of this machine: ranks over time, loss, steps, merged logs, why a run ended, "
    "stacks, and two runs side by side. It prints an address with a token, listens on 127.0.0.1 "
    "only, and ends with Ctrl-C. Needs starlette and uvicorn.",
    callback=_ui,
    params=[
        parser.log_dir(),
        parser.option(
            "port",
            "int",
            "The port to listen on; 0: any that is free.",
            default="0",
            minimum=0,
            maximum=65535,
            metavar="PORT",
        ),
    ],
)
