"""Static programs after fleetrun's passes, and the evidence about them, in one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from training import PYTHONS, ROOT
from waiting import TRAINING_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}
# A network of three layers has six gradients.
SCENARIOS: dict[str, dict[str, Any]] = {
    "packed": {
        "strategy": {"fuse_grad_size_in_num": 2},
        "build_strategy": {"fuse_all_optimizer_ops": True, "enable_auto_fusion": True},
        "optimizer": "Momentum",
    },
    "channels": {"strategy": {"fuse_grad_size_in_num": 2, "nccl_comm_num": 2}},
    "more channels than buckets": {"strategy": {"fuse_grad_size_in_num": 2, "nccl_comm_num": 4}},
    "a channel for one bucket": {"strategy": {"fuse_all_reduce_ops": True, "nccl_comm_num": 2}},
    "stepped with each run": {"strategy": MERGE, "optimizer": "scheduled", "runs": 8},
    "stepped each fourth run": {
        "strategy": MERGE,
        "optimizer": "scheduled",
        "runs": 7,
        "schedule_every": 4,
    },
    "amp": {"strategy": {"amp": True}},
    "recompute": {
        "strategy": {"recompute": True, "recompute_configs": {"checkpoints": ["relu_0.tmp_0"]}}
    },
    "recompute nothing": {"strategy": {"recompute": True}},
    "lars of SGD": {"strategy": {"lars": True}},
    "lamb of SGD": {"strategy": {"lamb": True}},
    "sharding": {
        "strategy": {
            "sharding": True,
            "sharding_configs": {"segment_broadcast_MB": 1, "sharding_degree": 4},
        }
    },
    "sharding in groups": {
        "strategy": {
            "sharding": True,
            "sharding_configs": {
                "segment_broadcast_MB": 1,
                "sharding_degree": 2,
                "dp_degree": 2,
            },
        }
    },
    "shards that accumulate": {
        "strategy": {
            "sharding": True,
            "sharding_configs": {"sharding_degree": 4, "gradient_merge_acc_step": 2},
        }
    },
    "merging shards": {
        "strategy": {**MERGE, "sharding": True, "sharding_configs": {"sharding_degree": 4}}
    },
    "streams": {"strategy": {"calc_comm_same_stream": True, "sync_nccl_allreduce": True}},
    "sync_batch_norm": {"strategy": {"sync_batch_norm": True}},
    "communicators on GPUs": {
        "strategy": {"nccl_comm_num": 2, "fuse_grad_size_in_num": 2},
        "gpu": True,
    },
    "two losses": {"strategy": {"fuse_grad_size_in_num": 2}, "twice": True},
    "two losses, no strategy": {"twice": True},
}


@cache
def build(python: Path, names: tuple[str, ...], pir: str) -> dict[str, Any]:
    # Paddle writes a picture of each sharded program to the current folder.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, ROOT / "tests" / "train" / "models" / "static_programs.py"],
            input=json.dumps({name: SCENARIOS[name] for name in names}),
            env={
                **os.environ,
                "FLAGS_enable_pir_api": pir,
                "CUDA_VISIBLE_DEVICES": "",
            },
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TRAINING_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    programs: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    return programs


class Built:
    """The programs of one Paddle."""

    def __init__(self, version: str, programs: dict[str, Any]) -> None:
        self.version = version
        self._programs = programs
        self.allreduce = "all_reduce" if version == "3.3.1" else "c_allreduce_sum"

    def main(self, name: str) -> dict[str, int]:
        """Return the count of each operator in the main block of the program NAME."""
        assert not self._programs[name]["error"], self._programs[name]["error"]
        return dict(self._programs[name]["blocks"][0])

    def order(self, name: str) -> list[str]:
        """Return the types of the operators of the main block."""
        return list(self._programs[name]["order"][0])

    def error(self, name: str) -> str:
        """Return the error of the program NAME."""
        return str(self._programs[name]["error"])

    def report(self, name: str) -> dict[str, Any]:
        """Return the whole report on the program NAME."""
        assert not self._programs[name]["error"], self._programs[name]["error"]
        return dict(self._programs[name])

    def outcome(self, name: str, field: str) -> tuple[str, str]:
        """Return the status of FIELD in the program NAME, and its reason or evidence."""
        (row,) = [row for row in self._programs[name]["fields"] if row["name"] == field]
        return row["status"], row["reason"] or row["evidence"]


@pytest.fixture(params=["3.3.1", "2.6.2"])
def built(request: pytest.FixtureRequest) -> Built:
    python = PYTHONS[request.param]
    if not python.exists():
        reason = f"{python} is not there: scripts/test sets it up"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Built(request.param, build(python, tuple(SCENARIOS), "0"))


def test_several_communicators_carry_buckets_while_backward_goes_on(built: Built) -> None:
    assert built.main("channels")["py_func"] == 6
    assert built.allreduce not in built.main("channels")
    order = built.order("channels")
    first, second, third, *waits = (i for i, kind in enumerate(order) if kind == "py_func")
    # Each bucket is sent during backward, and waited for where its parameters are updated.
    assert order[first:second].count("matmul_v2_grad") == 1
    assert order[second:third].count("matmul_v2_grad") == 1
    assert len(waits) == 3
    assert order[waits[0] :] == ["py_func", "sgd", "sgd"] * 3

    for name, counts in (
        ("channels", "3 allreduces over 2 communicators"),
        ("more channels than buckets", "3 allreduces over 3 communicators"),
        ("a channel for one bucket", "1 allreduce over 1 communicator"),
    ):
        evidence = f"{counts}, not Paddle's own"
        assert built.outcome(name, "nccl_comm_num") == ("effective", evidence)


def test_rates_advance_with_updates_or_when_the_script_says_so(built: Built) -> None:
    assert built.report("stepped with each run")["rates"] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert built.report("stepped each fourth run")["rates"] == [1, 1, 1, 1, 0.5, 0.5, 0.5]


def test_what_is_left_of_a_round_is_told(built: Built) -> None:
    notes = built.report("stepped with each run")["notes"]
    assert "2 micro-steps of a partial round were dropped" in notes
    notes = built.report("stepped each fourth run")["notes"]
    assert "1 micro-step of a partial round was dropped" in notes


def test_what_paddle_puts_into_the_program_is_counted(built: Built) -> None:
    assert built.outcome("recompute", "recompute") == (
        "effective",
        "2 operators are recomputed in the backward pass",
    )


def test_what_is_not_there_has_a_reason(built: Built) -> None:
    assert built.outcome("lars of SGD", "lars") == (
        "no_effect",
        "Paddle replaces Momentum only; here: sgd",
    )
    assert built.outcome("lamb of SGD", "lamb")[1].endswith("replaces Adam only; here: sgd")
    assert "names no checkpoints" in built.outcome("recompute nothing", "recompute")[1]
    assert built.outcome("sync_batch_norm", "sync_batch_norm")[0] == "no_effect"
    assert built.outcome("streams", "calc_comm_same_stream")[0] == "no_effect"


@pytest.mark.parametrize("name", ["two losses", "two losses, no strategy"])
def test_a_second_loss_in_a_program_is_refused_as_paddle_crashes_there(
    built: Built, name: str
) -> None:
    assert "can minimize one loss of a static program only" in built.error(name)


def test_ranks_whose_gradients_paddle_would_not_sum_are_refused(built: Built) -> None:
    assert "ranks would train apart" in built.error("merging shards")


def test_communicators_on_gpus_are_as_many_as_paddle_really_has(built: Built) -> None:
    status, text = built.outcome("communicators on GPUs", "nccl_comm_num")
    if built.version == "3.3.1":
        assert (status, text) == (
            "no_effect",
            "on GPUs, Paddle 3 runs all rings over the first communicator",
        )
    else:
        assert status == "effective"


@pytest.mark.parametrize("name", ["packed", "communicators on GPUs"])
def test_allreduces_are_in_the_same_order_on_all_ranks(built: Built, name: str) -> None:
    outcome = built.report(name)
    # Paddle 2 keeps the order of its own operators.
    assert len(outcome["summed"]) == (3 if built.version == "3.3.1" else 0)
    for before, after in itertools.pairwise(outcome["summed"]):
        assert [after, before] in outcome["depends"]


def test_amp_without_casts_is_no_effect(built: Built) -> None:
    assert built.outcome("amp", "amp")[0] == "no_effect"
    assert "cast" not in built.main("amp")
    assert built.main("amp")["check_finite_and_unscale"] == 6


def test_each_paddle_shards_where_it_can(built: Built) -> None:
    if built.version == "2.6.2":
        assert "FLAGS_dynamic_static_unified_comm" in built.error("sharding")
        return
    assert built.outcome("sharding", "sharding") == ("effective", "6 broadcast, 6 reduce")
    # Twelve collectives, in a chain.
    assert built.main("sharding")["depend"] == 11
    assert "before all of their gradients are added" in built.error("shards that accumulate")
    assert "among all 4 ranks only" in built.error("sharding in groups")


def test_programs_of_the_newer_kind_are_refused_with_what_to_do() -> None:
    outcome = build(PYTHONS["3.3.1"], ("packed",), "1")["packed"]
    assert "--env=FLAGS_enable_pir_api=0" in outcome["error"]
