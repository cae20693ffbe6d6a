"""Gradients that are sent in 16 bits, or not, where the backend cannot sum them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from training import PYTHONS, evidence, run, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# The precision of a sum of two gradients of about 1.
CLOSE = {"bf16_allreduce": 2e-2, "fp16_allreduce": 2e-3}
SENT = {"bf16_allreduce": {"bfloat16", "bf16"}, "fp16_allreduce": {"float16", "fp16"}}
# Buckets that overlap, and a single bucket that is waited for at once.
WAYS: tuple[dict[str, Any], ...] = (
    {"fuse_grad_size_in_num": 2, "nccl_comm_num": 2},
    {"sync_nccl_allreduce": True},
)


def row(folder: Path, name: str) -> dict[str, Any]:
    proof = evidence(folder)
    field: dict[str, Any] = next(field for field in proof["fields"] if field["name"] == name)
    return field


@pytest.mark.parametrize(
    ("version", "name", "way"),
    [
        ("3.3.1", "bf16_allreduce", WAYS[0]),
        ("2.6.2", "fp16_allreduce", WAYS[1]),
    ],
)
def test_gradients_are_sent_in_16_bits_and_the_weights_are_close(
    version: str, name: str, way: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train(PYTHONS[version], "compressed.py", tmp_path / "ours", {name: True, **way})
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["weights"] == pytest.approx(rank["alone"], abs=CLOSE[name])
        assert rank["weights"] != rank["alone"]
        assert set(rank["sent"]) <= SENT[name]
        assert len(rank["sent"]) == (2 if "nccl_comm_num" in way else 1)
    assert row(tmp_path / "ours", name)["status"] == "effective"


def test_what_the_backend_sums_wrongly_is_refused_and_sent_in_32_bits(tmp_path: Path) -> None:
    asked = {"fp16_allreduce": True}
    ranks = train(PYTHONS["3.3.1"], "compressed.py", tmp_path / "ours", asked)
    for rank in ranks:
        assert all(map(math.isfinite, rank["weights"]))
        assert rank["weights"] == pytest.approx(rank["alone"], abs=1e-6)
        assert set(rank["sent"]) <= {"float32", "fp32"}
    told = row(tmp_path / "ours", "fp16_allreduce")
    assert told["status"] == "refused"
    assert "sums float16 wrongly: self-tested" in told["reason"]


WIDE = """
import paddle
paddle.set_default_dtype("float64")
paddle.distributed.init_parallel_env()
model = paddle.DataParallel(paddle.nn.Linear(4, 2))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
for _ in range(2):
    model(paddle.ones([2, 4])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
"""


def test_gradients_in_64_bits_are_not_said_to_be_sent_in_16(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WIDE)
    words = ["--nproc_per_node=2", "--set=bf16_allreduce=true", "train.py"]
    done = run(PYTHONS["3.3.1"], ["-m", "fleetrun", *words], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "NO EFFECT  no gradient is in float32" in done.stdout
