"""Real Paddle ranks that wait for each other over gloo."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import devices
import pytest
from commandline import Command, fleetrun
from training import PYTHONS
from waiting import until

from fleetrun.rundir import eventfile, rankfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark.structures import ParameterSet

pytestmark = pytest.mark.train
MODELS = Path(__file__).parent / "models"
sys.path.append(str(MODELS))
import hanging  # noqa: E402

GLOO = """
import paddle
import paddle.distributed as dist
paddle.set_device("cpu")
dist.init_parallel_env()
"""


def test_s61_a_rank_that_misses_a_collective_is_named(tmp_path: Path) -> None:
    code = f"""{GLOO}
def load_batch():
    time.sleep(600)
if rank == 1:
    load_batch()
dist.all_reduce(paddle.ones([4]))
"""
    ended = Command.python(tmp_path, code, "--hang_timeout=6").run()
    assert ended.code == 124, ended.stderr
    assert "Rank 1 stands in load_batch" in ended.stderr
    assert "Rank 0 stands in _all_reduce_in_dygraph" in ended.stderr
    late = "Rank 1 never entered all_reduce 1 of all ranks; rank 0 waits there"
    assert late in ended.stderr
    shown = fleetrun("logs", "--collectives", folder=tmp_path)
    assert shown.stdout.startswith(late), shown
    assert shown.stdout.count("  all_reduce 1  ") == 1


def _hangs() -> Iterator[ParameterSet]:
    """Return seeds and where ranks run; all but a few are for --long."""
    for seed, where in itertools.product(range(60), ("cpu", "2.6.2", "npu")):
        is_short = where == "cpu" and seed in {3, 8}
        yield pytest.param(seed, where, marks=[] if is_short else pytest.mark.long)


@pytest.mark.parametrize(("seed", "where"), [*_hangs()])
def test_the_rank_that_keeps_the_others_waiting_is_named_and_no_other(
    tmp_path: Path, seed: int, where: str
) -> None:
    fault = hanging.drawn(seed)
    options = "--hang_timeout=6", "--nproc_per_node", str(fault.ranks)
    job = Command.python(tmp_path, "", *options, ranks=fault.ranks)
    python = PYTHONS["2.6.2" if where == "2.6.2" else "3.3.1"]
    job.argv[0] = str(python)
    job.argv[-1:] = [str(hanging.__file__), str(seed)]
    with devices.on("npu" if where == "npu" else ""):
        env = devices.variables(python)
    # The launcher is to choose the backend.
    ended = job.run(env={name: env[name] for name in env if not name.startswith("PADDLE_")})
    who = f"rank {fault.rank}"
    events = list(eventfile.read(str(tmp_path / "log" / "latest" / "events.jsonl")))
    hung = [
        finding
        for event in events
        if event.event == "hung"
        for finding in event.more["collectives"]
    ]
    named = [tuple(finding["who"]) for finding in hung]
    named += [tuple(event.more["who"]) for event in events if event.more.get("what") == "desync"]
    if fault.way == "end":
        # Over gloo the other ranks raise.
        assert f"{who.capitalize()} never entered " in ended.stderr
        # A rank whose device still has work has not ended.
        stopped = f"After that {who} was stopped by fleetrun" if where == "npu" else ""
        assert " has ended." in ended.stderr or (stopped and stopped in ended.stderr)
    elif (where, fault.way) == ("npu", "swap"):
        # The device pairs whatever call comes next: only a rank left alone in a pair hangs.
        is_left_alone = fault.rank < 2
        assert (ended.code, len(named)) == ((124, 2) if is_left_alone else (0, 1)), ended.stderr
    else:
        # Some mismatched calls crash the backend; the report of the failure says so then.
        crashing = {"shape", "leave", "skip", "swallow"} if where == "npu" else {"shape", "swap"}
        assert ended.code == 124 or fault.way in crashing, ended.stderr
        assert named or f"{who.capitalize()} called " in ended.stderr, ended.stderr
    assert "cannot be watched from inside" not in ended.stderr
    if "in a circle" in ended.stderr:
        # Before its first step a rank has no order that it could leave.
        assert all(who in labels for labels in named)
    else:
        assert set(map(tuple, named)) <= {(who,)}, ended.stderr
    assert ended.stderr.count(", unlike the rest") <= 1


def test_s15_paddle_and_python_both_show_a_crash(tmp_path: Path) -> None:
    code = f"{GLOO}\ndef crash(): os.kill(os.getpid(), 11)\ncrash()"
    job = Command.python(tmp_path, code, ranks=1)
    assert job.run().code == 139
    log = job.log(0).read_text()
    assert "in crash" in log
    assert log.count("C++ Traceback") == 1


def test_s20_an_error_of_a_data_loader_ends_in_the_ranks_records(tmp_path: Path) -> None:
    code = """
import atexit, threading
import paddle
def end():
    # Paddle may hang where it ends the workers of a loader that has failed; its reader says why.
    [thread.join(60) for thread in threading.enumerate() if "_thread_loop" in thread.name]
    os._exit(1)
atexit.register(end)
class Data(paddle.io.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): raise ValueError("bad sample")
paddle.set_device("cpu")
for _ in paddle.io.DataLoader(Data(), num_workers=2): pass
"""
    job = Command.python(tmp_path, code, ranks=1)
    assert job.run().code == 1
    error = rankfile.error(str(tmp_path / "log" / "latest" / "rank.0.jsonl"))
    assert error is not None
    # Paddle raises no more than that in the main thread; another thread logs the reason.
    assert error.class_ == "SystemError"
    assert "bad sample" in job.log(0).read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("", "    Rank 1 never entered all_reduce 4 of all ranks; rank 0 waits there in "),
        (
            "hang@3:1",
            "    All its ranks have entered all_reduce 3 of all ranks, and ranks 0-1 wait",
        ),
    ],
    ids=["a rank sleeps", "its device hangs"],
)
def test_on_a_device_a_rank_that_is_late_is_told_from_a_device_that_hangs(
    tmp_path: Path, fault: str, text: str
) -> None:
    code = f"""
import paddle
import paddle.distributed as dist
dist.init_parallel_env()
for step in range(4):
    value = paddle.full([4], float(rank))
    dist.all_reduce(value)
    if (rank, step) == (1, 2) and not {fault!r}:
        time.sleep(600)
    value.numpy()
"""
    job = Command.python(tmp_path, code, "--hang_timeout=6")
    with devices.on("npu", witness=tmp_path, **({"fault": fault} if fault else {})):
        told = {"PADDLE_DISTRI_BACKEND": "", "PADDLE_XCCL_BACKEND": ""}
        ended = job.finish(job.start(env={**devices.variables(PYTHONS["3.3.1"]), **told}))
    assert ended.code == 124, ended.stderr
    assert text in ended.stderr


def test_the_stacks_of_a_job_that_runs_are_shown_with_its_collectives(tmp_path: Path) -> None:
    code = f"""{GLOO}
def next_batch():
    open(f"asleep.{{rank}}", "w").close()
    time.sleep(600)
dist.all_reduce(paddle.ones([4]))
next_batch()
"""
    job = Command.python(tmp_path, code, "--flight_recorder")
    launcher = job.start()
    until(lambda: all((tmp_path / f"asleep.{rank}").exists() for rank in range(2)))
    shown = fleetrun("stacks", str(launcher.pid), folder=tmp_path)
    assert shown.stdout.count("in next_batch") == 2, shown
    assert shown.stdout.count("  all_reduce 1  ") == 2
    # Neither rank is late.
    assert "never entered" not in shown.stdout
    launcher.terminate()
    assert job.finish(launcher).code == 143
