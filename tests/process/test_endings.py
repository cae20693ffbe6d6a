"""The end of a job is reported by a line, a command, or a URL; that never harms the job."""

from __future__ import annotations

import json
import signal
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from commandline import Command
from processes import assert_no_survivors
from waiting import until

from fleetrun.run import notification, proc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.extended


class Hook(HTTPServer):
    """A server that keeps what is posted to it, and answers with `status`."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.status = 200
        # The target of redirects, and requests other than POST.
        self.moved_to = ""
        self.others: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """The URL."""
        return f"http://127.0.0.1:{self.server_port}/hook-abcdef12"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Keep the body."""
        assert isinstance(self.server, Hook)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        if self.server.moved_to and self.path.startswith("/hook"):
            self.send_response(self.server.status)
            self.send_header("Location", self.server.moved_to)
            self.end_headers()
            return
        self.server.taken.append(json.loads(body))
        self.send_response(200 if self.server.moved_to else self.server.status)
        self.end_headers()

    def do_GET(self) -> None:
        """Keep the request."""
        assert isinstance(self.server, Hook)
        self.server.others.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def loud(job: Command) -> Command:
    """Run JOB without --quiet."""
    job.argv.remove("--quiet")
    return job


@pytest.mark.parametrize(
    ("code", "word"), [(0, "Done after"), (7, "Failed after")], ids=["done", "failed"]
)
def test_the_last_line_says_how_long_how_far_and_how_it_ended(
    code: int, word: str, tmp_path: Path
) -> None:
    script = f'echo 30 >"$FLEETRUN_HEARTBEAT"; exit {code}'
    ended = loud(Command(tmp_path, script, ranks=1)).run()
    assert ended.code == code
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"fleetrun: {word} ")
    assert last.endswith(f"and 30 steps (exit code {code}).")


def test_a_quiet_launch_has_no_last_line(tmp_path: Path) -> None:
    assert Command(tmp_path, "true").run().stderr == ""


def test_a_command_and_an_address_are_told_the_same(hook: Hook, tmp_path: Path) -> None:
    options = ("--on_end=cat >ended.json; echo told", f"--webhook={hook.url}", "--job_id=night")
    ended = Command(tmp_path, "[ $R = 0 ] || exit 7; sleep 60", *options).run()
    assert ended.code == 7
    assert "told" in ended.stderr
    document = json.loads((tmp_path / "ended.json").read_text())
    assert hook.taken == [document]
    assert (document["schema"], document["event"], document["job_id"]) == (1, "ended", "night")
    assert (document["exit_code"], document["rank"], document["signal"]) == (7, 1, None)
    assert (document["nodes"], document["processes"], document["attempts"]) == (1, 2, 1)
    assert document["verdict"] == "rank 1 exited with 7"
    assert document["log"] == str((tmp_path / "log" / "latest").resolve())


def test_no_secret_is_told_and_the_address_is_one(hook: Hook, tmp_path: Path) -> None:
    hook.status = 500
    options = (f"--webhook={hook.url}", "--env=DB_PASSWORD=abcdef99", "--job_id=abcdef99")
    ended = Command(tmp_path, "true", *options).run()
    assert ended.code == 0
    assert "HTTP status 500" in ended.stderr
    (told,) = hook.taken
    assert "abcdef99" not in json.dumps(told)
    files = [path for path in (tmp_path / "log").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert b"hook-abcdef12" not in path.read_bytes(), path
    assert "hook-abcdef12" not in ended.stderr


@pytest.mark.parametrize("command", ["exit 9", "no-such-command", "kill -9 $$"])
def test_a_command_that_fails_changes_no_exit_code(command: str, tmp_path: Path) -> None:
    ended = Command(tmp_path, "true", f"--on_end={command}").run()
    assert ended.code == 0
    assert "command of --on_end exited with" in ended.stderr


def test_a_command_and_an_address_that_hang_are_left(tmp_path: Path) -> None:
    remarks: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        pids = tmp_path / "pids"
        command = f"echo $$ >{pids}; sleep 600 & echo $! >>{pids}; wait"
        notification.notify("{}", command=command, url=url, log=remarks.append, timeout_s=2.0)
    assert len(remarks) == 2
    assert "did not end in time" in remarks[0]
    assert "no answer in time" in remarks[1]
    for pid in pids.read_text().split():
        until(partial(_is_gone, pid))


def _is_gone(pid: str) -> bool:
    return proc.stat(pid) is None


def test_a_signal_ends_the_wait_and_not_the_exit_code(tmp_path: Path) -> None:
    job = Command(tmp_path, "exit 5", "--on_end=touch begun; exec sleep 600")
    launcher = job.start_until("begun")
    launcher.send_signal(signal.SIGTERM)
    assert job.finish(launcher).code == 5
    assert_no_survivors(job.marker)
