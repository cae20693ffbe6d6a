"""The set-ups of Paddle's documentation as presets, on a script that does not mention them.

Real ranks train with each. The script itself counts what took effect; that is compared with the
evidence, and the weights with those of plain data parallel.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import devices
import pytest
from training import PYTHONS, run

from fleetrun.rundir import rankfile

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.train

SCRIPT = Path(__file__).parent / "models" / "residual.py"
# Eight steps of two samples on each of two ranks; or two steps of four times as many samples.
SMALL, LARGE = "16x8", "64x2"
# The gradients in the order of backward: last layer first.
SIZES = (10, 640, 64, 32768, 576, 72)
# Static graphs mostly wait while they start; dynamic ones keep a core busy.
AT_ONCE = 3


class Setup(NamedTuple):
    """One launch: a preset with a Paddle, the graph, the number of ranks, more options."""

    version: str
    preset: str
    graph: str = "dygraph"
    ranks: int = 2
    more: tuple[str, ...] = ()
    # An argument of the script.
    says: str = ""


def setups() -> list[Setup]:
    pairs = "--set=fuse_grad_size_in_num=2"
    two_levels = ("--set=hierarchical_allreduce_inter_nranks=2", pairs)
    listed = [
        Setup("3.3.1", "compute_fusion", "static"),
        Setup("3.3.1", "compute_fusion", "static", says="--bias"),
    ]
    for version in PYTHONS:
        listed += [
            Setup(version, ""),
            Setup(version, "overlap", more=("--set=nccl_comm_num=2", pairs)),
            Setup(version, "hierarchical_allreduce", ranks=4, more=two_levels),
            Setup(version, "gradient_merge"),
            Setup(version, "resnet50_32gpu"),
        ]
    listed += [
        Setup("2.6.2", "compute_fusion", "static"),
        Setup("2.6.2", "overlap", "static", more=("--set=nccl_comm_num=2", pairs)),
        Setup("2.6.2", "hierarchical_allreduce", "static", ranks=4, more=two_levels),
        Setup("2.6.2", "gradient_merge", "static"),
        Setup("2.6.2", "resnet50_32gpu", "static"),
    ]
    return listed


class Done(NamedTuple):
    """How a launch ended, what its ranks counted, and the evidence of each."""

    code: int
    output: str
    # Each rank's trainings; plain data parallel has a second one, with large batches.
    made: list[list[dict[str, Any]]]
    proofs: list[dict[str, Any]]

    def field(self, name: str) -> dict[str, Any]:
        """Return the row of the field NAME, whose status is the same on all ranks."""
        rows: list[dict[str, Any]] = [
            {field["name"]: field for field in proof["fields"]}[name] for proof in self.proofs
        ]
        assert {row["status"] for row in rows} == {rows[0]["status"]}
        return rows[0]

    def status(self, name: str) -> str:
        """Return the status of the field NAME."""
        return str(self.field(name)["status"])


def launch(setup: Setup, folder: Path) -> Done:
    folder.mkdir()
    words = [f"--nproc_per_node={setup.ranks}", *setup.more]
    arguments = [SMALL] if setup.preset else [SMALL, LARGE]
    if setup.preset:
        words.append(f"--strategy={setup.preset}")
    arguments += setup.says.split()
    if setup.graph == "static":
        arguments.append("--static")
    elif setup.preset == "overlap":
        arguments.append("--linger")
    done = run(PYTHONS[setup.version], ["-m", "fleetrun", *words, SCRIPT, *arguments], folder)
    ranks = range(setup.ranks)
    made = [folder / f"made.{rank}.json" for rank in ranks]
    proofs = [rankfile.evidence(str(folder / "log" / "latest"), str(rank)) for rank in ranks]
    return Done(
        done.returncode,
        done.stdout,
        [json.loads(path.read_text()) for path in made if path.exists()],
        [proof for proof in proofs if proof is not None],
    )


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Setup, Future[Done]]]:
    folder = tmp_path_factory.mktemp("setups")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            setup: pool.submit(launch, setup, folder / str(place))
            for place, setup in enumerate(setups())
        }
        pool.shutdown(cancel_futures=True)


class Trained:
    """Waits for launches, and compares their results."""

    def __init__(self, launches: dict[Setup, Future[Done]]) -> None:
        self._launches = launches

    def find(self, version: str, preset: str, graph: str = "dygraph", says: str = "") -> Done:
        """Return the result of a launch, which succeeded with equal weights on all ranks."""
        wanted = (version, preset, graph, says)
        (setup,) = [
            candidate for candidate in self._launches if (*candidate[:3], candidate.says) == wanted
        ]
        done = self._launches[setup].result()
        assert done.code == 0, done.output
        first, *others = done.made
        assert len(others) == setup.ranks - 1
        for trainings in others:
            assert [training["weights"] for training in trainings] == [
                training["weights"] for training in first
            ]
        if preset:
            assert len(done.proofs) == setup.ranks
            assert all(proof["complete"] and proof["ranks_equal"] for proof in done.proofs)
            assert all(proof["counts"]["parameters_compared"] for proof in done.proofs)
            assert {proof["graph"] for proof in done.proofs} == {graph}
            # Merged gradients make one update in four steps.
            updates = 2 if preset == "gradient_merge" else 8
            assert {proof["updates"] for proof in done.proofs} == {updates}
        return done

    def compare(self, done: Done, version: str, *, large: bool = False) -> None:
        """Assert that DONE has the weights of Paddle's own data parallel with a dynamic graph."""
        plain = self.find(version, "").made[0][1 if large else 0]["weights"]
        mine = done.made[0][0]["weights"]
        assert flat(mine) == pytest.approx(flat(plain), abs=1e-6)


@pytest.fixture
def trained(launches: dict[Setup, Future[Done]]) -> Trained:
    return Trained(launches)


def flat(value: Any) -> list[float]:
    return (
        [number for part in value for number in flat(part)] if isinstance(value, list) else [value]
    )


def counts(ops: list[str], *names: str) -> list[int]:
    return [ops.count(name) for name in names]


def allreduces(ops: list[str]) -> int:
    return sum(counts(ops, "c_allreduce_sum", "all_reduce"))


def calls(made: dict[str, Any], step: int = -1) -> list[tuple[str, int, int]]:
    """Return the collectives of one STEP; the first step has some of Paddle's own.

    This leaves out the checksums of averages, which are two numbers for each bucket.
    """
    sent = [(str(name), int(group), int(size)) for name, group, size in made["calls"][step]]
    most = 2 * len(SIZES)
    return [call for call in sent if call[0] != "all_reduce" or call[2] > most]


# Numbers per bucket, of two gradients each.
PAIRS = [SIZES[at : at + 2] for at in (0, 2, 4)]
BUCKETS = [devices.elements(*pair) for pair in PAIRS]


@pytest.mark.parametrize("version", PYTHONS)
def test_computation_fusion_makes_fewer_operators_of_a_static_graph(
    trained: Trained, version: str
) -> None:
    done = trained.find(version, "compute_fusion", "static")
    trained.compare(done, version)
    for rank in done.made:
        (ops,) = rank[0]["ops"]
        fused = ("fused_elemwise_add_activation", "fused_elemwise_add_activation_grad")
        # Two additions precede an activation; one operator updates all parameters.
        assert counts(ops, *fused, "merged_momentum", "momentum") == [2, 2, 1, 0]
    assert done.status("fuse_elewise_add_act_ops") == "effective"
    assert done.status("fuse_all_optimizer_ops") == "effective"
    for name in ("fuse_bn_act_ops", "fuse_relu_depthwise_conv"):
        assert "found nothing to fuse in this program" in done.field(name)["reason"]


def test_what_the_fused_operator_would_get_wrong_is_left_alone(trained: Trained) -> None:
    done = trained.find("3.3.1", "compute_fusion", "static", "--bias")
    assert "reads beyond a bias" in done.field("fuse_elewise_add_act_ops")["reason"]
    # The fused operator made them NaN.
    assert all(abs(weight) < 10 for weight in flat(done.made[0][0]["weights"]))
    assert "fused_elemwise_add_activation" not in done.made[0][0]["ops"][0]


PLACES = [("3.3.1", "dygraph"), ("2.6.2", "dygraph"), ("2.6.2", "static")]


@pytest.mark.parametrize(("version", "graph"), PLACES)
def test_overlap_sends_buckets_during_backward_over_both_communicators(
    trained: Trained, version: str, graph: str
) -> None:
    done = trained.find(version, "overlap", graph)
    trained.compare(done, version)
    for rank in done.made:
        sent = calls(rank[0])
        assert sorted(size for _, _, size in sent) == sorted(BUCKETS)
        assert {name for name, _, _ in sent} == {"all_reduce"}
        # The second of three buckets goes over the second communicator.
        (other,) = {group for _, group, size in sent if size == BUCKETS[1]}
        (first,) = {group for _, group, size in sent if size != BUCKETS[1]}
        assert first != other
        # The script holds back the last gradient until a bucket was sent.
        assert graph == "static" or rank[0]["early"] == [True] * 8
    assert done.field("nccl_comm_num")["in_effect"] == 2
    for name in ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "sync_nccl_allreduce"):
        assert done.status(name) == "effective"
    assert sorted(done.proofs[0]["counts"]["bucket_bytes"]) == sorted(
        4 * sum(pair) for pair in PAIRS
    )


@pytest.mark.parametrize(("version", "graph"), PLACES)
def test_hierarchical_allreduce_goes_by_groups_and_their_leaders(
    trained: Trained, version: str, graph: str
) -> None:
    done = trained.find(version, "hierarchical_allreduce", graph)
    trained.compare(done, version)
    for rank, made in enumerate(done.made):
        sent = calls(made[0])
        for name in ("reduce", "broadcast"):
            assert [size for operation, _, size in sent if operation == name] == BUCKETS
        among_leaders = [size for operation, _, size in sent if operation == "all_reduce"]
        assert among_leaders == (BUCKETS if rank in {0, 2} else [])
    for name in ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks"):
        assert done.status(name) == "effective"
    assert done.proofs[0]["counts"]["groups"] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("version", PYTHONS)
def test_gradient_merge_is_a_batch_four_times_as_large(trained: Trained, version: str) -> None:
    done = trained.find(version, "gradient_merge")
    trained.compare(done, version, large=True)
    for rank in done.made:
        made = [[call[0] for call in calls(rank[0], step)] for step in range(8)]
        # All gradients are one bucket.
        assert made == [[], [], [], ["all_reduce"]] * 2
        assert [len(step) for step in rank[0]["kernels"]] == [0, 0, 0, 6] * 2
    assert done.status("gradient_merge") == done.status("gradient_merge_configs") == "effective"


def test_a_static_graph_merges_in_a_block_of_its_own(trained: Trained) -> None:
    done = trained.find("2.6.2", "gradient_merge", "static")
    trained.compare(done, "2.6.2", large=True)
    for rank in done.made:
        main, now_and_then = rank[0]["ops"]
        assert [main.count("conditional_block"), allreduces(main), main.count("momentum")] == [
            1,
            0,
            0,
        ]
        assert [allreduces(now_and_then), now_and_then.count("momentum")] == [1, 6]
    assert done.status("gradient_merge") == "effective"


# Fields that two ranks of one host, or a CPU, cannot show.
NOT_HERE = {
    "use_hierarchical_allreduce",
    "hierarchical_allreduce_inter_nranks",
    "fuse_bn_act_ops",
    "num_threads",
    "num_iteration_per_drop_scope",
}


@pytest.mark.parametrize(("version", "graph"), PLACES)
def test_the_practice_of_32_gpus_holds_as_far_as_two_ranks_can(
    trained: Trained, version: str, graph: str
) -> None:
    done = trained.find(version, "resnet50_32gpu", graph)
    trained.compare(done, version)
    for rank in done.made:
        sent = [(name, size) for name, _, size in calls(rank[0])]
        if graph == "static":
            assert sent == [("all_reduce", devices.elements(*SIZES))]
            (ops,) = rank[0]["ops"]
            assert counts(ops, "fused_elemwise_add_activation", "merged_momentum") == [2, 1]
            assert "momentum" not in ops
        else:
            # A single bucket: Paddle's own reducer sends it without Python.
            assert not sent
            assert rank[0]["kernels"] == [["merged_momentum_"]] * 8
    # A static graph has nothing left to compute when its only allreduce starts.
    more = {"sync_nccl_allreduce" if graph == "static" else "fuse_elewise_add_act_ops"}
    without = {
        field["name"] for field in done.proofs[0]["fields"] if field["status"] == "no_effect"
    }
    # Two communicators cannot share one allreduce.
    assert without - {"nccl_comm_num"} == NOT_HERE | more
    assert all(done.field(name)["reason"] for name in without)
    assert done.field("nccl_comm_num")["in_effect"] in {None, 1}
    assert "FLAGS_conv_workspace_size_limit=4000" in done.output
