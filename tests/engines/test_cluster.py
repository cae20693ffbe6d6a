"""An engine's variables count like options; a contradiction is one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from clusters import BATCH, MPI, STEP
from commandline import Command
from ports import free

from fleetrun.cli import request
from fleetrun.cli.argv import split
from fleetrun.cli.configfile import Config
from fleetrun.engines import cluster, detect
from fleetrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fleetrun.model import Request


# What a request says of itself.
_SAID = ("settings", "notes", "typed", "given")
TASKS = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


def resolve(environ: Mapping[str, str], *words: str, config: Config | None = None) -> Request:
    rows = detect.rows(environ)
    parsed = split([*words, "train.py"])

    def ask() -> detect.Detected:
        return detect.read(rows, environ)

    return request.resolve(parsed, environ, config or Config(), detect=ask if rows else None)


def test_a_step_asks_for_what_the_list_of_its_hosts_asks_for() -> None:
    resolved = resolve(STEP)
    port = cluster.first_port("77")
    by_hand = resolve({}, "--ips=n2,n3", "--host=n3", f"--start_port={port}")
    assert resolved.notes == ("Slurm names the hosts: SLURM_STEP_NODELIST=n[2-3].",)
    assert {field: value for field, value in resolved._asdict().items() if field not in _SAID} == {
        field: value for field, value in by_hand._asdict().items() if field not in _SAID
    }
    sources = {setting.name: setting.source for setting in resolved.settings}
    assert sources["ips"] == "$SLURM_STEP_NODELIST"
    assert sources["host"] == "$SLURM_NODEID"
    assert sources["start_port"] == "$SLURM_JOB_ID"


def test_a_task_for_each_rank_asks_for_as_many_ranks() -> None:
    resolved = resolve(TASKS)
    assert (resolved.nproc_per_node, resolved.ips, resolved.host) == (4, ("n2", "n3"), "n3")
    assert resolve(TASKS, "--nproc_per_node=4").nproc_per_node == 4
    assert resolve({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).nproc_per_node == 4


def test_steps_of_a_job_have_ports_of_their_own_and_so_have_the_next_jobs() -> None:
    steps = [resolve({**STEP, "SLURM_STEP_ID": str(step)}).start_port for step in range(4)]
    jobs = [resolve({**STEP, "SLURM_JOB_ID": str(job)}).start_port for job in range(78, 108)]
    assert len(set(steps + jobs)) == 34
    # Open MPI's daemons are a step on all hosts but the first.
    in_step = {"SLURM_STEP_ID": "0", "SLURM_NODEID": "1", **MPI, **BATCH}
    with_step = resolve({**in_step, "SLURM_STEP_ID": "3"}, "--host=n1")
    assert with_step.start_port == resolve(in_step, "--host=n1").start_port


def test_what_is_typed_wins_where_both_agree() -> None:
    resolved = resolve(STEP, "--ips=10.0.0.2,10.0.0.3", "--start_port=7000", "--nnodes=2")
    assert (resolved.ips, resolved.host, resolved.start_port) == (
        ("10.0.0.2", "10.0.0.3"),
        None,
        7000,
    )
    assert resolve({**STEP, "POD_IP": "10.0.0.3"}).host == "10.0.0.3"


@pytest.mark.parametrize(
    ("environ", "words", "message"),
    [
        (STEP, ("--nnodes=4",), r"--nnodes=4: --ips names 2 hosts"),
        (
            TASKS,
            ("--nproc_per_node=8",),
            r"--nproc_per_node=8: Slurm has started 4 tasks here \(SLU",
        ),
        (TASKS, ("--server_num=2",), r"--server_num=2: .* start one on each host: `srun"),
        (
            TASKS,
            ("--detach",),
            r"--detach.*: .* one a rank; leave it out, or start one on each host",
        ),
        (MPI, (), r"--nnodes=4 \(from \$OMPI_COMM_WORLD_SIZE\)"),
    ],
)
def test_what_contradicts_the_engine_is_one_sentence(
    environ: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(environ, *words)


def test_two_launchers_in_a_step_are_one_job(tmp_path: Path) -> None:
    # Two hosts on loopback, each with its own address.
    step = {**STEP, "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}
    started = []
    for node in ("0", "1"):
        folder = tmp_path / node
        folder.mkdir()
        script = "echo $R of $PADDLE_TRAINERS_NUM at $PADDLE_CURRENT_ENDPOINT"
        command = Command(folder, script, ranks=1)
        process = command.start(env={**step, "SLURM_NODEID": node, "SLURM_PROCID": node})
        started.append((command, process))
    ends = [command.finish(process) for command, process in started]
    assert [end.code for end in ends] == [0, 0], [end.stderr for end in ends]
    port = cluster.first_port("77")
    assert ends[0].out.decode() == f"0 of 2 at 127.0.0.1:{port}\n"
    assert ends[1].out.decode() == f"1 of 2 at 127.0.0.2:{port}\n"


def test_pods_of_an_indexed_job_meet_at_the_first_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    (port,) = free(1)
    started = []
    # The same as in commands/submit/kubernetes.py; the last one starts first.
    for index in ("1", "0"):
        folder = tmp_path / index
        folder.mkdir()
        script = "echo $R of $PADDLE_TRAINERS_NUM, ${FLEETRUN_TOKEN-none}"
        command = Command(folder, script, ranks=1)
        pod = {
            "KUBERNETES_SERVICE_HOST": "10.1.0.1",
            "JOB_COMPLETION_INDEX": index,
            "PADDLE_MASTER": f"127.0.0.1:{port}",
            "PADDLE_NNODES": "2",
            "PADDLE_JOB_ID": "train",
            "POD_IP": f"127.0.0.{int(index) + 1}",
            "FLEETRUN_TOKEN": "t0ken",
        }
        started.append((command, command.start(env=pod)))
    ends = [command.finish(process) for command, process in started]
    assert [end.code for end in ends] == [0, 0], [end.stderr for end in ends]
    assert [end.out for end in ends] == [b"1 of 2, none\n", b"0 of 2, none\n"]
