"""Real Paddle ranks that wait for each other over gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commandline import Command

from fleetrun.records import rankfile

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

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
    ended = Command.python(tmp_path, code, "--hang_timeout=6", ranks=3).run()
    assert ended.code == 124
    assert "Rank 1 stands in load_batch" in ended.said
    assert "Ranks 0, 2 stand in _all_reduce_in_dygraph" in ended.said


def test_s15_paddle_and_python_both_show_a_crash(tmp_path: Path) -> None:
    code = f"{GLOO}\ndef crash(): os.kill(os.getpid(), 11)\ncrash()"
    job = Command.python(tmp_path, code, ranks=1)
    assert job.run().code == 139
    log = job.log(0).read_text()
    assert "in crash" in log
    assert log.count("C++ Traceback") == 1


def test_s20_an_error_of_a_data_loader_ends_in_the_ranks_records(tmp_path: Path) -> None:
    code = """
import paddle
class Data(paddle.io.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): raise ValueError("bad sample")
paddle.set_device("cpu")
for _ in paddle.io.DataLoader(Data(), num_workers=2): pass
"""
    job = Command.python(tmp_path, code, ranks=1)
    assert job.run().code == 1
    said = rankfile.error(str(tmp_path / "log" / "latest" / "rank.0.jsonl"))
    assert said is not None
    # In the main thread Paddle says only that; the reason is in the log, from another thread.
    assert said.kind == "SystemError"
    assert "bad sample" in job.log(0).read_text()
