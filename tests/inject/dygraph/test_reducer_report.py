"""The evidence about the reducers of dynamic graphs."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from training import evidence

from fleetrun.inject import settings
from fleetrun.inject.dygraph import reducer_report
from fleetrun.inject.dygraph.reducer_report import ReducerReport
from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NRANKS, PADDLES = 4, [16]


@pytest.fixture(autouse=True)
def settings_are_reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reducer_report, "is_synchronous", lambda: True)
    yield
    settings.reset(StrategySpec({}, {}, {}), Evidence("", StrategySpec({}, {}, {})))


class Model:
    """A model of four ranks."""

    group = SimpleNamespace(ranks=range(NRANKS))


def told(
    folder: Path,
    asked: dict[str, Any],
    *buckets: tuple[int, ...],
    calls: tuple[int, ...] = (),
    why: str = "",
) -> dict[str, tuple[Any, ...]]:
    """Return status, value, reason and evidence of each field ASKED for.

    BUCKETS are the bytes of each model's buckets, CALLS those of each communicator; without them
    Paddle's reducer sends, because of WHY.
    """
    spec = StrategySpec(asked, {}, {})
    proof = Evidence(str(folder / "rank.0.jsonl"), spec)
    settings.reset(spec, proof)
    report = ReducerReport(spec, proof)
    models = [Model() for _ in buckets]
    for model, sizes in zip(models, buckets, strict=True):
        report.add(model, PADDLES)
        reducer: Any = SimpleNamespace(
            backwards=1,
            parameters=[SimpleNamespace(stop_gradient=False, is_leaf=True)] * (2 * len(sizes)),
            bucket_bytes=list(sizes),
            buckets=[SimpleNamespace(nbytes=size, parameters=["p", "p"]) for size in sizes],
            calls=calls,
            early=len(sizes) - 1,
            why_late="",
            will_send_early=False,
            setup=SimpleNamespace(hierarchy=None, overlaps=settings.overlaps(), compression=None),
        )
        if calls:
            report.reduced(weakref.ref(model), reducer)
        else:
            report.hand_over(model, why)
            report.built(weakref.ref(model), reducer)
    proof.updates = 1
    assert proof.claim()
    proof.write()
    fields = evidence(folder)["fields"]
    parts = ("status", "in_effect", "reason", "evidence")
    return {field["name"]: tuple(field[part] for part in parts) for field in fields}


def test_communicators_that_were_used_are_told(tmp_path: Path) -> None:
    fields = told(tmp_path, {"nccl_comm_num": 3}, (8, 8), calls=(1, 1))
    assert fields["nccl_comm_num"] == (
        "effective",
        2,
        "there are only 2 allreduces to share",
        "2 communicators in turn; 1 of 2 allreduces went out before the last gradient was ready",
    )


def test_what_paddles_reducer_cannot_do_has_no_effect_and_its_reason(tmp_path: Path) -> None:
    asked = {"nccl_comm_num": 2, "bf16_allreduce": True, "use_hierarchical_allreduce": True}
    fields = told(tmp_path, asked, (8, 8), why="the model has sparse gradients")
    for name in asked:
        assert fields[name][:3] == (
            "no_effect",
            None,
            "Paddle's own reducer averages here: the model has sparse gradients",
        )


def test_auto_is_told_of_the_largest_model_in_as_many_digits_as_it_needs(tmp_path: Path) -> None:
    asked = {"fuse_grad_size_in_MB": "auto"}
    fields = told(tmp_path, asked, (2**10, 2**10), (2**24, 2**24))
    assert fields["fuse_grad_size_in_MB"][:3] == (
        "effective",
        3.2,
        "auto: a tenth of 32 MB of gradients",
    )


@pytest.mark.parametrize(
    ("size", "reason"), [(1, "each group has one rank"), (4, "all 4 ranks are in one group")]
)
def test_groups_without_a_second_level_have_their_reason(
    size: int, reason: str, tmp_path: Path
) -> None:
    asked = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": size}
    fields = told(tmp_path, asked, (8,))
    for name in asked:
        assert fields[name] == ("no_effect", None, reason, "")


@pytest.mark.parametrize(("buckets", "status"), [((16,), "no_difference"), ((8, 8), "effective")])
def test_fields_make_no_difference_where_paddle_alone_does_the_same(
    buckets: tuple[int, ...], status: str, tmp_path: Path
) -> None:
    fused = {"fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": "auto"}
    own = {"sync_nccl_allreduce": False, "nccl_comm_num": 1, "use_hierarchical_allreduce": False}
    fields = told(tmp_path, {**fused, **own}, buckets)
    assert {name: row[0] for name, row in fields.items()} == {
        **dict.fromkeys(fused, status),
        **dict.fromkeys(own, "no_difference"),
    }


def test_buckets_of_paddles_reducer_are_told_as_built(tmp_path: Path) -> None:
    fields = told(tmp_path, {"fuse_grad_size_in_num": 2}, (16, 8))
    assert fields["fuse_grad_size_in_num"] == (
        "effective",
        2,
        "",
        (
            "4 gradients in 2 allreduces (Paddle: 1); largest 1.53e-05 MB; as built: Paddle's own"
            " reducer sends them, which cannot be observed"
        ),
    )
