"""--resume_from takes what Paddle saves as complete, but not when a part of it is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, run

from fleetrun.host import checkpoints
from fleetrun.model import Checkpoints

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

SAVES = """
import sys
import paddle
import paddle.distributed as dist
model = paddle.nn.Linear(4, 4)
paddle.save(model.state_dict(), "files/checkpoint-1/model.pdparams")
dist.save_state_dict(model.state_dict(), "parts/checkpoint-1")
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_what_paddle_saves_is_whole(tmp_path: Path, version: str) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    done = run(PYTHONS[version], ["-W", "ignore", "saves.py"], tmp_path)
    assert done.returncode == 0, done.stdout
    for kind in ("files", "parts"):
        folder = tmp_path / kind
        newest = str(folder / "checkpoint-1")
        resumable = checkpoints.find(str(folder))
        assert resumable == Checkpoints(newest)
        for file in (folder / "checkpoint-1").iterdir():
            text = file.read_bytes()
            file.write_bytes(text[:-10])
            assert checkpoints.find(str(folder)).partial[0][1] == f"{file.name} is cut off"
            file.write_bytes(text)
    [part] = (tmp_path / "parts" / "checkpoint-1").glob("*.distcp")
    part.unlink()
    assert checkpoints.find(str(folder)).partial[0][1].startswith(f"{part.name} is missing, which")
