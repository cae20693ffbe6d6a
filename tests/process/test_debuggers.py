"""`--debug`: an editor attaches to a waiting rank."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from checkout import ROOT
from commandline import Command
from waiting import LONG_S, until

from fleetrun.plan import debug

if TYPE_CHECKING:
    from pathlib import Path
pytestmark = pytest.mark.slow

SCRIPT = """
secret = 6 * 7 + rank
open(f"passed{rank}", "w").close()
print("argv", sys.argv[1:], __name__, os.path.isfile(__file__), flush=True)
"""
# The line of `open` in the script, below what Command.python puts before it.
LINE = 5


class Editor:
    """An editor's side of the Debug Adapter Protocol."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), LONG_S)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._unread: list[dict[str, Any]] = []

    def ask(self, command: str, **arguments: object) -> int:
        """Send a request and return its number."""
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command}
        text = json.dumps({**request, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(text) + text)
        return self._number

    def wait(self, **fields: object) -> dict[str, Any]:
        """Return the first message with FIELDS that was not returned yet."""
        while True:
            for message in self._unread:
                if fields.items() <= message.items():
                    self._unread.remove(message)
                    return message
            length = 0
            while (line := self._file.readline().strip()) or not length:
                assert line, "the debugger has hung up"
                length = int(line.rpartition(b":")[2])
            self._unread.append(json.loads(self._file.read(length)))

    def get(self, command: str, **arguments: object) -> dict[str, Any]:
        """Send a request and return the body of the answer."""
        answer = self.wait(type="response", request_seq=self.ask(command, **arguments))
        assert answer["success"], answer
        body: dict[str, Any] = answer.get("body", {})
        return body

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()


@pytest.mark.parametrize("form", ["file", "module"])
def test_an_editor_attaches_and_stops_the_rank_at_a_breakpoint(tmp_path: Path, form: str) -> None:
    # A rank that waits for its user does not hang.
    job = Command.python(tmp_path, SCRIPT, "--debug=1", "--hang_timeout=0.2")
    job.argv.remove("--quiet")
    script = job.argv[-1]
    if form == "module":
        script = str(tmp_path / "training.py")
        os.rename(job.argv[-1], script)
        job.argv[-1:] = ["-m", "training"]
    job.argv.append("x")
    endpoints = tmp_path / "endpoints"
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "DEBUGPY_ADAPTER_ENDPOINTS": str(endpoints)}
    with socket.create_server(("127.0.0.1", debug.FIRST_PORT + 1)):
        launcher = job.start_until("passed0", env=env)
        # debugpy drops a connection that comes before it has noted that it listens.
        until(lambda: endpoints.exists() and endpoints.read_text().endswith("\n"))
    port = json.loads(endpoints.read_text())["client"]["port"]
    assert port > debug.FIRST_PORT + 1
    with closing(Editor(port)) as editor:
        editor.get("initialize", adapterID="test")
        attaching = editor.ask("attach", justMyCode=True)
        editor.wait(type="event", event="initialized")
        editor.get("setBreakpoints", source={"path": script}, breakpoints=[{"line": LINE}])
        editor.get("configurationDone")
        editor.wait(type="response", request_seq=attaching)
        thread = editor.wait(type="event", event="stopped")["body"]["threadId"]
        assert not (tmp_path / "passed1").exists()
        frame = editor.get("stackTrace", threadId=thread)["stackFrames"][0]
        assert (frame["source"]["path"], frame["line"]) == (script, LINE)
        assert editor.get("evaluate", expression="secret", frameId=frame["id"])["result"] == "43"
        editor.ask("continue", threadId=thread)
        editor.wait(type="event", event="terminated")
    ended = job.finish(launcher)
    assert ended.code == 0
    assert "argv ['x'] __main__ True" in job.log(1).read_text()
    assert "warning" not in job.log(1).read_text().lower()
    assert f"Remote Attach does): 1 at 127.0.0.1:{port}." in ended.stderr


def test_ranks_are_numbers(tmp_path: Path) -> None:
    refused = Command.python(tmp_path, SCRIPT, "--debug=first").run()
    says = "fleetrun: --debug=first: give all, or ranks such as 0,3 or 0-3.\n"
    assert (refused.code, refused.stderr) == (2, says)
