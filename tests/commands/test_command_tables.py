"""Columns: whole in a pipe, within the terminal, and free of rich's markup."""

from __future__ import annotations

import pytest

from fleetrun.commands import tables

ROWS = [("amp", "Mixed precision: 16-bit numbers where they are safe"), ("[bold]x", ":smile:")]


@pytest.mark.parametrize("variables", [{}, {"COLUMNS": "20", "FORCE_COLOR": "1"}])
def test_in_a_pipe_nothing_is_cut_wrapped_coloured_or_read_as_markup(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tables.width() == 0
    assert tables.layout(ROWS, heads=("field", "meaning")).splitlines() == [
        "field    meaning",
        "amp      Mixed precision: 16-bit numbers where they are safe",
        "[bold]x  :smile:",
    ]


def test_on_a_terminal_words_wrap_within_their_column() -> None:
    assert tables.layout(ROWS, width=38).splitlines() == [
        "amp      Mixed precision: 16-bit",
        "         numbers where they are safe",
        "[bold]x  :smile:",
    ]


def test_a_column_that_is_to_stay_whole_is_never_broken() -> None:
    rows = [("20261122T135753Z-default-23306", "running on some hosts")]
    shown = tables.layout(rows, width=44, whole=(0,))
    assert shown.splitlines()[0] == "20261122T135753Z-default-23306  running on"
