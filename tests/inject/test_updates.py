"""Callbacks around updates are called for those that they ask for."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from fleetrun.inject import updates


class Optimizer:
    """Steps, unless its gradient is None."""

    gradient: float | None = 1.0

    def step(self) -> None:
        """Raise TypeError without a gradient."""
        self._apply_optimize(loss=None)

    def _apply_optimize(self, *, loss: Any) -> None:
        self.loss = loss
        self.size = abs(self.gradient)  # type: ignore[arg-type]


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> Optimizer:
    """Return an optimizer whose updates are the first ones that are counted."""
    fresh: dict[str, Any] = {"_before": [], "_after": {}, "_sources": {}, "_wake_at": math.inf}
    for name, value in {**fresh, "_rest": True, "_count": 0, "_is_dynamic": lambda: True}.items():
        monkeypatch.setattr(updates, name, value)
    kind = type("Counted", (Optimizer,), {**vars(Optimizer)})
    updates._record_methods(kind, is_optimizer=True)
    made: Optimizer = kind()
    return made


def every(step: int, seen: list[int], source: Any) -> float:
    seen.append(updates.number_of(source))
    return updates.number_of(source) + step


def test_callbacks_are_called_for_the_next_update_that_any_of_them_asks_for(
    optimizer: Optimizer,
) -> None:
    seen: list[int] = []
    updates.on_update(lambda source, _: every(3, seen, source), "threes")
    updates.on_update(lambda source, _: 5 if updates.number_of(source) < 5 else math.inf, "five")
    updates.before_update(lambda _: seen.append(-1), "before", may_rest=True)
    for _ in range(9):
        optimizer.step()
    assert (seen, updates.count()) == ([-1, 1, -1, 4, -1, 5, -1, 8], 9)


def test_a_callback_that_asks_for_nothing_is_called_for_each_update(optimizer: Optimizer) -> None:
    seen: list[int] = []
    updates.on_update(lambda source, _: every(3, seen, source), "threes")
    updates.on_update(lambda *_: None, "all")
    for _ in range(4):
        optimizer.step()
    assert seen == [1, 2, 3, 4]


def test_what_is_called_before_each_update_lets_none_rest(optimizer: Optimizer) -> None:
    seen: list[Any] = []
    updates.on_update(lambda *_: math.inf, "never again")
    updates.before_update(seen.append, "before")
    for _ in range(3):
        optimizer.step()
    assert seen == [optimizer] * 3


def test_a_callback_is_called_when_it_is_time(optimizer: Optimizer) -> None:
    seen: list[int] = []

    def beat(_source: Any, number: int) -> float:
        seen.append(number)
        return math.inf

    updates.on_update(lambda *_: math.inf, "never again")
    updates.on_update(beat, "the heartbeat")
    for at in (math.inf, math.inf, time.monotonic(), math.inf):
        updates.wake_at(at, beat)
        optimizer.step()
    assert (seen, updates.count()) == ([1, 3], 4)


def test_each_optimizer_has_its_own_next_update(optimizer: Optimizer) -> None:
    seen: list[int] = []
    updates.on_update(lambda source, _: every(3, seen, source), "threes")
    for stepped in (optimizer, optimizer, type(optimizer)(), optimizer, optimizer):
        stepped.step()
    assert (seen, updates.count()) == ([1, 1, 4], 5)


def test_an_update_that_raises_is_none(optimizer: Optimizer) -> None:
    updates.on_update(lambda *_: math.inf, "never again")
    optimizer.step()
    for gradient in (None, 1.0):
        optimizer.gradient = gradient
        try:
            optimizer.step()
        except TypeError:
            assert gradient is None
    assert (updates.count(), updates.number_of(optimizer)) == (2, 2)
    assert not updates.is_under_way()
