"""`fleetrun on`: one command on all hosts, through real sshd."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import FLEETRUN, fleetrun
from processes import MARKER, assert_no_survivors
from sshd import ssh_option
from sshd_hosts import SSHD
from waiting import LONG_S, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SSHD, reason="there is no sshd here (Debian: openssh-server)"),
]

HOSTS = "--hosts=127.0.0.1,127.0.0.2"


@pytest.fixture
def marker() -> str:
    """Return the marker of a test's processes."""
    return os.urandom(8).hex()


@pytest.fixture
def ssh(tmp_path: Path, marker: str) -> str:
    """Return the option for an ssh whose every connection has an sshd of its own."""
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)
    return ssh_option(tmp_path / "ssh", marker)


def test_each_line_stands_after_its_host(tmp_path: Path, ssh: str, marker: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    done = fleetrun(
        "on", HOSTS, ssh, "--", "sh", "-c", "pwd; echo alas >&2; echo $0", "x y", folder=folder
    )
    assert done.returncode == 0, done.stderr
    expected = [
        f"[{host}] {line}" for host in ("127.0.0.1", "127.0.0.2") for line in (folder, "x y")
    ]
    assert sorted(done.stdout.splitlines()) == expected
    assert sorted(done.stderr.splitlines()) == ["[127.0.0.1] alas", "[127.0.0.2] alas"]
    assert_no_survivors(marker)


def test_one_word_is_read_by_the_shell_and_one_host_has_no_prefix(tmp_path: Path, ssh: str) -> None:
    done = fleetrun("on", "--hosts=127.0.0.1", ssh, "printf 'a\\nb' | tail -1", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "b\n")


def test_a_folder_that_a_host_lacks_is_no_trouble(tmp_path: Path, ssh: str) -> None:
    (tmp_path / "gone").mkdir()
    words = (*FLEETRUN, "on", "--hosts=127.0.0.1", ssh, "cat; echo $HOME; pwd")
    script = f"rm -r {tmp_path}/gone"
    done = fleetrun("on", "--hosts=127.0.0.1", ssh, script, folder=tmp_path / "gone")
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="not for it",
        capture_output=True,
        text=True,
        check=False,
    )
    # It gets no input, so it does not wait for any.
    assert done.stdout.splitlines()[1:] == [str(tmp_path)]


def test_the_first_bad_code_counts_and_each_is_named(tmp_path: Path, ssh: str) -> None:
    script = 'touch "$1" 2>/dev/null; [ -e here ] && exit 7; touch here; exit 0'
    done = fleetrun("on", HOSTS, "--ssh_fanout=1", ssh, script, folder=tmp_path)
    assert done.returncode == 7
    assert done.stderr == "fleetrun: on: 127.0.0.2  it ended with 7\n"
    done = fleetrun("on", "--hosts=nowhere,127.0.0.1", ssh, "--", "echo", "x", folder=tmp_path)
    assert done.returncode == 3
    assert done.stdout == "[127.0.0.1] x\n"
    assert "fleetrun: on: nowhere  ssh: " in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_ends_everywhere_with_this_one(
    tmp_path: Path, ssh: str, marker: str, signum: signal.Signals
) -> None:
    script = "echo x > up.$$; trap 'touch asked; exit' TERM; sleep 1000 | sleep 1000 & wait"
    process = subprocess.Popen(
        [*FLEETRUN, "on", HOSTS, ssh, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARKER: marker},
    )
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2)
    process.send_signal(signum)
    assert process.wait(LONG_S) in {128 + signum, -signal.SIGKILL}
    assert_no_survivors(marker)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "on: give the command to run: `fleetrun on --hosts=a,b -- nvidia-smi`."),
        (("--", "true"), "on: name the hosts with --hosts or --hostfile."),
        (("--hosts=a,,b", "true"), "--hosts=a,,b"),
        (("--hosst=a", "true"), "on: no such option: --hosst; did you mean --hosts?"),
        (("--hosts=a", "--ssh=nosuchssh", "true"), "there is no such program here"),
    ],
)
def test_a_slip_is_one_sentence(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    done = fleetrun("on", *words, folder=tmp_path)
    assert done.returncode in {2, 3}
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_heeds_no_term_is_killed(tmp_path: Path, ssh: str, marker: str) -> None:
    script = "trap '' TERM; touch up; while :; do sleep 1; done"
    process = subprocess.Popen(
        [*FLEETRUN, "on", "--hosts=127.0.0.1", ssh, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARKER: marker},
    )
    until((tmp_path / "up").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG_S) == 130
    assert_no_survivors(marker)


def test_what_a_command_leaves_on_purpose_stays(tmp_path: Path, ssh: str, marker: str) -> None:
    script = "until [ -e go ]; do sleep 0.1; done >/dev/null 2>&1 & echo $!"
    done = fleetrun("on", "--hosts=127.0.0.1", ssh, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    os.kill(int(done.stdout), 0)
    (tmp_path / "go").touch()
    assert_no_survivors(marker)
