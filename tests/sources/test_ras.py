"""NCCL's RAS reports ranks that lag; here it is a fake, which refuses unknown requests."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING

import plans
import pytest
from fake_ras import STATUS, FakeRas
from wire import turn_until

from fleetrun.run import children
from fleetrun.run.loop import Loop
from fleetrun.sources.hang_judge import HangJudge
from fleetrun.sources.ras import Ras, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fleetrun.run.events import Hung

PIDS = {os.getpid(): "rank 0", 701: "rank 2"}

# What NCCL 2.28.9 said of three processes on an H100: the third had called all_gather where the
# others called all_reduce; it had been killed; and it was one all_reduce ahead, and another one
# behind in a group of two.
HEAD = """\
NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          3            1          3        3

Communicators... (0.000s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
OTHER_OPERATION = f"""{HEAD}\
    0         1         1         3         3         3   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (03ebcc1e557ca1d4) MISMATCH
  Communicator ranks have different AllGather operation counts
  2 ranks have not launched any operations
  Rank 2 has launched up to operation 1 -- GPU 0 managed by process 699 on node 127.0.0.1

  Communicator ranks have different AllReduce operation counts
  2 ranks have launched up to operation 7
  Rank 2 has launched up to operation 6 -- GPU 0 managed by process 699 on node 127.0.0.1

"""
KILLED = f"""{HEAD}\
    0         1         1         2         3         2   RUNNING  INCOMPLETE,ERROR

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 543 on node 127.0.0.1 managing GPU 0

#0-0 (0eeb94c5c7b0a050) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- GPU 0 managed by process 543 on node 127.0.0.1

#0-0 (0eeb94c5c7b0a050) ERROR
  Asynchronous errors on 2 ranks
  2 ranks reported Remote process error
  Rank 0 -- GPU 0 managed by process 541 on node 127.0.0.1
  Rank 1 -- GPU 0 managed by process 542 on node 127.0.0.1

Warnings
========

"""
TWO_GROUPS = f"""{HEAD}\
    0         1         1         3         3         3   RUNNING  MISMATCH
    1         1         1         3         3         3   RUNNING      OK
    2         1         1         2         2         2   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (48375987a9be91d5) MISMATCH
  Communicator ranks have different AllReduce operation counts
  2 ranks have launched up to operation 2
  Rank 2 has launched up to operation 3 -- GPU 0 managed by process 702 on node 127.0.0.1

#2-0 (6bcc5edf9f845257) MISMATCH
  Communicator ranks have different AllReduce operation counts
  Rank 0 has launched up to operation 4 -- GPU 0 managed by process 700 on node 127.0.0.1
  Rank 1 has launched up to operation 3 -- GPU 0 managed by process 702 on node 127.0.0.1

"""


def ras(
    folder: Path,
    environ: Mapping[str, str],
    pids: Mapping[int, str] = PIDS,
    log: Callable[[str], None] = plans.refuse,
    ranks: int = 4,
) -> Ras:
    made = plans.plan(per_node=ranks, cwd=str(folder), run_dir=".")
    job = plans.job(made, log=log)
    job.environ = environ
    return Ras(job, lambda: pids)


def answered(asked: Ras) -> bool:
    done: list[bool] = []
    with closing(Loop()) as loop:
        if not asked.ask(loop, lambda: done.append(True)):
            return False
        turn_until(loop, lambda: done)
    return bool(done)


def test_ranks_that_lag_are_named_by_their_number_or_process(tmp_path: Path) -> None:
    fake = FakeRas()
    asked = ras(tmp_path, fake.environ)
    assert answered(asked)
    fake.close()
    assert asked.findings() == (
        (
            ("rank 3",),
            (
                "rank 3 has launched 6649 AllReduce operations on NCCL's communicator "
                "27a079b828ff1a75, 3 others 6650"
            ),
        ),
        (
            ("rank 2",),
            "rank 2 has launched 0 operations on NCCL's communicator 5eb1, 2 others 12",
        ),
        # NCCL does not list the ranks of the majority.
        ((), "3 ranks have launched 3 AllGather operations on NCCL's communicator abc, 1 other 4"),
    )
    assert (tmp_path / "nccl-ras.txt").read_text() == STATUS
    assert fake.requests == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "VERBOSE STATUS"]


@pytest.mark.parametrize(
    ("status", "labels", "words"),
    [
        (
            OTHER_OPERATION,
            [(), ("rank 2",)],
            [
                (
                    "rank 2 has launched 1 AllGather operations on NCCL's communicator "
                    "03ebcc1e557ca1d4, 2 others 0"
                ),
                (
                    "rank 2 has launched 6 AllReduce operations on NCCL's communicator "
                    "03ebcc1e557ca1d4, 2 others 7"
                ),
            ],
        ),
        (
            KILLED,
            [("rank 2",)],
            ["rank 2 did not answer NCCL's RAS about communicator 0eeb94c5c7b0a050"],
        ),
        (
            TWO_GROUPS,
            [(), ("rank 2",)],
            [
                (
                    "rank 2 has launched 3 AllReduce operations on NCCL's communicator "
                    "48375987a9be91d5, 2 others 2"
                ),
                (
                    "rank 2 has launched 3 AllReduce operations on NCCL's communicator "
                    "6bcc5edf9f845257, 1 other 4"
                ),
            ],
        ),
    ],
)
def test_what_a_real_one_said_is_understood(
    tmp_path: Path, status: str, labels: list[tuple[str, ...]], words: list[str]
) -> None:
    fake = FakeRas(status)
    asked = ras(tmp_path, fake.environ, {**PIDS, 700: "rank 0", 702: "rank 2"}, ranks=3)
    assert answered(asked)
    fake.close()
    assert list(asked.findings()) == list(zip(labels, words, strict=True))


def test_ranks_of_other_hosts_are_named_by_process_and_node(tmp_path: Path) -> None:
    fake = FakeRas()
    made = plans.plan(hosts=("10.0.0.1", "10.0.0.2"), cwd=str(tmp_path), run_dir=".")
    job = plans.job(made)
    job.environ = fake.environ
    asked = Ras(job, lambda: PIDS)
    assert answered(asked)
    fake.close()
    # A process of another host may have the pid of a local rank.
    assert [labels for labels, _ in asked.findings()] == [
        ("rank 3",),
        ("process 701 on 10.0.0.1",),
        (),
    ]


def test_a_port_of_another_job_or_of_nobody_is_not_asked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environ = {"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}
        assert not answered(ras(tmp_path, environ, {os.getppid(): "rank 0"}))
    assert not answered(ras(tmp_path, environ))
    assert not answered(ras(tmp_path, {"NCCL_RAS_ADDR": "nonsense"}))


def test_a_port_that_speaks_otherwise_is_a_remark(tmp_path: Path) -> None:
    fake, logged = FakeRas(hello="HTTP/1.1 400"), list[str]()
    asked = ras(tmp_path, fake.environ, log=logged.append)
    assert answered(asked)
    fake.close()
    assert asked.findings() == ()
    (line,) = logged
    assert "NCCL's RAS did not tell which ranks lag" in line
    assert "HTTP/1.1 400" in line


def test_the_judge_waits_for_it_and_names_who_lags(tmp_path: Path) -> None:
    fake, declared, loop = FakeRas(), list["Hung"](), Loop()
    made = plans.plan(per_node=4, cwd=str(tmp_path), run_dir=".")
    job = plans.job(made)
    job.environ = fake.environ
    judge = HangJudge(job, None, period_s=5.0, pids=lambda: PIDS)
    waiting = (("all_reduce", "/job/train.py", 4), ("<module>", "/job/train.py", 9))

    def collect(_seconds: float) -> None:
        judge.collected(
            dict.fromkeys(range(4), waiting),
            went_on=None,
            sign="life",
            deadlocked=(),
            unreached=(),
        )

    judge.open(loop, collect=collect, declare=declared.append)
    judge.report(30.0)
    assert declared == []
    turn_until(loop, lambda: declared)
    loop.close()
    fake.close()
    (hung,) = declared
    assert hung.odd == ("rank 3",)
    assert hung.collectives[0][1].startswith("rank 3 has launched 6649 AllReduce")


def test_an_answer_that_is_awaited_no_more_leaves_no_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ = {"NCCL_RAS_ADDR": f"127.0.0.1:{listener.getsockname()[1]}"}
        # Those of other tests may end meanwhile.
        loop, before = Loop(), {*children.children()}
        asked = ras(tmp_path, environ)
        assert asked.ask(loop, lambda: plans.refuse("an answer"))
        assert {*children.children()} - before
        asked.abandon()
        children.wait_for_ending()
        assert not {*children.children()} - before
        loop.close()


def test_other_text_tells_nothing() -> None:
    for text in ("", "No communicator data collected!\n", STATUS[: STATUS.index("Warnings")]):
        assert differences(text) == []
    cut = STATUS[: STATUS.index("  3 ranks have")]
    assert differences(cut) == []
