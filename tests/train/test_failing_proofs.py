"""Checks that only watch a training may fail: the training goes on as without them."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any

import pytest
from training import MODELS, PYTHONS, ROOT, SITE, evidence, mostly, run, told, train

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.train

MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}}
BUCKETS = {"fuse_grad_size_in_num": 4, "nccl_comm_num": 2}
# Strategies, and what fails with each of them if every call across the border fails.
EVERYWHERE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**BUCKETS, **MERGE, "bf16_allreduce": True, "amp": True}, {"scaled": True}),
    # Gradients so small that they are left to Paddle's reducer.
    (
        {"fuse_grad_size_in_MB": 4, "find_unused_parameters": False},
        {"fleet": True, "trainer": True},
    ),
]
# What fails in a static graph if no server runs and the launcher stops the job after two updates.
IN_STATIC_GRAPHS = {
    "the count of operators",
    "the count of what is sent to servers",
    "the count of a program's updates",
    "the wait for other ranks at the end",
}
STATIC = """
import os, sys
import numpy as np
import paddle
from paddle import static

border = sys.modules["_fleetrun_inject.border"]

def broken(function, *args, **options):
    if getattr(function, "func", function).__name__ == "_stop":
        return function(*args, **options)
    raise ValueError("(NotFound) it is broken")

border._call = broken
paddle.enable_static()
x = static.data("x", [4, 3])
loss = static.nn.fc(x, 1).mean()
paddle.optimizer.SGD(0.1).minimize(loss)
executor = static.Executor(paddle.CPUPlace())
executor.run(static.default_startup_program())
for _ in range(2):
    executor.run(feed={"x": np.ones([4, 3], "float32")}, fetch_list=[loss])
layer = paddle.nn.Linear(3, 1)
paddle.disable_static()
layer = paddle.nn.Linear(3, 1)
optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
for _ in range(2):
    layer(paddle.ones([1, 3])).backward()
    optimizer.step()
raise SystemExit("the launcher's end has not come")
"""


def everything_watched() -> Iterator[str]:
    """Yield the code's description of each function that is called across the border."""
    for path in (ROOT / "fleetrun" / "inject").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                match node.func:
                    case ast.Attribute(attr="watching"):
                        what = node.args[0]
                    case (
                        ast.Attribute(attr="on_update" | "before_update") | ast.Name(id="on_update")
                    ):
                        what = node.args[1]
                    case _:
                        continue
                if isinstance(what, ast.Constant):
                    yield str(what.value)
                elif isinstance(what, ast.Name) and what.id in named:
                    yield str(named[what.id])


def test_all_that_watches_may_fail(tmp_path: Path) -> None:
    failed = set()
    for place, (strategy, how) in enumerate(EVERYWHERE):
        ran = {}
        faults = {"well": how, "broken": {"where": "", **how}}
        # The weights of the second are compared among its ranks only.
        for name, fault in list(faults.items())[place:]:
            folder = tmp_path / f"{name}{place}"
            seen = tmp_path / f"seen-{name}{place}"
            seen.mkdir()
            # Weights that cannot be moved stay as they are.
            verify = {"path": str(seen), "updates": 1000, "snapshots": 1}
            verify["moves"] = name == "broken"
            ran[name] = train(
                PYTHONS["3.3.1"],
                "failing.py",
                folder,
                strategy,
                check_ranks=1,
                profile="1-3",
                builds={"fuse_all_optimizer_ops": True},
                more={
                    "FAULT": json.dumps(fault),
                    "FLEETRUN_HEARTBEAT": str(folder / "heartbeat"),
                    "FLEETRUN_STOP_AFTER": "1000",
                    # This rank counts as restarted.
                    "PADDLE_RESTART_COUNT": "1",
                    "FLEETRUN_VERIFY": json.dumps(verify),
                    "FLEETRUN_FLIGHT_RECORDER": str(seen / "collectives"),
                },
            )
        for well in ran.get("well", ()):
            assert well["weights"] == ran["broken"][0]["weights"]
            assert well["remarks"] == []
        for broken in ran["broken"]:
            assert broken["weights"] == ran["broken"][0]["weights"]
            failures = [
                text.partition(" has failed and is skipped: ") for text in broken["remarks"]
            ]
            assert {why for _, _, why in failures} == {"ValueError: (NotFound) it is broken"}
            # There is one remark about each.
            assert len({what for what, _, _ in failures}) == len(failures)
            failed |= {what for what, _, _ in failures}
    assert failed | IN_STATIC_GRAPHS == set(everything_watched())


@pytest.mark.parametrize("version", PYTHONS)
def test_all_that_watches_static_graphs_may_fail(version: str, tmp_path: Path) -> None:
    asked = told({"strategy": {"fuse_all_reduce_ops": True}})
    (tmp_path / "strategy.json").write_text(json.dumps(asked))
    (tmp_path / "train.py").write_text(STATIC)
    done = run(
        PYTHONS[version],
        ["train.py"],
        tmp_path,
        PYTHONPATH=str(SITE),
        PADDLE_PSERVERS_IP_PORT_LIST="127.0.0.1:1",
        FLEETRUN_STOP_AFTER="2",
        FLEETRUN_STRATEGY_FILE=str(tmp_path / "strategy.json"),
        FLEETRUN_RECORDS=str(tmp_path / "rank.0.jsonl"),
        FLAGS_enable_pir_api="0",
    )
    output = done.stdout
    assert done.returncode == 0, output
    for what in IN_STATIC_GRAPHS:
        assert output.count(f"{what} has failed and is skipped: ValueError: (NotFound)") == 1, (
            output
        )


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
    ("what", "ranks"), [*((split, "1") for split in SPLITS), ("another Paddle", "01")]
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
    asked = told({"strategy": {**BUCKETS, **MERGE}, "topology": {"nranks": 2}})
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
