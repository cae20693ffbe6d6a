"""A job by ssh, through real sshd: one verdict, and nothing left on any host."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from processes import assert_no_survivors
from sshd import HOSTS, by_instead, by_ssh, instead_of_ssh
from waiting import LONG_S, until

from fleetrun.cli import app, request
from fleetrun.cli.argv import split
from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import ssh, sshjob

if TYPE_CHECKING:
    from fleetrun.model import Request

pytestmark = pytest.mark.slow

HOLD = 'trap "touch asked.$R; exit 0" TERM; touch up.$R; sleep 1000 & wait'


def test_two_hosts_are_one_job_and_all_arrives_as_it_was(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], "
        "open('rank-' + os.environ['PADDLE_TRAINER_ID'], 'w')); print('out', flush=True)"
    )
    command = by_ssh(tmp_path, "")
    script = tmp_path / "dump.py"
    script.write_text(code)
    arguments = ["--hosts=x", "a b", "", "$HOME", "'\"\\", "ü\udcff", "--"]
    command.argv[-1:] = [str(script), *arguments]
    odd = "a b=c\n'\"$x ü\udcff"
    ended = command.finish(command.start(env={"PADDLE_ODD": odd, "SECRET_OF_MINE": "hunter2"}))
    assert ended.code == 0, ended.stderr
    assert ended.out == b"out\n"
    endpoints = []
    for rank in range(2):
        heard, environ = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert heard == arguments
        assert environ["PADDLE_ODD"] == odd
        # Only variables that trainings read are sent along.
        assert "SECRET_OF_MINE" not in environ
        assert environ["PADDLE_TRAINERS_NUM"] == "2"
        endpoints.append(environ["PADDLE_CURRENT_ENDPOINT"].partition(":")[0])
    assert endpoints == HOSTS.split(",")


def test_hosts_by_ssh_share_a_token_of_the_jobs_own(tmp_path: Path) -> None:
    shown = 'tr "\\0" "\\n" < /proc/$PPID/environ | grep ^FLEETRUN_TOKEN= > launcher.$R'
    command = by_ssh(tmp_path, f'{shown}; echo "${{FLEETRUN_TOKEN-none}}" > rank.$R')
    ended = command.run()
    assert ended.code == 0, ended.stderr
    ours, other = ((tmp_path / f"launcher.{rank}").read_text() for rank in range(2))
    assert ours == other
    assert len(ours) == len("FLEETRUN_TOKEN=\n") + 64
    assert (tmp_path / "rank.0").read_text() == (tmp_path / "rank.1").read_text() == "none\n"


def test_the_first_failure_ends_the_job_everywhere_with_its_code(tmp_path: Path) -> None:
    command = by_ssh(
        tmp_path, f"[ $R = 1 ] && {{ until [ -e up.0 ]; do sleep 0.1; done; exit 7; }}; {HOLD}"
    )
    ended = command.run()
    assert ended.code == 7
    assert "[127.0.0.2] fleetrun: rank 1 exited with 7." in ended.stderr
    assert "[127.0.0.1] fleetrun: Rank 1 exited with 7 on 127.0.0.2" in ended.stderr
    assert (tmp_path / "asked.0").exists()


WORLD = (
    "echo $FLEETRUN_RUN_DIR $PADDLE_CURRENT_ENDPOINT > up.$R.of.$PADDLE_TRAINERS_NUM;"
    " until [ -e go ]; do sleep 0.1; done"
)


@pytest.mark.parametrize("hosts", ["nowhere,127.0.0.1,127.0.0.2", "127.0.0.1,nowhere,nowhere2"])
def test_an_elastic_job_needs_its_first_host_and_enough_of_the_others(
    tmp_path: Path, hosts: str
) -> None:
    command = by_ssh(tmp_path, "touch up", "--nnodes=2:3", hosts=hosts)
    config = tmp_path / "ssh" / "ssh_config"
    config.write_text(config.read_text().replace("Host nowhere", "Host nowhere nowhere2"))
    ended = command.run()
    assert ended.code == 3
    assert "Nothing was started." in ended.stderr
    assert not (tmp_path / "up").exists()


def test_an_elastic_job_goes_on_without_a_lost_host(tmp_path: Path) -> None:
    hosts = "127.0.0.1,127.0.0.2,127.0.0.3"
    options = ("--nnodes=2:3", "--elastic_timeout=0.2", "--heartbeat_timeout=4")
    command = by_ssh(tmp_path, WORLD, *options, hosts=hosts)
    process = command.start()
    command.wait_for("up.0.of.3", "up.1.of.3", "up.2.of.3")
    # Its run directory may come a little later.
    run = tmp_path / "up.2.of.3"
    until(lambda: run.read_text().endswith("\n"))
    folder, endpoint = run.read_text().split()
    # On a busy machine, two may begin without the third, which is the last one then.
    lost = endpoint.partition(":")[0]
    launcher = Path(folder, "lock").read_text().split()[1]
    os.kill(int(launcher), signal.SIGKILL)
    command.wait_for("up.0.of.2", "up.1.of.2")
    (tmp_path / "go").touch()
    ended = command.finish(process)
    assert ended.code == 0, ended.stderr
    assert f"interrupted by SIGKILL on {lost}. All ranks start again" in ended.stderr


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_head_is_ended(tmp_path: Path, signum: int) -> None:
    command = by_ssh(tmp_path, HOLD)
    process = command.start()
    command.wait_for("up.0", "up.1")
    process.send_signal(signum)
    ended = command.finish(process)
    assert ended.code == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert (tmp_path / "asked.0").exists()
    assert (tmp_path / "asked.1").exists()


def test_by_nohup_it_goes_on_when_the_terminal_is_closed(tmp_path: Path) -> None:
    command = by_ssh(tmp_path, "touch up.$R; until [ -e go ]; do sleep 0.1; done; exit 7")
    command.argv.insert(0, "nohup")
    process = command.start()
    command.wait_for("up.0", "up.1")
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert command.finish(process).code == 7


def test_a_greeting_without_an_end_of_its_line_is_none_of_fleetruns(tmp_path: Path) -> None:
    ended = by_ssh(tmp_path, "exit 7", greeting="-n Welcome >&2").run()
    assert ended.code == 7, ended.stderr


def test_keys_that_would_stop_or_kill_the_head_have_no_effect(tmp_path: Path) -> None:
    command = by_ssh(tmp_path, "touch up.$R; until [ -e go ]; do sleep 0.1; done; exit 7")
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = command.start(stdout=file, stderr=file)
    command.wait_for("up.0", "up.1")
    for signum in (signal.SIGQUIT, signal.SIGTSTP):
        process.send_signal(signum)
    until(lambda: output.read_bytes().count(b"Ctrl-Z and Ctrl-\\ have no effect") == 2)
    (tmp_path / "go").touch()
    assert process.wait(LONG_S) == 7


def test_asked_twice_the_head_lets_them_be_killed(tmp_path: Path) -> None:
    command = by_ssh(
        tmp_path,
        'trap "touch asked.$R" TERM; echo $$ > up.$R; while :; do sleep 1000 & wait; done',
        "--grace=900",
    )
    process = command.start()
    command.wait_for("up.0", "up.1")
    process.send_signal(signal.SIGINT)
    command.wait_for("asked.0", "asked.1")

    ranks = [Path("/proc", (tmp_path / f"up.{rank}").read_text().strip()) for rank in range(2)]

    def are_gone() -> bool:
        # A launcher takes two simultaneous signals for one. Another one would kill a head that has
        # ended its job.
        if any(rank.exists() for rank in ranks):
            process.send_signal(signal.SIGINT)
            return False
        return True

    until(are_gone)
    assert command.finish(process).code == 130


def test_a_lost_connection_ends_the_job_on_both_sides_of_it(tmp_path: Path) -> None:
    command = by_ssh(tmp_path, HOLD)
    process = command.start()
    command.wait_for("up.0", "up.1")
    to_second = next(
        int(child)
        for children in Path(f"/proc/{process.pid}/task").glob("*/children")
        for child in children.read_text().split()
        if b"\x00127.0.0.2\x00" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    os.kill(to_second, signal.SIGKILL)
    process.wait(LONG_S)
    # The other side ends by itself.
    assert_no_survivors(command.marker)
    ended = command.finish(process)
    assert ended.code == 137
    assert "fleetrun: The connection to 127.0.0.2 was lost" in ended.stderr
    until((tmp_path / "asked.1").exists)


def test_what_a_launcher_finds_is_said_with_its_host(tmp_path: Path) -> None:
    command = by_ssh(tmp_path, "")
    command.argv[-1] = "nosuch.py"
    ended = command.run()
    assert ended.code == 3
    assert re.search(r"^\[127.0.0.[12]\] fleetrun: There is no script nosuch.py", ended.stderr)
    assert "nterrupted" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("known_hosts", "Host key verification failed."),
        ("authorized_keys", "Permission denied (publickey,password)."),
    ],
)
def test_a_changed_host_key_and_a_password_are_said_and_never_waited_for(
    tmp_path: Path, name: str, ending: str
) -> None:
    command = by_ssh(tmp_path, "touch started", hosts="127.0.0.1")
    ssh = tmp_path / "ssh"
    config = ssh / "sshd_config"
    config.write_text(
        config.read_text().replace("PasswordAuthentication no", "PasswordAuthentication yes", 1)
    )
    # Any key except that of the host, and of the user.
    other = {"known_hosts": "id.pub", "authorized_keys": "hostkey.pub"}[name]
    before = "127.0.0.1 " if name == "known_hosts" else ""
    (ssh / name).write_text(before + (ssh / other).read_text())
    at = next(at for at, word in enumerate(command.argv) if word.startswith("--ssh="))
    command.argv[at] += " -o StrictHostKeyChecking=yes" if before else ""
    ended = command.run()
    assert ended.code == 3
    fault, end = ended.stderr.splitlines()
    assert fault.startswith("fleetrun: 127.0.0.1  ssh: ")
    assert fault.endswith(ending)
    assert end == "fleetrun: Nothing was started."
    assert not (tmp_path / "started").exists()


HERE = 'exec sh -c "$command"'
# The second host's launcher ends with 1, as if it were cut off; the first one's ends only when the
# head knows of that.
CUT_OFF = """
case "$*" in *" 127.0.0.2 "*)
    sh -c "$command"
    echo $$ > second
    exit 1;;
esac
sh -c "$command"
code=$?
until [ -s second ] && ! kill -0 "$(cat second)" 2> /dev/null; do sleep 0.05; done
exit $code
"""


# The connection to the second host ends badly, after the first one's launcher has succeeded.
LOST_LATE = """
case "$*" in *" 127.0.0.2 "*)
    sh -c "$command"
    until [ -s first ] && ! kill -0 "$(cat first)" 2> /dev/null; do sleep 0.05; done
    # Heartbeats, before which the head has seen that.
    read -r beat; read -r beat; read -r beat
    exit 255;;
esac
echo $$ > first
exec sh -c "$command"
"""


@pytest.mark.parametrize(
    ("ssh", "hosts", "rank", "code", "why"),
    [
        (LOST_LATE, HOSTS, 0, 0, "The connection to 127.0.0.2 was lost"),
        # A host that was cut off and ends first hides no exit code.
        (CUT_OFF, HOSTS, 7, 7, ""),
        # sys.exit(-1) is 255, too.
        (HERE, "127.0.0.1", 255, 255, "was lost, or the job has ended with 255 there"),
    ],
)
def test_the_first_launchers_end_is_that_of_the_job(
    tmp_path: Path,
    ssh: str,
    hosts: str,
    *,
    rank: int,
    code: int,
    why: str,
) -> None:
    ended = by_instead(tmp_path, ssh, f"exit {rank}", hosts=hosts).run()
    assert ended.code == code, ended.stderr
    assert why in ended.stderr


def test_a_stuck_ssh_is_killed_when_the_job_cannot_start(tmp_path: Path) -> None:
    # The first host cannot take part, and the way to the second, a script, is stuck.
    instead = (
        'case "$*" in *" 127.0.0.1 "*) until [ -e up ]; do sleep 0.02; done\n'
        "echo no >&2; exit 255;; esac\nprintf '\\036\\002fleetrun\\n' >&2\n"
        "sleep 1000 & echo $! > started; mv started up; wait"
    )
    command = by_instead(tmp_path, instead, "true", hosts=HOSTS)
    ended = command.run()
    assert ended.code == 3
    assert ended.stderr == "fleetrun: 127.0.0.1  ssh: no\nfleetrun: Nothing was started.\n"
    # Nor is the child of a script instead of ssh left.
    child = Path("/proc", (tmp_path / "up").read_text().strip(), "cmdline")
    until(lambda: not child.exists() or not child.read_bytes())


def test_files_of_the_folder_are_not_taken_for_pythons_own_modules(tmp_path: Path) -> None:
    for name in ("json", "subprocess", "select", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    command = by_instead(tmp_path, HERE, "touch started")
    command.argv[1:3] = [str(ROOT / "fleetrun" / "__main__.py")]
    ended = command.run()
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "started").exists()


def test_hosts_beyond_the_limit_of_open_files_are_named(tmp_path: Path) -> None:
    hosts = ",".join(f"127.0.0.{last}" for last in range(1, 41))
    command = by_instead(tmp_path, "echo no >&2; sleep 2; exit 255", "true", hosts=hosts)
    ended = command.finish(command.start(["prlimit", "--nofile=40"]))
    assert ended.code == 3
    assert "127.0.0.40  ssh: it cannot be started here (Too many open files)" in ended.stderr
    assert ended.stderr.endswith("fleetrun: Nothing was started.\n")


def test_a_host_whose_ssh_cannot_be_started_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_bytes(b"\x7fELF no program")
    ssh.chmod(0o755)
    assert app.main(["--hosts=a,b", f"--ssh={ssh}", "t.py"], environ={}) == 3
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("fleetrun: a  ssh: it cannot be started here (Exec format error")
    assert lines[2] == "fleetrun: Nothing was started."


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (1, "a  its ssh ended with 1"),
        (127, "a  fleetrun is not installed there for {python} (its ssh ended with 127): install"),
        (255, "a  its ssh ended with 255"),
    ],
)
def test_an_ssh_that_says_nothing_is_given_as_the_reason(
    code: int, line: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    instead = instead_of_ssh(tmp_path, f"exit {code}")
    assert app.main(["--hosts=a:1", instead, "t.py"], environ={}) == 3
    assert capfd.readouterr().err.startswith(f"fleetrun: {line.format(python=sys.executable)}")


def a_request(*words: str) -> Request:
    parsed = split(words)
    return request.resolve(parsed, {})._replace(typed=words, given=parsed.given)


@pytest.mark.skipif(not shutil.which("ssh"), reason="there is no ssh here")
def test_an_alias_is_the_address_that_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host worker\n  HostName 10.0.0.7\n")
    hosts = [HostEntry("worker", 8), HostEntry("10.0.0.8", 8)]
    words = ["ssh", "-F", str(tmp_path / "config")]
    assert ssh.addresses(words, hosts) == ["10.0.0.7", "10.0.0.8"]


def test_each_launcher_is_given_its_host_and_all_but_the_heads_own_options() -> None:
    wanted = a_request(
        "--hosts=a:8,b:8", "--ssh=ssh -v", "--strategy", "overlap", "--tee", "t.py", "--hosts=c"
    )
    words = sshjob.arguments(wanted, HostEntry("b", 8), ["a", "10.0.0.2"], 1)
    assert words == (
        *("--ips=a,10.0.0.2", "--host=10.0.0.2", "--nproc_per_node=8"),
        *("--strategy=overlap", "--tee=all", "--", "t.py", "--hosts=c"),
    )
    alone = sshjob.arguments(a_request("--hosts=a:8", "t.py"), HostEntry("a", 2), ["a"], 0)
    assert alone == ("--nproc_per_node=2", "--", "t.py")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("--hosts=a,b", "--dry-run"),
            "cannot be used with --detach (write `nohup fleetrun ... &`) or --dry-run (--ips",
        ),
        (("--hosts=a", "--hostfile=f"), "give one of them"),
        (("--hostfile=/nowhere/f",), "--hostfile=/nowhere/f cannot be read (No such file"),
        (("--hosts=a", "--ips=b,c"), "determines --ips itself: omit --ips, or --hosts (--host "),
        (("--hosts=a,b", "--nnodes=3:4"), "--nnodes=3:4: --hosts names 2 hosts; their number must"),
        (("--hosts=a,b,c", "--nnodes=1:2"), "--nnodes=1:2: --hosts names 3 hosts; their number"),
        (
            ("--hosts=a,b", "--rank=1", "--dry-run"),
            "determines --rank itself: omit --rank, or --hosts (--host is the address",
        ),
        (("--hosts=a", "--detach"), "--hosts and --hostfile cannot be used with --detach (write"),
        (("--hosts=a", "--ssh=ssh 'x"), "a quotation mark is not closed"),
        (("--hosts=a", "--ssh=nosuchssh"), "--ssh=nosuchssh: there is no such program here"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main([*words, "t.py"], environ={}) in {2, 3}
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert problem in err
