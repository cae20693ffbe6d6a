"""`--debug`: an editor attaches to a waiting rank."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import Command
from waiting import LONG_S, until

from fleetrun.plan import debug

if TYPE_CHECKING:
    from pathlib import Path
pytestmark = pytest.mark.slow

SCRIPT = """
open(f"passed{rank}", "w").close()
"""


def test_a_rank_waits_for_an_editor_where_the_launch_says(tmp_path: Path) -> None:
    # A rank that waits for its user does not hang.
    job = Command.python(tmp_path, SCRIPT, "--debug=1", "--hang_timeout=0.2")
    job.argv.remove("--quiet")
    endpoints = tmp_path / "endpoints"
    env = {"PYTHONPATH": str(ROOT), "DEBUGPY_ADAPTER_ENDPOINTS": str(endpoints)}
    with socket.create_server(("127.0.0.1", debug.FIRST_PORT + 1)):
        launcher = job.start_until("passed0", env=env)
        # debugpy drops a connection that comes before it has noted that it listens.
        until(lambda: endpoints.exists() and endpoints.read_text().endswith("\n"))
    port = json.loads(endpoints.read_text())["client"]["port"]
    assert port > debug.FIRST_PORT + 1
    with socket.create_connection(("127.0.0.1", port), LONG_S) as editor:
        # The debugger speaks first.
        assert editor.recv(16) == b"Content-Length: "
    assert not (tmp_path / "passed1").exists()
    launcher.terminate()
    ended = job.finish(launcher)
    assert ended.code == 143
    assert f"Remote Attach does): 1 at 127.0.0.1:{port}." in ended.stderr


def test_ranks_are_numbers(tmp_path: Path) -> None:
    refused = Command.python(tmp_path, SCRIPT, "--debug=first").run()
    says = "fleetrun: --debug=first: give all, or ranks such as 0,3 or 0-3.\n"
    assert (refused.code, refused.stderr) == (2, says)
