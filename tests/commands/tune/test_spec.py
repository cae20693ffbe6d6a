"""The command line of tune: its own options before the script, all else passed on."""

from __future__ import annotations

import pytest

from fleetrun.commands import tune
from fleetrun.commands.tune import candidates
from fleetrun.errors import UsageError


def spec_of(*words: str) -> candidates.TuneSpec:
    with tune.command.make_context("fleetrun tune", list(words)) as context:
        return candidates.make(context.obj, **context.params)


def test_options_after_the_script_are_the_scripts() -> None:
    wanted = spec_of("--vary=a=1", "--quiet", "--", "train.py", "--vary=b=2", "--out", "x")
    assert wanted.launch == ("--quiet=true",)
    assert wanted.script == ("--", "train.py", "--vary=b=2", "--out", "x")
    assert (wanted.steps, wanted.warmup, wanted.repeats, wanted.out) == (30, 5, 2, "tune")


def test_our_own_options_are_not_the_launchs() -> None:
    wanted = spec_of("--vary=a=1,4", "--steps", "9", "--gpus=0,1", "train.py", "--steps=3")
    assert [str(candidate) for candidate in wanted.candidates] == ["a=1", "a=4"]
    assert (wanted.steps, wanted.launch) == (9, ("--gpus=0,1",))
    assert wanted.script == ("train.py", "--steps=3")


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
        (["--vary=a=1", "--steps=x", "t.py"], "--steps=x: give a whole number, 2 or more."),
        (["--vary=a=1", "--repeats=0", "t.py"], "--repeats=0: give a whole number, 1 or more."),
        (
            ["--vary=a=1", "--timeout=nan", "t.py"],
            "--timeout=nan: give a number of seconds, 1 or more, or a time such as 90s",
        ),
        (["--vary=a=1", "--dry-run", "t.py"], "tune takes no --dry-run"),
        (["--vary=a=1", "--vray=1", "t.py"], "no such option: --vray"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(*words)
    assert problem in str(caught.value)


def settled(*words: str, **variables: str) -> list[str]:
    wanted = candidates.settle(spec_of(*words, "t.py"), variables)
    return [str(candidate) for candidate in wanted.candidates]


def test_a_part_of_what_is_on_needs_no_more_than_its_name() -> None:
    assert settled("--strategy=gradient_merge", "--vary=k_steps=1,2") == [
        "gradient_merge_configs.k_steps=1",
        "gradient_merge_configs.k_steps=2",
    ]
    assert settled("--vary=k_steps=2", FLEETRUN_STRATEGY="overlap:gradient_merge") == [
        "gradient_merge_configs.k_steps=2"
    ]
    assert settled("--set=localsgd=true", "--vary=begin_step=3") == [
        "localsgd_configs.begin_step=3"
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--vary=k_steps=1"], "did you mean gradient_merge_configs.k_steps or localsgd_configs"),
        (["--vary=fuse_grad_size_in_MB=1,much"], "fuse_grad_size_in_MB=much: give a whole number"),
        (["--vary=fuse_grad_size=1"], "did you mean fuse_grad_size_in_MB?"),
    ],
)
def test_values_that_no_launch_would_take_are_refused_before_the_first(
    words: list[str], problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        settled(*words)
    assert problem in str(caught.value)
