"""The evidence about a reducer in a dynamic graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from training import evidence

from fleetrun.inject import settings
from fleetrun.inject.dygraph.reducer_report import ReducerReport, ReducerSetup
from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def settings_are_reset() -> Iterator[None]:
    yield
    settings.reset(StrategySpec({}, {}, {}), Evidence("", StrategySpec({}, {}, {})))


def told(
    folder: Path,
    asked: dict[str, Any],
    *buckets: tuple[int, ...],
    calls: tuple[int, ...],
    agreements: int = 0,
    built: list[int] | None = None,
    deleted: tuple[int, ...] = (),
) -> dict[str, tuple[Any, ...]]:
    """Return status, value, reason and evidence of each field ASKED for.

    BUCKETS are the bytes of each model's buckets, CALLS those of each communicator. BUILT are the
    buckets of Paddle's reducer, if it took over. The models DELETED are gone at the last report.
    """
    spec = StrategySpec(asked, {}, {})
    proof = Evidence(str(folder / "rank.0.jsonl"), spec)
    settings.reset(spec, proof)
    report = ReducerReport(spec, proof)
    communicators: Any = [SimpleNamespace(calls=count) for count in calls]
    for number, sizes in enumerate([*buckets, *buckets[-1:]] if deleted else buckets):
        last = number == len(buckets)
        for model in deleted if last else ():
            report.forget(model)
        reducer: Any = SimpleNamespace(
            backwards=9 if last else 1,
            parameters=["p"] * (2 * len(sizes)),
            buckets=[SimpleNamespace(nbytes=size) for size in sizes],
            early=len(sizes) - 1,
            moved=0,
            agreements=agreements,
            sparse_collectives=3 * agreements,
            bytes_as_built=built,
        )
        report.reduced(
            reducer,
            ReducerSetup(
                *(number - last, communicators, None, [16], settings.overlaps()),
                nranks=4,
            ),
        )
    proof.updates = 1
    assert proof.claim()
    proof.write()
    knobs = evidence(folder)["knobs"]
    parts = ("status", "in_effect", "reason", "evidence")
    return {knob["name"]: tuple(knob[part] for part in parts) for knob in knobs}


def test_a_second_communicator_that_nothing_went_over_has_no_effect(tmp_path: Path) -> None:
    knobs = told(tmp_path, {"nccl_comm_num": 2}, (8,), calls=(1, 0))
    assert knobs["nccl_comm_num"] == (
        "no_effect",
        None,
        "there is only 1 allreduce to share",
        "1 communicator; 0 of 1 allreduce went out before the last gradient was ready",
    )


def test_communicators_that_were_used_are_told(tmp_path: Path) -> None:
    knobs = told(tmp_path, {"nccl_comm_num": 3}, (8, 8), calls=(1, 1, 0))
    assert knobs["nccl_comm_num"] == (
        "effective",
        2,
        "there are only 2 allreduces to share",
        "2 communicators in turn; 1 of 2 allreduces went out before the last gradient was ready",
    )


def test_auto_is_told_of_the_largest_model_in_as_many_digits_as_it_needs(tmp_path: Path) -> None:
    asked = {"fuse_grad_size_in_MB": "auto"}
    knobs = told(tmp_path, asked, (2**10, 2**10), (2**24, 2**24), calls=(2,))
    assert knobs["fuse_grad_size_in_MB"][:3] == (
        "effective",
        3.2,
        "auto: a tenth of 32 MB of gradients",
    )
    knobs = told(tmp_path, asked, (2**10, 2**10), calls=(2,))
    assert knobs["fuse_grad_size_in_MB"][1:3] == (
        1,
        "auto: a tenth of 0.00195 MB of gradients, but at least 1 MB",
    )


@pytest.mark.parametrize(
    ("size", "reason"), [(1, "each group has one rank"), (4, "all 4 ranks are in one group")]
)
def test_groups_without_a_second_level_have_their_reason(
    size: int, reason: str, tmp_path: Path
) -> None:
    asked = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": size}
    knobs = told(tmp_path, asked, (8,), calls=(1,))
    for name in asked:
        assert knobs[name] == ("no_effect", None, reason, "")


@pytest.mark.parametrize(("buckets", "status"), [((16,), "no_difference"), ((8, 8), "effective")])
def test_fields_make_no_difference_where_paddle_alone_does_the_same(
    buckets: tuple[int, ...], status: str, tmp_path: Path
) -> None:
    asked = {
        "fuse_all_reduce_ops": True,
        "fuse_grad_size_in_MB": "auto",
        "sync_nccl_allreduce": False,
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
    }
    knobs = told(tmp_path, asked, buckets, calls=(len(buckets),))
    own = {"nccl_comm_num", "use_hierarchical_allreduce"}
    assert {name: row[0] for name, row in knobs.items()} == {
        name: "no_difference" if name in own else status for name in asked
    }
    assert knobs["fuse_all_reduce_ops"][1] is True


def test_collectives_beside_the_buckets_are_told(tmp_path: Path) -> None:
    knobs = told(tmp_path, {"fuse_all_reduce_ops": True}, (8,), calls=(1,), agreements=1)
    assert knobs["fuse_all_reduce_ops"][3].endswith(
        "; plus 1 small allreduce to learn which gradients other ranks have"
        "; plus 3 collectives for sparse gradients"
    )


def test_buckets_of_paddles_reducer_are_told_as_built(tmp_path: Path) -> None:
    asked = {"fuse_grad_size_in_MB": 2}
    knobs = told(tmp_path, asked, (8, 8, 8), calls=(4,), agreements=1, built=[16, 8])
    (row,) = knobs.values()
    assert row[:2] == ("effective", 2)
    assert row[3] == (
        "6 gradients in 2 allreduces (Paddle: 1); largest 1.53e-05 MB; as built: Paddle's own"
        " reducer sends them, which cannot be observed; plus 3 collectives for sparse gradients"
    )


def test_paddles_reducer_counts_no_gradients(tmp_path: Path) -> None:
    asked = {"fuse_grad_size_in_MB": 2, "fuse_grad_size_in_num": 8}
    knobs = told(tmp_path, asked, (8, 8), calls=(2,), built=[8, 8])
    assert knobs["fuse_grad_size_in_MB"][0] == "effective"
    assert knobs["fuse_grad_size_in_num"][0] == "no_difference"


def test_paddles_reducer_waits_for_none(tmp_path: Path) -> None:
    knobs = told(tmp_path, {"sync_nccl_allreduce": True}, (8, 8), calls=(2,), built=[8, 8])
    assert knobs["sync_nccl_allreduce"] == (
        "no_difference",
        True,
        "",
        "Paddle's own reducer sends them during the backward pass, as it always does",
    )


def test_models_that_the_script_has_deleted_are_not_counted(tmp_path: Path) -> None:
    asked = {"fuse_all_reduce_ops": True}
    knobs = told(tmp_path, asked, (8, 8), (8, 8), (4,), calls=(1,), deleted=(0, 1))
    assert knobs["fuse_all_reduce_ops"][3] == (
        "2 gradients in 1 allreduce (Paddle: 1); largest 3.81e-06 MB"
    )
