"""A check that has failed is skipped from then on; its earlier findings stay."""

from __future__ import annotations

import pytest

from fleetrun.inject import border


def test_a_failure_is_remarked_on_once_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    remarks: list[str] = []
    calls: list[int] = []
    monkeypatch.setattr(border, "_remark_callbacks", [remarks.append])
    monkeypatch.setattr(border, "_remarked", set())

    @border.watching("the count", otherwise=0)
    def count(number: int) -> int:
        calls.append(number)
        if number > 1:
            raise RuntimeError(
                "\n\n-----\nC++ stack\n-----\nError Message Summary:\n(NotFound) no such kernel"
            )
        return number

    @border.watching("the count")
    def other() -> None:
        raise OSError

    assert [count(1), count(2), count(3)] == [1, 0, 0]
    other()
    assert calls == [1, 2]
    assert remarks == [
        "the count has failed and is skipped: RuntimeError: (NotFound) no such kernel"
    ]


def test_what_was_proved_is_raised_again_and_again() -> None:
    @border.watching("the comparison")
    def compare() -> None:
        message = "ranks differ"
        raise border.Disproved(message)

    for _ in range(2):
        with pytest.raises(border.Disproved, match="ranks differ"):
            compare()
