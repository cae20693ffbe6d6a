"""Ranks forked from a process that has loaded Paddle equal new processes, and train alike."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import devices
import forks
import pytest
from training import MODELS, PYTHONS, in_turns

from fleetrun.run import guard
from fleetrun.run.descriptors import FileLimit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


@pytest.mark.parametrize(("version", "form"), in_turns("file", "module"))
def test_a_forked_rank_is_what_a_new_one_is(tmp_path: Path, version: str, form: str) -> None:
    script = [str(MODELS / "state.py")] if form == "file" else ["-m", "state"]
    words = (str(PYTHONS[version]), "-u", *script, "--lr=0.1", "two words")
    states: dict[tuple[bool, int], dict[str, Any]] = {}
    parent = guard.Guard("marker", FileLimit(1))
    try:
        for is_forked in (False, True):
            if is_forked:
                like = forks.order(tmp_path, str(MODELS), *words)
                assert forks.stand_by(parent, like)[0] == "ready"
            for rank in (0, 1):
                file = tmp_path / f"state.{rank}.json"
                more = {
                    "STATE_FILE": str(file),
                    # Of this rank alone: no library reads the first one, Paddle reads the others.
                    "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{6070 + rank}",
                    "FLAGS_selected_gpus": str(rank),
                    "FLAGS_check_nan_inf": str(rank),
                    "FLAGS_max_inplace_grad_add": str(3 + rank),
                }
                order = forks.order(tmp_path, str(MODELS), *words, rank=rank, **more)
                order = order._replace(cpus=(max(os.sched_getaffinity(0)),) if rank else ())
                started, ended = forks.run(parent, order)
                assert started.is_forked == is_forked, started.why_not
                assert ended.status == (os.CLD_EXITED, rank + 5), (tmp_path / "log.0").read_text()
                assert ended.left == ()
                states[is_forked, rank] = json.loads(file.read_text())
    finally:
        parent.dismiss()
    drawn = [state.pop("drawn") for state in states.values()]
    # Unseeded, no two ranks draw the same numbers.
    assert all(len({values[at] for values in drawn}) == len(drawn) for at in range(len(drawn[0])))
    for rank in (0, 1):
        new, forked = states[False, rank], states[True, rank]
        for when in ("before", "after"):
            for what in new[when]:
                assert forked[when][what] == new[when][what], (when, what, rank)
            assert new[when]["has Paddle"] == (when == "after")
        # That includes a training's losses, bit for bit.
        assert forked == new
        assert new["flags"]["FLAGS_check_nan_inf"] == repr(bool(rank))
        # The new one's output, then the forked one's.
        log = (tmp_path / f"log.{rank}").read_text()
        assert log[: len(log) // 2] == log[len(log) // 2 :]
        assert log.endswith("at exit\n")


# The default device while Paddle is dynamic, static, and dynamic again.
_PLACES = """
import paddle
from paddle.base import framework
print(paddle.get_device())
paddle.enable_static()
print(framework._current_expected_place_())
paddle.disable_static()
print(paddle.get_device(), framework._dygraph_tracer()._expected_place)
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_a_forked_rank_computes_where_a_new_one_does(tmp_path: Path, version: str) -> None:
    (tmp_path / "places.py").write_text(_PLACES)
    words = (str(PYTHONS[version]), "-W", "ignore", str(tmp_path / "places.py"))
    on_device = {
        "CUSTOM_DEVICE_ROOT": str(devices.library(PYTHONS[version]).parent),
        "TESTDEVICE_KIND": "npu",
        "GLOG_minloglevel": "1",
        "FLAGS_selected_npus": "1",
    }
    parent = guard.Guard("marker", FileLimit(1))
    try:
        for is_forked in (False, True):
            order = forks.order(tmp_path, str(tmp_path), *words, rank=0, **on_device)
            if is_forked:
                assert forks.stand_by(parent, order)[::2] == ("ready", "")
            started, ended = forks.run(parent, order)
            assert started.is_forked == is_forked, started.why_not
            assert ended.status == (os.CLD_EXITED, 0), (tmp_path / "log.0").read_text()
    finally:
        parent.dismiss()
    log = (tmp_path / "log.0").read_text()
    assert log == 2 * "npu:1\nPlace(npu:1)\nnpu:1 Place(npu:1)\n"
