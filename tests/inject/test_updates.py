"""Callbacks around updates are called once for each."""

from __future__ import annotations

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
    fresh: dict[str, Any] = {"_before": [], "_after": [], "_count": 0, "_is_dynamic": lambda: True}
    for name, value in fresh.items():
        monkeypatch.setattr(updates, name, value)
    kind = type("Counted", (Optimizer,), {**vars(Optimizer)})
    updates._record_methods(kind, is_optimizer=True)
    made: Optimizer = kind()
    return made


def test_callbacks_before_and_after_an_update_are_called_for_each(optimizer: Optimizer) -> None:
    seen: list[Any] = []
    updates.before_update(seen.append, "before")
    updates.on_update(lambda _, number: seen.append(number), "after")
    updates.on_update(lambda *_: seen.append("first"), "first", last=1)
    for _ in range(3):
        optimizer.step()
    assert seen == [optimizer, 1, "first", optimizer, 2, optimizer, 3]


def test_each_optimizer_has_a_number_of_its_own(optimizer: Optimizer) -> None:
    other = type(optimizer)()
    for stepped in (optimizer, optimizer, other, optimizer):
        stepped.step()
    assert (updates.count(), *map(updates.number_of, (optimizer, other))) == (4, 3, 1)


def test_an_update_that_raises_is_none(optimizer: Optimizer) -> None:
    optimizer.step()
    for gradient in (None, 1.0):
        optimizer.gradient = gradient
        try:
            optimizer.step()
        except TypeError:
            assert gradient is None
    assert (updates.count(), updates.number_of(optimizer)) == (2, 2)
