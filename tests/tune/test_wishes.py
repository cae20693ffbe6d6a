"""What tune is asked for: its own options before the script, all else passed on."""

from __future__ import annotations

import pytest

from fleetrun.errors import UsageError
from fleetrun.tune import wishes


def test_options_after_the_script_are_the_scripts() -> None:
    wanted = wishes.parse(["--vary=a=1", "--quiet", "--", "train.py", "--vary=b=2", "--out", "x"])
    assert wanted is not None
    assert wanted.launch == ("--quiet=true",)
    assert wanted.script == ("--", "train.py", "--vary=b=2", "--out", "x")
    assert (wanted.steps, wanted.warmup, wanted.repeats, wanted.out) == (30, 5, 2, "tune")


def test_help_is_no_request() -> None:
    assert wishes.parse(["--help"]) is None


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
        (["--vary=a=1", "--steps=x", "t.py"], "--steps=x: give a number"),
        (["--vary=a=1", "--repeats=0", "t.py"], "--repeats=0: give at least 1"),
        (["--vary=a=1", "--timeout=nan", "t.py"], "--timeout=nan: give at least 1"),
        (["--vary=a=1", "--dry-run", "t.py"], "tune takes no --dry-run"),
        (["--vary=a=1", "--vray=1", "t.py"], "no such option: --vray"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        wishes.parse(words)
    assert problem in str(caught.value)
