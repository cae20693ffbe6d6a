"""Every kind of model through the real command: a strategy equals plain data parallel.

`models/kinds.py` is the script, which counts its collectives itself. One launch trains them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import pytest
import train_kinds
from train_kinds import launch
from training import PYTHONS, mostly, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# What Paddle's own reducer leaves out or gets wrong: the kind that equals it.
TWINS = {"reentrant": "recomputed", "strided": "straight", "thawed": "refrozen"}
# Some of the kinds that one process trains, too: the matrix of presets has them all.
ALONE = ["in_turns", "each_rank", "skipped", "compiled_in_part"][bool(devices.kind()) :]
MERGE = "strategy: {gradient_merge: true, gradient_merge_configs: {k_steps: 4, avg: true}}"


@pytest.fixture(scope="module", params=mostly("3.3.1"))
def python(request: pytest.FixtureRequest) -> Path:
    return PYTHONS[request.param]


@pytest.fixture(scope="module")
def trained(python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Train every kind with Paddle's own data parallel, and ALONE in one process, too."""
    words = f"--alone={','.join(ALONE)}"
    return launch(python, tmp_path_factory.mktemp("plain"), words).reports


@pytest.fixture(scope="module")
def plain(trained: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of the kinds that Paddle's own data parallel trains."""
    return [
        {name: result for name, result in report.items() if not name.startswith("alone ")}
        for report in trained
    ]


@pytest.fixture(scope="module")
def merged(
    python: Path, plain: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """Train every kind with merged gradients; return where the checkpoint is, too."""
    folder = tmp_path_factory.mktemp("merged")
    # Paddle's own reducer crashes on merged sparse gradients: refused.
    names = [name for name in kinds(plain) if name != "sparse"]
    words = f"--kinds={','.join([*names, *TWINS])}"
    return launch(python, folder, words, strategy=MERGE, accumulate=1).reports, folder


def kinds(plain: list[dict[str, Any]]) -> list[str]:
    """Return the names of the trainings that the script knows; several of them are one kind."""
    grouped = {"lookahead", "average"}
    return [*(name for name in plain[0] if name not in grouped), "wrapped"]


def assert_same(plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Compare each kind of OURS with PLAIN, rank by rank, and the ranks with each other."""
    for rank, report in enumerate(ours):
        for name, kind in report.items():
            expected = plain[min(rank, 1)][TWINS.get(name, name)]
            assert kind["weights"] == ours[0][name]["weights"], (rank, name)
            for what in ("weights", "running", "averaged", "scale"):
                if what in expected:
                    near = pytest.approx(expected[what], abs=1e-6)
                    assert kind[what] == near, (rank, name, what)


def dense(report: dict[str, Any], name: str) -> list[int]:
    """Return the bytes of the gradients that the last backward of the training NAME reduces."""
    sizes: list[int] = report[name]["sizes"]
    if name == "paired":
        # The second model's gradients come first.
        return sizes[: len(sizes) // 2]
    return sizes


def sent(*buckets: list[int]) -> list[int]:
    """Return the bytes of the allreduces of BUCKETS; a lone gradient has no padding."""
    return [
        4 * devices.elements(*(size // 4 for size in sizes)) if len(sizes) > 1 else sizes[0]
        for sizes in buckets
        if sizes
    ]


def test_merged_gradients_of_every_kind_equal_a_larger_batch(
    plain: list[dict[str, Any]], merged: tuple[list[dict[str, Any]], Path]
) -> None:
    ranks = [dict(report) for report in merged[0]]
    assert ranks[0].keys() == {*plain[0], *TWINS} - {"sparse"}
    assert_same(plain, ranks)


def test_sparse_gradients_are_not_merged(python: Path, tmp_path: Path) -> None:
    words = ("--kinds=sparse",)
    done = launch(python, tmp_path, *words, strategy=MERGE, accumulate=1, exit_code=1)
    assert "a gradient is sparse: create embeddings with sparse=False" in done.output


# The table belongs to no Embedding layer, by which Paddle's reducer knows sparse gradients.
LOOKED_UP = """
import paddle
paddle.distributed.init_parallel_env()
class LookUp(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.table, self.last = self.create_parameter([4, 6]), paddle.nn.Linear(6, 1)
    def forward(self, rows):
        return self.last(paddle.nn.functional.embedding(rows, self.table, sparse=True))
model = paddle.DataParallel(LookUp())
model(paddle.arange(4)).sum().backward()
"""


# By fleetrun's reducer, and by Paddle's, which crashes without a strategy.
@pytest.mark.parametrize("number", [2, 1])
def test_sparse_gradients_without_a_layer_are_refused(
    python: Path, number: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOOKED_UP)
    words = ["--set=fuse_grad_size_in_num=1", f"--set=nccl_comm_num={number}", "train.py"]
    done = run(python, ["-m", "fleetrun", "--nproc_per_node=2", *words], tmp_path)
    assert done.returncode == 1, done.stdout
    logs = "".join(path.read_text() for path in (tmp_path / "log").glob("workerlog.*"))
    assert ".w_0 is sparse, and ranks average sparse gradients of nn.Embedding" in logs


def test_a_training_is_resumed_between_rounds_and_a_rest_is_dropped(
    python: Path,
    plain: list[dict[str, Any]],
    merged: tuple[list[dict[str, Any]], Path],
    tmp_path: Path,
) -> None:
    words = ("--kinds=resumed", "--resume", f"--checkpoint={merged[1]}")
    reports, output = launch(python, tmp_path, *words, strategy=MERGE, accumulate=1)
    assert_same(plain, reports)
    assert reports[0]["resumed"]["after"] == reports[0]["resumed"]["weights"]
    assert "2 micro-steps of a partial round were dropped" in output


def test_buckets_and_fused_optimizers_give_every_kind_the_weights_of_paddles_own(
    python: Path,
    plain: list[dict[str, Any]],
    trained: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    words = f"--kinds={','.join([*kinds(plain), *TWINS, *ALONE])}"
    strategy = """
strategy: {fuse_grad_size_in_num: 3, nccl_comm_num: 2}
build_strategy: {fuse_all_optimizer_ops: true}
"""
    # Models with sparse gradients are left to Paddle's reducer, which has one communicator.
    ranks = launch(python, tmp_path, words, strategy=strategy, is_strict=False).reports
    # Paddle's own reducer cannot train these: they are compared with one process.
    train_kinds.assert_as_alone(trained[0], ranks, ALONE)
    ranks = [{name: kind for name, kind in report.items() if name not in ALONE} for report in ranks]
    assert ranks[0].keys() == {*plain[0], *TWINS}
    assert_same(plain, ranks)
    for name, kind in ranks[0].items():
        if name == "fitted":
            # The script cannot count inside Paddle's own training loop.
            continue
        sizes, last = dense(ranks[0], name), kind["summed"][-1]
        if not last:
            # A single bucket, or a model that is left to Paddle's own reducer.
            continue
        buckets = [sizes[at : at + 3] for at in range(0, len(sizes), 3)]
        assert len(last) == len(buckets), name
        assert sum(last) == sum(sent(*buckets)), name
    # The script itself averages over two rounds of micro-steps.
    assert [len(sizes) for sizes in ranks[0]["accumulated"]["summed"]] == ([0] * 7 + [2]) * 2


def test_an_incomplete_group_and_one_allreduce_at_a_time_sum_merged_gradients(
    python: Path, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    strategy = """
strategy:
  use_hierarchical_allreduce: true
  hierarchical_allreduce_inter_nranks: 3
  last_comm_group_size_MB: 0.001
  sync_nccl_allreduce: true
  gradient_merge: true
  gradient_merge_configs: {k_steps: 4, avg: false}
"""
    # The script divides its losses itself, so gradients are summed.
    words = ("--kinds=transformer,tied,strided,frozen", "--divide=4")
    ranks = launch(python, tmp_path, *words, strategy=strategy, nranks=4, accumulate=1).reports
    assert_same(plain, ranks)
    for name in ranks[0]:
        for rank, report in enumerate(ranks):
            kind, leads = report[name], rank in {0, 3}
            made = [sizes for sizes in kind["summed"] if sizes]
            # There are three updates; only leaders take part in the second level.
            assert len(made) == (3 if leads else 0)
            # The last rank is a group by itself.
            assert (kind["reduced"] == kind["broadcast"] == 0) is (rank == 3)
            assert kind["waited"] == sum(map(len, made)) + kind["reduced"] + kind["broadcast"]
            if leads:
                sizes = dense(report, name)
                # The last bucket holds the gradients that fit, or the last one alone.
                fitting = (at for at in range(len(sizes)) if sum(sizes[at:]) <= 0.001 * 2**20)
                last = next(fitting, len(sizes) - 1)
                assert made[-1] == sent(sizes[:last], sizes[last:]), name
