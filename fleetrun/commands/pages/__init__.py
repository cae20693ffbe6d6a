"""`fleetrun report` and `fleetrun ui`: one page about runs, as a file for offline use, or live."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import quote

import click

from fleetrun.cli import parser, types
from fleetrun.commands.logs import choose
from fleetrun.commands.pages import rundata
from fleetrun.commands.pages.server import ADDRESS, PageServer, page
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.printing import put
from fleetrun.rundir import names
from fleetrun.rundir.folder import PRIVATE
from fleetrun.text import visible


def _report(run: tuple[str, ...], log_dir: str, out: str | None) -> int:
    """Write the page; UsageError if a run is missing."""
    if len(run) > 2:  # beside each other
        raise UsageError("report: give one run, or two to compare.")
    # The hosts of a job are one run.
    chosen = [choose.find_runs([word], log_dir) for word in run] or [choose.find_runs([], log_dir)]
    # In the folder of a single run, or here for two.
    place = Path(chosen[0][0].path) if len(chosen) == 1 else Path()
    path = (Path(out) if out else place / names.PAGE).absolute()

    def link(log: str) -> str:
        return quote(os.path.relpath(log, path.parent))

    text = page([rundata.read(several, link=link) for several in chosen])
    try:
        # As private as its sources.
        path.touch(PRIVATE)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written ({error.strerror}); see --out.") from None
    return put(f"{visible(str(path))}\n")


report = click.Command(
    "report",
    help="Write one HTML file about a run, which opens without a network: the timeline of "
    "processes, why it ended, losses, steps, memory, the strategy in effect, versions, settings, "
    "links to the logs. RUN is as for `fleetrun logs`; two runs are compared side by side. The "
    "file is report.html in the folder of the run, or for two runs in the current folder.",
    callback=_report,
    params=[
        click.Argument(["run"], nargs=-1, metavar="[RUN [RUN]]"),
        parser.LOG_DIR,
        parser.option("out", types.FILE, "The file to write.", metavar="FILE"),
    ],
)


def _ui(log_dir: str, port: int) -> int:
    """Serve the page until Ctrl-C; EnvironmentFault if that is impossible."""
    try:
        server = PageServer(port, log_dir)
    except OSError as error:
        raise EnvironmentFault(
            f"ui: port {port} of {ADDRESS} cannot be used ({error.strerror}): leave --port out to "
            "get a free one."
        ) from None
    with server:
        port = server.server_address[1]
        put(
            f"http://{ADDRESS}:{port}/#token={server.token}\n"
            "Open this address in a browser of this machine; whoever has it can read the runs.\n"
            f"From another machine: ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}. "
            "Ctrl-C ends it.\n"
        )
        # Jobs on this host go first.
        os.nice(10)
        server.serve_forever()
    return 0


ui = click.Command(
    "ui",
    help="Serve a live page about the runs in the log folder for the browser of this machine: "
    "ranks over time, loss, steps, why a run ended, and two runs side by side. It "
    "prints an address with a token, listens on 127.0.0.1 only, and ends with Ctrl-C.",
    callback=_ui,
    params=[
        parser.LOG_DIR,
        parser.option("port", types.number(0, 65535), "0: any.", default="0"),
    ],
)
