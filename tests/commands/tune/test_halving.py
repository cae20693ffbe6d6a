"""Successive halving: the dropped candidates, the winner, and remarks about losses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from fleetrun.commands.tune import candidates, halving, summary
from fleetrun.commands.tune.candidates import Candidate, TuneSpec
from fleetrun.commands.tune.halving import Result, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def wanted(*varied: str, repeats: int = 1) -> TuneSpec:
    return TuneSpec(candidates.grid(list(varied)), 40, 5, repeats, 9.0, "tune", (), ("train.py",))


def value(candidate: Candidate) -> float:
    return float(candidate.values[0][1])


def ran_at(speed: float) -> Trial:
    return Trial((speed,))


def race(spec: TuneSpec, trial: Callable[[Candidate, int, str], Trial]) -> list[Result]:
    return halving.run(spec, trial, log=lambda _: None)


def remarked(results: Sequence[Result]) -> list[str]:
    return [str(result.candidate) for result in results if result.remarks]


def test_the_better_half_goes_on_with_twice_as_many_updates() -> None:
    ran: list[tuple[str, int]] = []

    def trial(candidate: Candidate, steps: int, name: str) -> Trial:
        ran.append((str(candidate), steps))
        return ran_at(value(candidate))

    results = race(wanted("a=1,2,3,4"), trial)
    assert ran == [(f"a={n}", 20) for n in (1, 2, 3, 4)] + [("a=4", 40), ("a=3", 40)]
    assert [str(result.candidate) for result in results] == ["a=4", "a=3", "a=2", "a=1"]


def test_repeats_are_taken_in_turns() -> None:
    ran: list[str] = []

    def trial(candidate: Candidate, _steps: int, name: str) -> Trial:
        ran.append(f"{candidate} {name}")
        return ran_at(1.0)

    race(wanted("a=1,2", repeats=2), trial)
    assert ran == ["a=1 1-000-0", "a=2 1-001-0", "a=1 1-000-1", "a=2 1-001-1"]


def test_who_fails_once_is_out_and_never_chosen() -> None:
    ran: list[str] = []

    def trial(candidate: Candidate, steps: int, name: str) -> Trial:
        ran.append(str(candidate))
        return Trial(fault="no memory") if value(candidate) == 9 else ran_at(value(candidate))

    results = race(wanted("a=9,1", repeats=2), trial)
    assert ran == ["a=9", "a=1", "a=1"]
    assert [str(result.candidate) for result in summary.leaders(results)] == ["a=1"]
    assert results[-1].fault == "no memory"


def test_when_all_fail_nothing_is_chosen() -> None:
    results = race(wanted("a=1,2,3"), lambda *_: Trial(fault="alas"))
    assert summary.leaders(results) == []
    assert {result.round for result in results} == {1}


@pytest.mark.parametrize(
    ("speeds", "chosen"), [((9, 1, 9, 1), ["1"]), ((9, 8, 5, 8), ["2", "1"]), ((5, 5, 5, 5), None)]
)
def test_candidates_whose_speeds_overlap_are_a_draw(
    speeds: tuple[float, ...], chosen: list[str] | None
) -> None:
    left = iter(speeds)
    results = race(wanted("a=1,2", repeats=2), lambda *_: ran_at(float(next(left))))
    names = [result.candidate.values[0][1] for result in summary.leaders(results)]
    assert names == (chosen or ["1", "2"])


def test_the_halves_of_a_run_are_its_range() -> None:
    runs = {"1": Trial((2.0, 1.5, 3.0)), "2": Trial((2.5, 2.4, 2.6))}
    results = race(wanted("a=1,2"), lambda tried, *_: runs[tried.values[0][1]])
    assert len(summary.leaders(results)) == 2


def test_candidates_that_are_equal_in_effect_are_a_draw() -> None:
    idle = (("a", "a is not in effect: no_effect"),)
    spec = wanted("a=1,2")
    results = race(spec, lambda tried, *_: Trial((value(tried),), idle=idle))
    assert summary.conclusion(spec, results) == (
        "No difference measured, equal in effect: a=2; a=1. There is no best.yaml of a draw."
    )
    # Another field, which has an effect, tells them apart.
    results = race(
        wanted("a=1", "b=1,2"), lambda tried, *_: Trial((float(tried.values[1][1]),), idle=idle)
    )
    assert [str(result.candidate) for result in summary.leaders(results)] == ["a=1 b=2"]


def test_a_single_candidate_whose_field_does_nothing_is_said_to() -> None:
    idle = Trial((1.0,), idle=(("a", "a is not in effect: no_effect"),))
    spec = wanted("a=1")
    assert "\nOf the first: a is not in effect: no_effect." in summary.conclusion(
        spec, race(spec, lambda *_: idle)
    )


def test_merged_gradients_count_as_the_steps_they_are() -> None:
    assert Trial((2.0,), merged=4).steps_per_s == (8.0,)


@pytest.mark.parametrize(("loss", "is_strange"), [(1.0001, False), (1.5, True), (math.nan, True)])
def test_a_loss_unlike_that_of_the_others_is_remarked(loss: float, *, is_strange: bool) -> None:
    # So few updates that all candidates make as many in every round.
    few = wanted("fuse_grad_size_in_MB=1,2,3")._replace(steps=8)
    results = race(few, lambda tried, *_: Trial((1.0,), loss=loss if value(tried) == 3 else 1.0))
    assert remarked(results) == (["fuse_grad_size_in_MB=3"] if is_strange else [])


def test_losses_of_candidates_that_compute_something_else_are_not_compared() -> None:
    spec = wanted("gradient_merge_configs.k_steps=1,2")
    assert not remarked(race(spec, lambda tried, *_: Trial((1.0,), loss=value(tried))))


def test_repeats_that_differ_themselves_say_how_much_is_noise() -> None:
    losses = iter([1.0, 1.1, 1.2, 1.3])
    results = race(wanted("a=1,2", repeats=2), lambda *_: Trial((1.0,), loss=next(losses)))
    assert not remarked(results)


def raced(losses: dict[str, float]) -> dict[str, str]:
    """Return the remarks on candidates whose runs end with these losses."""
    few = wanted(f"a={','.join(losses)}")._replace(steps=8)
    results = race(few, lambda tried, *_: Trial((1.0,), loss=losses[tried.values[0][1]]))
    remarks = {result.candidate.values[0][1]: "; ".join(result.remarks) for result in results}
    return {value: text for value, text in remarks.items() if text}


def test_two_candidates_that_disagree_are_told_each_others_loss() -> None:
    assert raced({"1": 1.0, "2": 1.5}) == {
        "1": "its loss is 1, of the others 1.5: they do not compute the same",
        "2": "its loss is 1.5, of the others 1: they do not compute the same",
    }


def test_two_candidates_that_agree_are_not_remarked() -> None:
    assert raced({"1": 1.0, "2": 1.0001}) == {}


def test_the_loss_of_most_is_the_usual_one() -> None:
    # Also if the first round leaves two candidates, one of them an outlier.
    remarks = raced({"1": 9.0, "2": 1.0, "3": 1.0, "4": 8.0})
    assert remarks == {
        "1": "its loss is 9, of the others 1, 1, 8: they do not compute the same",
        "4": "its loss is 8, of the others 9, 1, 1: they do not compute the same",
    }


def test_no_candidate_is_right_where_none_has_the_loss_of_another() -> None:
    remarks = raced({"1": 1.0, "2": 2.0, "3": 3.0})
    assert len(remarks) == 3
    assert len(raced({"1": 1.0, "2": 1.0, "3": 3.0, "4": 3.0})) == 4


def test_a_candidate_that_is_dropped_early_is_compared_with_those_that_stay() -> None:
    def trial(candidate: Candidate, steps: int, _name: str) -> Trial:
        # Losses fall with the updates; the slowest computes something else.
        return Trial((value(candidate),), loss=10.0 / steps + (value(candidate) == 1))

    results = race(wanted("a=1,2,3"), trial)
    assert [result.steps for result in results] == [40, 40, 20]
    assert remarked(results) == ["a=1"]


@pytest.mark.parametrize("losses", [(math.nan, math.nan), (math.nan, 1.0), (math.inf, 1.0)])
def test_a_loss_that_is_no_number_is_told_as_such(losses: tuple[float, float]) -> None:
    remarks = raced({"1": losses[0], "2": losses[1]})
    assert remarks["1"] == f"its loss is {losses[0]:g}"
    assert ("2" in remarks) == math.isnan(losses[1])
