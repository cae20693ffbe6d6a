"""Step and loss are read from the usual output of scripts, and never invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.rundir import progress


@pytest.mark.parametrize(
    ("line", "step", "loss"),
    [
        (b"step 120 loss 0.5", 120, 0.5),
        (b"Epoch [1/6], Step [30/100], Loss: 1.25e-3", 30, 0.00125),
        (b"global_step=7, loss=nan", 7, None),
        (b"global step 8, epoch: 1, batch: 8, loss: 6.1, speed: 2 step/s", 8, 6.1),
        (b"iter: 9 train_loss=3 lr 0.1", 9, 3.0),
        (b"[INFO] iteration 10 | loss is -4", 10, -4.0),
        (b"epoch 1/6: loss 0.8149, test accuracy 0.9417, 663 images/s", None, 0.8149),
        (b"stepping 5 lossless 3", None, None),
        (b"2.5 steps/s", None, None),
        (b"step 0.5", None, None),
    ],
)
def test_what_scripts_print_is_understood(
    line: bytes, step: int | None, loss: float | None
) -> None:
    seen = progress.printed(b"before\n" + line + b"\n")
    assert seen.step == step
    if b"nan" in line:
        assert seen.loss is not None
        assert seen.loss != seen.loss
    else:
        assert seen.loss == loss


def test_the_last_of_each_counts_and_bars_are_lines() -> None:
    seen = progress.printed(b"step 1 loss 2\nstep 2\n 10%\r 20%\r")
    assert seen == progress.Progress(2, 2.0, "20%")


@given(st.binary())
def test_nothing_that_is_printed_is_an_error(text: bytes) -> None:
    progress.printed(text)
