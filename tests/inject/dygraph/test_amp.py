"""Mixed precision that a script turns on itself, or not, with each real Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from training import PYTHONS, alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Paddle's auto_cast needs a GPU; the script casts by hand instead.
SCRIPT = """
import sys
import paddle
layer = paddle.nn.Linear(2, 2)
optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
x = paddle.ones([1, 2])
if "half" in sys.argv:
    x = x.astype("bfloat16").reshape([2, 1]).reshape([1, 2]).astype("float32")
for _ in range(2):
    with paddle.amp.auto_cast():
        loss = layer(x).mean()
    paddle.amp.GradScaler().scale(loss).backward()
    optimizer.step()
assert not paddle.get_flags("FLAGS_low_precision_op_list")["FLAGS_low_precision_op_list"]
"""


def told(version: str, folder: Path, *words: str) -> dict[str, Any]:
    proof, _ = alone(version, folder, SCRIPT, {"strategy": {"amp": True}}, *words)
    (field,) = proof["fields"]
    entry: dict[str, Any] = field
    return entry


@pytest.mark.parametrize("version", PYTHONS)
def test_operators_in_half_precision_are_counted(version: str, tmp_path: Path) -> None:
    field = told(version, tmp_path, "half")
    assert (field["status"], field["in_effect"]) == ("effective", True)
    # Two reshapes; the casts around them do not count.
    assert field["evidence"].startswith("2 of ")
    assert field["evidence"].endswith("; no GradScaler")

    field = told(version, tmp_path)
    assert (field["status"], field["in_effect"]) == ("no_effect", None)
    assert field["reason"] == "Paddle's auto_cast does nothing on the CPU"
    assert field["evidence"].startswith("0 of ")
