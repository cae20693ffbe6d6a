"""Jobs whose processes have roles, through the real command line: which ones are waited for."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING

import ports
import pytest
from commandline import Command
from meetings import Job
from waiting import until

from fleetrun.host import paddles
from fleetrun.plan.modes import BY_WORD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow

# A server listens, and prints that.
LISTEN = (
    "import os, pathlib, signal, socket; "
    "server = socket.create_server((os.environ['POD_IP'], int(os.environ['PADDLE_PORT']))); "
    "pathlib.Path('serving' + os.environ['FLEETRUN_HEARTBEAT'][-1]).touch(); "
    "signal.pause()"
)
SERVE = f'exec {sys.executable} -S -E -c "{LISTEN}"'
IDLE = "sleep 60"
TWO_AND_TWO = ("--server_num=2", "--worker_num=2")


def roles(
    folder: Path,
    *options: str,
    server: str = SERVE,
    trainer: str = "exit 0",
    others: str = IDLE,
) -> Command:
    """Make a job of shell scripts, one for each role; $N is a process's number within its role."""
    script = f"""
    N=${{FLEETRUN_HEARTBEAT##*.}}
    case $TRAINING_ROLE in
    PSERVER) {server} ;;
    TRAINER) {trainer} ;;
    *) {others} ;;
    esac
    """
    return Command(folder, script, *(options or TWO_AND_TWO), ranks=1)


def test_the_job_is_done_when_its_trainers_are(tmp_path: Path) -> None:
    done = roles(tmp_path, trainer="echo trained").run()
    assert (done.code, done.out, done.stderr) == (0, b"trained\n", "")
    names = {path.name for path in (tmp_path / "log").iterdir()}
    assert names >= {"serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1", "endpoints.log"}


def test_every_role_has_its_logs(tmp_path: Path) -> None:
    options = (*TWO_AND_TWO, "--heter_worker_num=1;1", "--coordinator_num=1")
    # Processes after the trainers are started, too, before the job is done.
    wait = "until [ -e HETER_TRAINER0 ] && [ -e COORDINATOR0 ]; do sleep 0.01; done"
    job = roles(tmp_path, *options, trainer=wait, others=f"touch $TRAINING_ROLE$N; {IDLE}")
    assert job.run().code == 0
    names = {path.name for path in (tmp_path / "log").iterdir()}
    assert names >= {"heterlog.0", "heterlog.1", "coordinatorlog.0"}


def test_s14_a_dead_server_ends_the_job_at_once_and_is_named(tmp_path: Path) -> None:
    kill = "[ $N = 1 ] && { until [ -e training ]; do sleep 0.01; done; kill -KILL $$; }"
    done = roles(tmp_path, server=f"( {kill} ) & {SERVE}", trainer=f"touch training; {IDLE}").run()
    # The background shell's $$ is the server itself.
    assert done.code == 137
    assert done.stderr.startswith("fleetrun: server 1 was killed by SIGKILL")
    assert "serverlog.1" in done.stderr


def test_s52_s55_a_restart_starts_servers_anew_before_trainers(tmp_path: Path) -> None:
    fail = "[ $N$PADDLE_RESTART_COUNT = 10 ] && exit 3"
    note = "echo $PADDLE_PSERVERS_IP_PORT_LIST > list$PADDLE_RESTART_COUNT"
    wait = f"[ $PADDLE_RESTART_COUNT = 0 ] && {IDLE}"
    job = roles(
        tmp_path, *TWO_AND_TWO, "--max_restart=1", trainer=f"{note}; {fail}; {wait}; exit 0"
    )
    assert job.run().code == 0
    assert (tmp_path / "list0").read_text() != (tmp_path / "list1").read_text()
    started = [
        event["process"]
        for event in job.events()
        if event["event"] == "started" and event["attempt"] == 1
    ]
    assert started == ["server.0", "server.1", "trainer.0", "trainer.1"]
    assert (tmp_path / "log/latest/serverlog.1.attempt1").exists()


# -- several hosts -------------------------------------------------------------------------------


HOSTS = ("127.0.0.1", "127.0.0.2")


def on_two_hosts(
    folder: Path,
    *options: str,
    servers: Sequence[str] = HOSTS,
    trainers: Sequence[str] = HOSTS,
    server: str = SERVE,
    trainer: str = "exit 0",
) -> Job:
    """Start a job with a server and a trainer at each of these addresses; $N counts per host."""
    lists = (
        f"--servers={','.join(f'{host}:{ports.free(1)[0]}' for host in servers)}",
        f"--workers={','.join(f'{host}:{ports.free(1)[0]}' for host in trainers)}",
        f"--http_port={ports.free(1)[0]}",
        f"--job_id={uuid.uuid4().hex}",
    )
    jobs = []
    for host in HOSTS:
        (folder / host).mkdir()
        # Each host also has the other's folder.
        own = f"HERE={host}; OTHER={folder}/{HOSTS[host == HOSTS[0]]};"
        words = (*lists, f"--host={host}", *options)
        both = {"server": f"{own} {server}", "trainer": f"{own} {trainer}"}
        jobs.append(roles(folder / host, *words, **both))
    return Job(*jobs).start_all()


def test_servers_serve_until_the_trainers_of_all_hosts_are_done(tmp_path: Path) -> None:
    # The second host's trainer goes on when the first host's launcher has heard its own exit.
    late = "[ $HERE = 127.0.0.2 ] && until [ -e go ]; do sleep 0.01; done; echo trained"
    job = on_two_hosts(tmp_path, trainer=late)
    until(lambda: "exited" in [event["event"] for event in job.commands[0].events()])
    assert job.launchers[0].poll() is None
    (tmp_path / HOSTS[1] / "go").touch()
    ended = job.finish()
    assert [end.code for end in ended] == [0, 0]
    for command in job.commands:
        ends = [event for event in command.events() if event["event"] == "exited"]
        assert [(end["process"][:6], end["signal"]) for end in ends] == [
            ("traine", None),
            ("server", "SIGTERM"),
        ]


def test_s14_a_dead_server_ends_the_job_on_all_hosts(tmp_path: Path) -> None:
    up = "touch $OTHER/up; until [ -e up ]; do sleep 0.01; done"
    kill = f"[ $HERE = 127.0.0.2 ] && {{ {up}; kill -KILL $$; }}"
    job = on_two_hosts(tmp_path, server=f"( {kill} ) & {SERVE}", trainer=f"touch $OTHER/up; {IDLE}")
    ended = job.finish()
    assert [end.code for end in ended] == [137, 137]
    assert "Server 1 was killed by SIGKILL on 127.0.0.2" in ended[0].stderr


def test_s52_all_hosts_start_again_together(tmp_path: Path) -> None:
    up = "touch $OTHER/up; until [ -e up ]; do sleep 0.01; done"
    fail = f"{up}; [ $HERE$PADDLE_RESTART_COUNT = 127.0.0.20 ] && exit 3"
    wait = f"[ $PADDLE_RESTART_COUNT = 0 ] && {IDLE}"
    job = on_two_hosts(tmp_path, "--max_restart=1", trainer=f"{fail}; {wait}; exit 0")
    assert job.ends() == [0, 0]
    for command in job.commands:
        started = [event for event in command.events() if event["event"] == "started"]
        assert [event["attempt"] for event in started] == [0, 0, 1, 1]


CLUSTER = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:7164,10.9.9.9:7164",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_NNODES": "4",
}


@pytest.mark.parametrize(
    ("role", "more", "log"),
    [
        ("TRAINER", {"PADDLE_TRAINER_ID": "1"}, "workerlog.0"),
        ("PSERVER", {"POD_IP": "127.0.0.1", "PADDLE_PORT": "7164"}, "serverlog.0"),
    ],
)
def test_what_a_cluster_says_is_this_nodes_one_process(
    tmp_path: Path, role: str, more: dict[str, str], log: str
) -> None:
    variables = {**CLUSTER, **more, "TRAINING_ROLE": role}
    names = " ".join(f"${name}" for name in variables)
    job = Command(tmp_path, f"echo {names}; exit 7", ranks=1)
    done = job.run(env=variables)
    assert done.code == 7
    assert (tmp_path / "log" / log).read_text() == " ".join(variables.values()) + "\n"


# -- the Paddle that is here ---------------------------------------------------------------------


def lacks(mode: str) -> str | None:
    """Return the version of the Paddle here where it lacks what MODE needs."""
    feature = BY_WORD[mode].feature
    assert feature is not None
    paddle = paddles.find(sys.path)
    return paddle.version if paddle and paddles.lacks(paddle, feature.symbol) else None


@pytest.mark.skipif(lacks("ps") is None, reason="no Paddle here, or one with servers")
def test_a_paddle_without_servers_is_named(tmp_path: Path) -> None:
    job = Command.python(tmp_path, "", *TWO_AND_TWO, "--dry-run")
    assert "was built without parameter servers" in job.run().out.decode()


@pytest.mark.skipif(lacks("rpc") is None, reason="no Paddle here, or one with remote calls")
def test_a_paddle_without_rpc_is_named(tmp_path: Path) -> None:
    shown = Command.python(tmp_path, "", "--run_mode=rpc", "--dry-run").run().out.decode()
    assert "was built without paddle.distributed.rpc: use paddlepaddle 2.6.2" in shown
