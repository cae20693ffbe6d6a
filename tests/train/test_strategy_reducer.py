"""fleetrun's reducer with unusual models: another order of gradients, several backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from training import PYTHONS, assert_as_alone, evidence, in_turns, mostly, train, train_as_alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


def test_layers_in_two_models_are_averaged_as_those_in_one_and_models_go(tmp_path: Path) -> None:
    fused = {"fuse_grad_size_in_num": 1, "nccl_comm_num": 2}
    for rank in train_as_alone("3.3.1", "shared.py", tmp_path, fused):
        assert rank["gone"] == {"at_once": True, "later": True}


# The first of these are one allreduce of two gradients or more; the second one for each.
@pytest.mark.parametrize(
    ("version", "fused"),
    [
        ("3.3.1", {"fuse_all_reduce_ops": True}),
        pytest.param("2.6.2", {"fuse_all_reduce_ops": False}, marks=pytest.mark.long),
    ],
)
def test_strided_gradients_are_averaged_as_what_they_stand_for(
    version: str, fused: dict[str, bool], tmp_path: Path
) -> None:
    train_as_alone(version, "strided.py", tmp_path, fused)


@pytest.mark.long
def test_paddles_own_reducer_gets_strided_gradients_wrong_as_the_readme_says(
    tmp_path: Path,
) -> None:
    ranks = train(PYTHONS["3.3.1"], "strided.py", tmp_path / "paddles", None)
    first, second = (rank["adapted"]["weights"] for rank in ranks)
    assert max(abs(weight - other) for weight, other in zip(first, second, strict=True)) > 0.1


@pytest.mark.parametrize("version", mostly("2.6.2"))
def test_backwards_that_change_later_are_averaged_as_those_of_one_process(
    version: str, tmp_path: Path
) -> None:
    asked = {"fuse_grad_size_in_MB": 0.0003}
    for rank in train_as_alone(version, "handed_over.py", tmp_path, asked, check_ranks="auto"):
        # fleetrun averages second backwards later; Paddle's reducer sends without Python.
        for name, model in rank.items():
            late = name in {"several", "turned"}
            made = [bool(count) for count in model["allreduces"]]
            assert made == [*[False] * 4, *[late] * 4], name
    proof = evidence(tmp_path / "ours")
    (field,) = proof["fields"]
    assert field["status"] == "effective"
    assert "as built: Paddle's own reducer" in field["evidence"]


@pytest.mark.parametrize(
    ("version", "asked"),
    in_turns({"fuse_grad_size_in_MB": 0.0003}, {"fuse_grad_size_in_num": 2, "nccl_comm_num": 2}),
)
def test_odd_backwards_are_averaged_right_or_refused(
    version: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train(
        PYTHONS[version], "odd_backwards.py", tmp_path / "ours", asked, check_ranks="auto"
    )
    assert_as_alone([models for models, _ in ranks])
    is_ours = "nccl_comm_num" in asked
    for _, stopped in ranks:
        assert "after some of its gradients were sent" in stopped.pop("raised")
        text = "had a gradient on every rank at first" if is_ours else "find_unused_parameters"
        assert text in stopped["left_out"]
        assert ("" if is_ours else "has been ready before") in stopped["twice"]
        # The weight of a layer of Paddle's, which Paddle's reducer misreads.
        text = "" if is_ours else "The ranks no longer train the same model: after update 8 "
        assert text in stopped["turned"]
        assert any(stopped[name] for name in ("twice", "turned")) is not is_ours


# Paddle's own reducer raises ValueError in the first backward after the cast.
@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_models_that_are_cast_or_compiled_after_they_were_wrapped_are_averaged(
    version: str, tmp_path: Path
) -> None:
    asked = {"fuse_grad_size_in_MB": 0.0003}
    ranks = train(PYTHONS[version], "cast.py", tmp_path / "ours", asked, check_ranks="auto")
    for name in ranks[0]:
        # Around 1 bfloat16 has steps of 0.008.
        assert_as_alone([rank[name] for rank in ranks], 0.02 if "16" in name else 1e-6)
    proof = evidence(tmp_path / "ours")
    # Eight casts and the compiled functions, each with all ranks and in one process.
    assert (proof["updates"], proof["ranks_equal"], proof["failures"]) == (140, True, [])


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


@pytest.mark.parametrize(
    ("version", "strategy"),
    [("3.3.1", {"nccl_comm_num": 2}), pytest.param("2.6.2", MERGE, marks=pytest.mark.long)],
)
def test_models_and_optimizers_go_and_leave_their_communicators_to_the_next(
    version: str, strategy: dict[str, object], tmp_path: Path
) -> None:
    asked = {"fuse_grad_size_in_num": 2, **strategy}
    ranks = train(PYTHONS[version], "successive.py", tmp_path / "ours", asked)
    for rank in ranks:
        assert rank["are_gone"]
        # A model may be made before or after its predecessor has gone.
        assert max(rank["seen"][3:]) <= max(rank["seen"][:3]), rank["seen"]
        # The next model trains correctly with what was left.
        assert all(weights == rank["weights"][0] for weights in rank["weights"])
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_paddles_reducer_stays_where_fields_ask_for_its_own_values(tmp_path: Path) -> None:
    # The preset `recommended` on one host.
    asked = {
        "fuse_all_reduce_ops": True,
        "fuse_grad_size_in_MB": "auto",
        "nccl_comm_num": 1,
        "sync_nccl_allreduce": False,
        "use_hierarchical_allreduce": False,
    }
    # One bucket, like Paddle's: nothing to share among communicators.
    strategy = {**asked, "nccl_comm_num": 2, "sync_nccl_allreduce": True}
    ranks = train(PYTHONS["3.3.1"], "failing.py", tmp_path / "moot", strategy)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    fields = {field["name"]: field for field in evidence(tmp_path / "moot")["fields"]}
    assert "as built" in fields["fuse_grad_size_in_MB"]["evidence"]
    few = fields["nccl_comm_num"]
    assert few["reason"] == "there are too few to share: 1 allreduce"
    assert few["reason"] not in few["evidence"]
    assert {name: field["status"] for name, field in fields.items()} == {
        **dict.fromkeys(asked, "no_difference"),
        "nccl_comm_num": "no_effect",
    }
    # This field has an effect although Paddle's reducer takes it as an argument.
    train(PYTHONS["3.3.1"], "failing.py", tmp_path / "last", {"last_comm_group_size_MB": 0.0001})
    (field,) = evidence(tmp_path / "last")["fields"]
    assert field["status"] == "effective"
    assert "Paddle: 1" in field["evidence"]


@pytest.mark.long
def test_steps_make_few_calls_in_python_beside_those_of_paddle_alone(
    tmp_path: Path,
) -> None:
    # The preset `recommended` on one host.
    asked = {"fuse_grad_size_in_MB": "auto", "nccl_comm_num": 1}
    python, more = PYTHONS["3.3.1"], {"LAYERS": "60"}
    plain = train(python, "calls.py", tmp_path / "plain", None, more=more)
    ours = train(python, "calls.py", tmp_path / "ours", asked, check_ranks="auto", more=more)
    for without, with_strategy in zip(plain, ours, strict=True):
        # However many parameters there are; here 120.
        assert 0 < with_strategy - without <= 40
