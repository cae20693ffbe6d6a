"""The same command on two hosts is one training: each finds its place, its peers and its ports."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT, environ
from lab import ends
from training import launch_on
from waiting import LONG_S, TRAINING_S, until

if TYPE_CHECKING:
    import subprocess

    from lab import Host

pytestmark = pytest.mark.multinode

Pair = tuple["Host", "Host"]

IPS = "--ips=10.88.0.1,10.88.0.2"
MEETING = "--master=node-1:6170 --nnodes=2"

# Writes its environment beside itself.
DUMP = """
import json, os, socket
with open(f"rank-{os.environ['PADDLE_TRAINER_ID']}.json", "w") as file:
    json.dump({"host": socket.gethostname(), "env": dict(os.environ)}, file)
"""


HOLD = """
import pathlib, socket, sys
server = socket.create_server(("0.0.0.0", 6070))
pathlib.Path("holding").touch()
server.accept()
"""


def start(host: Host, *words: str) -> subprocess.Popen[bytes]:
    return host.fleetrun(*words)


def launch(hosts: Pair, script: str, *options: str) -> None:
    """Run SCRIPT with a launcher on each host; both succeed and leave no process."""
    for host in hosts:
        (host.folder / "job.py").write_text(script)
    begin = launch_on if "import paddle" in script else start
    launchers = [begin(host, *options, "job.py") for host in hosts]
    assert ends(launchers, TRAINING_S) == [0, 0], "\n".join(host.output for host in hosts)
    for host in hosts:
        assert host.processes() == []


def dumps(hosts: Pair, per_host: int = 1) -> list[dict[str, str]]:
    """Return the environments of all ranks, each from the host where it must run."""
    documents = []
    for rank in range(2 * per_host):
        host = hosts[rank // per_host]
        dump = json.loads((host.folder / f"rank-{rank}.json").read_text())
        assert dump["host"] == host.name
        documents.append(dump["env"])
    return documents


def test_every_host_finds_its_place(two_hosts: Pair) -> None:
    launch(two_hosts, DUMP, IPS, "--nproc_per_node=2")
    environments = dumps(two_hosts, per_host=2)
    endpoints = "10.88.0.1:6070,10.88.0.1:6071,10.88.0.2:6070,10.88.0.2:6071"
    for rank, env in enumerate(environments):
        assert env["PADDLE_TRAINER_ENDPOINTS"] == endpoints
        assert env["PADDLE_CURRENT_ENDPOINT"] == endpoints.split(",")[rank]
        assert env["PADDLE_TRAINERS_NUM"] == "4"
        assert env["PADDLE_RANK_IN_NODE"] == str(rank % 2)
        assert env["PADDLE_MASTER"] == "10.88.0.1:6070"


def test_the_interface_that_reaches_the_peers_is_used(two_hosts: Pair) -> None:
    for host in two_hosts:
        for interface, address in (("docker0", "172.17.0.1/16"), ("aaa0", "192.168.7.1/24")):
            host.run("ip", "link", "add", interface, "type", "bridge")
            host.run("ip", "addr", "add", address, "dev", interface)
            host.run("ip", "link", "set", interface, "up")
        # Even the default route does not count.
        host.run("ip", "route", "add", "default", "via", "192.168.7.254", "dev", "aaa0")
    launch(two_hosts, DUMP, IPS, "--nproc_per_node=1")
    for env in dumps(two_hosts):
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    # NCCL would also use aaa0, which reaches no peer.
    (setting,) = nccl_sockets(two_hosts[0])
    assert setting.startswith("^=")
    assert {*setting.removeprefix("^=").split(",")} == {"lo", "docker0", "aaa0"}
    two_hosts[0].run("ip", "link", "del", "aaa0")
    assert nccl_sockets(two_hosts[0]) == set()


def nccl_sockets(host: Host) -> set[str]:
    """Return the interfaces that HOST's launcher would give NCCL if it had a GPU."""
    env = environ(FLEETRUN_ASSUME_DEVICES="gpu:1")
    del env["CUDA_VISIBLE_DEVICES"]
    argv = (sys.executable, "-m", "fleetrun", IPS, "--dry-run=json", "job.py")
    name = "NCCL_SOCKET_IFNAME"
    (node, *_) = json.loads(host.run(*argv, env=env).stdout)["nodes"]
    return {env[name] for process in node["processes"] if name in (env := process["env"])}


def test_an_address_that_is_not_ours_is_an_error_that_lists_both(two_hosts: Pair) -> None:
    first, _ = two_hosts
    (first.folder / "job.py").write_text(DUMP)
    launcher = start(first, "--ips=10.88.0.7,10.88.0.8", "--nproc_per_node=1", "job.py")
    assert launcher.wait(LONG_S) == 3
    output = first.output
    for wanted in ("10.88.0.7", "10.88.0.8", "10.88.0.1 (eth0)", "--host"):
        assert wanted in output
    assert "Traceback" not in output
    assert not (first.folder / "rank-0.json").exists()


def test_a_taken_port_is_named_with_its_holder(two_hosts: Pair) -> None:
    _, second = two_hosts
    (second.folder / "job.py").write_text(DUMP)
    (second.folder / "hold.py").write_text(HOLD)
    holder = second.start(sys.executable, "hold.py", output="held")
    until((second.folder / "holding").exists)
    launcher = start(second, IPS, "--nproc_per_node=1", "job.py")
    assert launcher.wait(LONG_S) == 3
    output = second.output
    pid = second.run("pgrep", "-f", "hold.py").stdout.split()[0]
    for wanted in ("6070", f"pid {pid} ", "hold.py", "--start_port"):
        assert wanted in output
    assert not (second.folder / "rank-1.json").exists()
    holder.kill()
    holder.wait()


@pytest.mark.train
@pytest.mark.parametrize(
    ("version", "where"),
    [
        ("3.3.1", IPS),
        pytest.param("2.6.2", IPS, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("2.6.2", MEETING, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_two_hosts_train_one_model(two_hosts: Pair, version: str, where: str) -> None:
    script = ROOT / "scripts" / "train_resnet.py"
    words = (*where.split(), "--nproc_per_node=1", str(script), "--epochs=1")
    launchers = [launch_on(host, *words, version=version) for host in two_hosts]
    assert ends(launchers, TRAINING_S) == [0, 0], "\n".join(host.output for host in two_hosts)
    logs = [(host.folder / "log" / "workerlog.0").read_text() for host in two_hosts]
    weights = [
        line.partition("sha256 ")[2]
        for log in logs
        for line in log.splitlines()
        if "weights sha256" in line
    ]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert "all 2 ranks hold identical weights" in logs[0]
