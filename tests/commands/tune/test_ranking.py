"""What tune makes of its runs: draws, fields without effect, and what it refuses before any."""

from __future__ import annotations

import pytest

from fleetrun.cli import parser
from fleetrun.commands import tune
from fleetrun.commands.trials import TrialOutcome
from fleetrun.errors import FleetrunError
from fleetrun.model import FieldVerdict


def a_trial(*speeds: float, **fields: str) -> TrialOutcome:
    """Return a run of these speeds, with the statuses of FIELDS."""
    verdicts = {name: FieldVerdict(name, "", "", status) for name, status in fields.items()}
    return TrialOutcome(speeds=speeds, verdicts=verdicts)


def raced(**runs: list[float]) -> list[str]:
    """Return the leaders of candidates with these speeds of runs."""
    done = {(("a", name),): [a_trial(speed) for speed in runs[name]] for name in runs}
    return [result.candidate[0][1] for result in tune.leaders(tune.ranked(done.items()))]


def test_candidates_whose_speeds_overlap_are_a_draw() -> None:
    assert raced(x=[9.0, 9.5], y=[1.0, 1.5]) == ["x"]
    assert raced(x=[9.0, 5.0], y=[8.0, 8.0]) == ["y", "x"]
    halves = {(("a", "1"),): [a_trial(2.0, 1.5, 3.0)], (("a", "2"),): [a_trial(2.5, 2.4, 2.6)]}
    assert len(tune.leaders(tune.ranked(halves.items()))) == 2


def test_candidates_that_are_equal_in_effect_are_a_draw() -> None:
    done = {(("a", str(n)),): [a_trial(float(n), a="no_effect")] for n in (1, 2)}
    assert "\nNo difference measured: a=2; a=1." in tune.text(tune.ranked(done.items()))
    # Another field, which has an effect, tells them apart.
    pairs = {(("a", "1"), ("b", str(n))): [a_trial(float(n), a="no_effect")] for n in (1, 2)}
    results = tune.ranked(pairs.items())
    assert [result.name for result in tune.leaders(results)] == ["a=1 b=2"]
    assert "  a: no effect" in tune.text(results)
    assert "Add --set a=1 --set b=2 to your launch." in tune.text(results)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train.py"], "nothing to tune"),
        (["--vary=nccl_comm_num=1"], "no script to tune: write `fleetrun tune --vary nccl_comm_"),
        (["--vary"], "--vary needs a value"),
        (["--vary=a", "t.py"], "--vary=a: give a field"),
        (["--vary=a=1,,2", "t.py"], "give a field"),
        (["--vary=amp=1", "--vary=amp=0", "t.py"], "amp is varied twice"),
        (["--vary=gradient_merge=1,0", "t.py"], "it changes how many batches an update has"),
        (["--vary=a=1", "--steps=6", "t.py"], "give at least 8"),
        (["--vary=a=1", "--repeats=0", "t.py"], "--repeats=0: give a whole number, 1 or more."),
        (["--vary=amp=1", "--dry-run", "t.py"], "tune takes no --dry-run: it waits for each"),
        (["--vary=amp=1", "--detach", "t.py"], "tune takes no --detach"),
        (["--vary=amp=1", "--strategy=nope", "t.py"], "--strategy=nope: there is no file nope"),
        (["--vary=amp=1", "--max_restart=x", "t.py"], "--max_restart=x: give a whole number"),
        (["--vary=amp=1", "t.py"], "There is no script t.py in "),
        (["--vary=a=1", "--hosts=a,b", "t.py"], "tune takes no --hosts"),
        (["--vary=k_steps=1", "t.py"], "did you mean gradient_merge_configs.k_steps or localsgd_"),
        (["--vary=fuse_grad_size=1", "t.py"], "did you mean fuse_grad_size_in_MB?"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(FleetrunError) as caught:
        parser.run(["tune", *words])
    assert problem in str(caught.value)
