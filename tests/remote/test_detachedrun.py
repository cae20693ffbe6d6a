"""A job by ssh in the background: found, watched and ended on the host where it was started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commandline import Command, fleetrun, process_in_background, started
from processes import assert_no_survivors
from sshd import by_ssh, instead_of_ssh
from waiting import until

from fleetrun.rundir import lockfile

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.slow


def begun(command: Command) -> subprocess.CompletedProcess[str]:
    """Start COMMAND in the background; a host alone takes no port that a test holds."""
    command.argv = [word for word in command.argv if not word.startswith("--start_port")]
    return command.detach()


def test_it_is_listed_and_its_console_and_exit_code_can_be_had(tmp_path: Path) -> None:
    script = "touch up.$R; until [ -e go ]; do sleep 0.1; done; echo last; exit 7"
    command = by_ssh(tmp_path, script, hosts="127.0.0.1")
    done = begun(command)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    pid = str(process_in_background(done.stderr))
    command.wait_for("up.0")
    (record,) = map(json.loads, fleetrun("ps", "--json", pid).stdout.splitlines())
    assert (record["job"], record["pid"], record["folder"]) == ("default", int(pid), str(tmp_path))
    assert "--hosts=127.0.0.1" in record["command"][0]
    assert lockfile.is_running(record["run_dir"])
    with started("attach", pid) as watcher:
        assert watcher.stdout is not None
        assert b"in the background as process" in watcher.stdout.readline()
        (tmp_path / "go").touch()
        rest = watcher.stdout.read()
    assert watcher.returncode == 7
    assert b"last" in rest.splitlines()
    assert_no_survivors(command.marker)


def test_it_is_stopped_everywhere(tmp_path: Path) -> None:
    hold = 'trap "touch asked.$R; exit 0" TERM; touch up.$R; sleep 1000 & wait'
    command = by_ssh(tmp_path, hold, hosts="127.0.0.1")
    pid = str(process_in_background(begun(command).stderr))
    command.wait_for("up.0")
    done = fleetrun("stop", pid)
    assert done.returncode == 0
    assert done.stderr.endswith(" has ended: interrupted by SIGTERM\n")
    until((tmp_path / "asked.0").exists)
    assert_no_survivors(command.marker)


def test_what_is_wrong_before_it_begins_is_said_in_front(tmp_path: Path) -> None:
    command = Command(tmp_path, "touch started", ranks=1)
    ssh = instead_of_ssh(tmp_path, "echo no >&2; exit 255")
    command.argv[-1:-1] = ["--hosts=a", ssh]
    done = begun(command)
    assert done.returncode == 3
    assert done.stderr == "fleetrun: a  ssh: no\nfleetrun: Nothing was started.\n"
    assert list((tmp_path / "log").iterdir()) == []
    assert_no_survivors(command.marker)
