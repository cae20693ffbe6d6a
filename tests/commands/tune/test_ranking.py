"""What tune makes of its runs: draws, remarks about losses, and what it refuses before any."""

from __future__ import annotations

import pytest

from fleetrun.cli import parser
from fleetrun.commands import tune
from fleetrun.commands.tune import Candidate, Trial
from fleetrun.errors import UsageError


def a_candidate(value: object, field: str = "a") -> Candidate:
    return Candidate(((field, str(value)),))


def raced(**runs: list[float]) -> list[str]:
    """Return the leaders of candidates with these speeds of runs."""
    done = {a_candidate(name): [Trial((speed,)) for speed in runs[name]] for name in runs}
    return [result.candidate.values[0][1] for result in tune.leaders(tune.ranked(done))]


def test_candidates_whose_speeds_overlap_are_a_draw() -> None:
    assert raced(x=[9.0, 9.5], y=[1.0, 1.5]) == ["x"]
    assert raced(x=[9.0, 5.0], y=[8.0, 8.0]) == ["y", "x"]
    halves = {a_candidate(1): [Trial((2.0, 1.5, 3.0))], a_candidate(2): [Trial((2.5, 2.4, 2.6))]}
    assert len(tune.leaders(tune.ranked(halves))) == 2


def test_candidates_that_are_equal_in_effect_are_a_draw() -> None:
    remarks = {"a": "a is not in effect: no_effect"}
    results = tune.ranked({a_candidate(n): [Trial((float(n),), remarks=remarks)] for n in (1, 2)})
    assert tune.conclusion("x", results).startswith("No difference measured: a=2; a=1.")
    # Another field, which has an effect, tells them apart.
    pairs = {n: Candidate((("a", "1"), ("b", str(n)))) for n in (1, 2)}
    results = tune.ranked({pairs[n]: [Trial((float(n),), remarks=remarks)] for n in (1, 2)})
    assert [str(result.candidate) for result in tune.leaders(results)] == ["a=1 b=2"]
    assert "\nOf the first: a is not in effect: no_effect." in tune.conclusion("x", results)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train.py"], "nothing to tune"),
        (["--vary=a=1"], "no script to tune"),
        (["--vary"], "--vary needs a value"),
        (["--vary=a", "t.py"], "--vary=a: give a field"),
        (["--vary=a=1,,2", "t.py"], "give a field"),
        (["--vary=a=1", "--vary=a=2", "t.py"], "a is varied twice"),
        (["--vary=a=1", "--steps=6", "t.py"], "give at least 8"),
        (["--vary=a=1", "--repeats=0", "t.py"], "--repeats=0: give a whole number, 1 or more."),
        (["--vary=a=1", "--dry-run", "t.py"], "tune takes no --dry-run"),
        (["--vary=a=1", "--hosts=a,b", "t.py"], "tune takes no --hosts"),
        (["--vary=k_steps=1", "t.py"], "did you mean gradient_merge_configs.k_steps or localsgd_"),
        (["--vary=fuse_grad_size=1", "t.py"], "did you mean fuse_grad_size_in_MB?"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parser.run("tune", words)
    assert problem in str(caught.value)
