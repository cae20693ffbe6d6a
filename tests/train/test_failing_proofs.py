"""Checks that only watch a training may fail: the training goes on as without them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from training import MODELS, PYTHONS, SITE, evidence, mostly, run, told, train

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.train

BUCKETS = {"fuse_grad_size_in_num": 4, "nccl_comm_num": 2}


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_ranks_do_not_wait_for_one_whose_check_fails(version: str, tmp_path: Path) -> None:
    fault = {"where": "checksums.of_values", "rank": 1}
    first, second = train(
        PYTHONS[version],
        "failing.py",
        tmp_path / "ours",
        BUCKETS,
        check_ranks=1,
        more={"FAULT": json.dumps(fault)},
    )
    assert first["weights"] == second["weights"]
    why = "ValueError: (NotFound) it is broken"
    assert second["remarks"] == [f"the comparison of ranks has failed and is skipped: {why}"]
    assert first["remarks"] == []
    proofs = [evidence(tmp_path / "ours", rank) for rank in (0, 1)]
    assert [proof["failures"] for proof in proofs] == [[], second["remarks"]]
    note = "the ranks are no longer compared: rank 1 could not take part"
    assert all(note in proof["notes"] for proof in proofs)
    assert [row["status"] for row in proofs[1]["fields"]] == ["effective"] * 2


def test_a_strict_strategy_ends_for_no_proof_that_fails(tmp_path: Path) -> None:
    argv = ["-m", "fleetrun", "--nproc_per_node=2", "--strategy_strict"]
    argv += [f"--set={name}={value}" for name, value in BUCKETS.items()]
    done = run(
        PYTHONS["3.3.1"],
        [*argv, MODELS / "failing.py"],
        tmp_path,
        OUTPUT=str(tmp_path / "report"),
        FAULT=json.dumps({"where": "dygraph.reducer_report.plural"}),
    )
    assert done.returncode == 0, done.stdout
    # Where the report itself fails, the table has no evidence: that is no failure.
    assert "no word" in done.stdout, done.stdout
    assert "has failed and is skipped" in done.stdout


# Faults of a single rank that the others would wait for.
BROKEN = """
def broken(*_):
    raise ValueError("it is broken")
"""
SPLITS = {
    "no code": (
        'sys.modules["_fleetrun_inject.spec"] = None',
        "the strategy cannot be applied: ModuleNotFoundError(",
    ),
    "another Paddle": (
        'del sys.modules["paddle.base.framework"]._dygraph_place_guard',
        "in this Paddle paddle.base.framework._dygraph_place_guard is missing: ",
    ),
    "no patch": (
        f'{BROKEN}\nsys.modules["_fleetrun_inject.dygraph.data_parallel"].Reducers.patch = broken',
        "this paddle.distributed.parallel cannot be patched: ValueError(",
    ),
}
SPLIT = """
import os, sys, time

def spoil():
    exec(os.environ["SPOIL"], {"sys": sys, "__name__": "_fleetrun_inject.dygraph.data_parallel"})

class Spoiler:
    def find_spec(self, name, path=None, target=None):
        if name == "paddle":
            finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)))
            load = spec.loader.exec_module

            def exec_module(module):
                # Our code and Paddle's are loaded, and ours has not looked at Paddle's yet.
                load(module)
                spoil()

            spec.loader.exec_module = exec_module
            return spec

if os.environ["PADDLE_TRAINER_ID"] in os.environ["WHERE"]:
    if os.environ["WHEN"] == "before":
        spoil()
    else:
        # Behind our finder, which calls what waits for Paddle.
        sys.meta_path.insert(1, Spoiler())
import paddle
from paddle.distributed import fleet
if os.environ["WHERE"] == os.environ["PADDLE_TRAINER_ID"]:
    # Gloo may abort where ranks differ in what they send.
    time.sleep(60)
fleet.init(is_collective=True)
model = paddle.DataParallel(paddle.nn.Linear(4, 4))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
for _ in range(3):
    model(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
"""


def split(folder: Path, spoil: str, **how: str) -> subprocess.CompletedProcess[str]:
    """Train on two ranks; those in WHERE run SPOIL."""
    (folder / "train.py").write_text(SPLIT)
    words = ["-m", "fleetrun", "--nproc_per_node=2", "--strategy=overlap", "train.py"]
    return run(PYTHONS["3.3.1"], words, folder, SPOIL=spoil, **how)


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("no patch", "1"),
        ("another Paddle", "01"),
        *(pytest.param(what, "1", marks=pytest.mark.long) for what in list(SPLITS)[:2]),
    ],
)
def test_a_rank_that_cannot_apply_the_strategy_keeps_nobody_waiting(
    what: str, ranks: str, tmp_path: Path
) -> None:
    spoil, sentence = SPLITS[what]
    # Our code is loaded before Paddle.
    done = split(tmp_path, spoil, WHERE=ranks, WHEN="before" if what == "no code" else "after")
    # If no rank can apply it, all ranks train without.
    assert done.returncode == (5 if ranks == "1" else 0), done.stdout
    assert (f"Rank 1: {sentence}" in done.stdout) is (ranks == "1"), done.stdout


# What is patched at a later import, as only that can fail on one rank and not on the others.
LATER = """
import sys
import paddle
print(*sorted(sys.modules["_fleetrun_inject.import_hooks"]._callbacks))
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_all_that_ranks_communicate_by_is_patched_when_paddle_is_imported(
    version: str, tmp_path: Path
) -> None:
    asked = told({"strategy": {**BUCKETS, "gradient_merge": True}, "topology": {"nranks": 2}})
    (tmp_path / "strategy.json").write_text(json.dumps(asked))
    done = run(
        PYTHONS[version],
        ["-c", LATER],
        tmp_path,
        PYTHONPATH=str(SITE),
        PADDLE_TRAINERS_NUM="2",
        FLEETRUN_STRATEGY_FILE=str(tmp_path / "strategy.json"),
        FLEETRUN_RECORDS=str(tmp_path / "rank.0.jsonl"),
    )
    later = set(done.stdout.splitlines()[-1].split())
    # These patches only watch: layers of experts, and pipelines that Paddle 2 lacks.
    parallel = "paddle.distributed.fleet.meta_parallel"
    watched = {"paddle.incubate.distributed.models.moe.moe_layer", f"{parallel}.dualpipev"}
    assert {name for name in later if name.startswith("paddle.")} <= watched, done.stdout


DEAF = """
import os, sys
if os.environ["PADDLE_TRAINER_ID"] == "1" and not sys.flags.isolated:
    os.execv(sys.executable, [sys.executable, "-I", *sys.argv])
import paddle
layer = paddle.nn.Linear(2, 1)
optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
layer(paddle.ones([1, 2])).sum().backward()
optimizer.step()
"""


@pytest.mark.extended
def test_the_table_names_a_rank_whose_python_ignores_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEAF)
    words = ["-m", "fleetrun", "--nproc_per_node=2", "--strategy=overlap", "--strategy_strict"]
    done = run(PYTHONS["3.3.1"], [*words, "train.py"], tmp_path, PYTHONPATH="")
    assert done.returncode == 5, done.stdout
    why = "it never imported Paddle, or its Python ignores PYTHONPATH (-I, -E, -S)"
    assert f"Rank 1 left no evidence: {why}" in " ".join(done.stdout.split()), done.stdout


OTHER = """
import os, sys, time
other = os.environ["OTHER"]
if os.environ["PADDLE_TRAINER_ID"] == "1" and sys.executable != other:
    os.execv(other, [other, *sys.argv])
import paddle
# As ranks whose Paddles cannot connect.
time.sleep(600)
"""


def test_ranks_with_different_paddles_keep_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OTHER)
    words = ["-m", "fleetrun", "--nproc_per_node=2", "--strategy=overlap", "train.py"]
    done = run(PYTHONS["3.3.1"], words, tmp_path, OTHER=str(PYTHONS["2.6.2"]))
    assert done.returncode == 5, done.stdout
    assert "    Rank 1: its Paddle is 2.6.2, and that of rank 0 is 3.3.1.\n" in done.stdout
