"""`fleetrun doctor --hosts`: all hosts at once, with the unreachable ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from sshd import HOSTS, by_ssh, instead_of_ssh

if TYPE_CHECKING:
    from pathlib import Path

    from commandline import Ended

pytestmark = pytest.mark.extended


def doctor(command: Command, *options: str) -> Ended:
    """Turn COMMAND into a check-up of its hosts."""
    at = command.argv.index("fleetrun")
    command.argv[at + 1 : -1] = ["doctor", *options, *command.argv[at + 3 : -1]]
    return command.finish(command.start())


@pytest.mark.slow
def test_hosts_are_checked_at_once_and_meet_on_the_ports_of_the_job(tmp_path: Path) -> None:
    done = doctor(by_ssh(tmp_path, "", "--env=SECRET_KEY=hunter2"), "--json", "--wait=60")
    assert done.code in {0, 3}, done.stderr
    document = json.loads(done.out)
    assert list(document["hosts"]) == HOSTS.split(",")
    for host, other in zip(HOSTS.split(","), reversed(HOSTS.split(",")), strict=True):
        findings = document["hosts"][host]["findings"]
        met = [finding for finding in findings if finding["check"] == "connection"]
        assert [(finding["level"], other in finding["seen"]) for finding in met] == [("ok", True)]
        assert any(finding["check"] == "Paddle" for finding in findings)
    assert b"hunter2" not in done.out


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    ssh = instead_of_ssh(tmp_path, "echo Permission denied >&2; exit 255")
    command = Command(tmp_path, "", ranks=1)
    command.argv[-1:-1] = ["--hosts=a,b", ssh]
    done = doctor(command)
    assert done.code == 3
    why = "ssh: Permission denied"
    assert done.out.decode() == f"a\n  {why}\nb\n  {why}\n"
