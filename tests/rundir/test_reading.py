"""Whatever others write to a file, reading returns what it can, and never fails."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetrun.rundir import reading

if TYPE_CHECKING:
    from pathlib import Path

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "\ud800", "null", "[1]", "", '{"a": 1e9999999']
)
def test_what_is_no_json_object_is_none(text: str) -> None:
    assert reading.parse(text.encode(errors="surrogatepass")) is None


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert reading.document(str(path)) == {"a": 1}
    assert reading.document(str(tmp_path / "b.json")) is None


def test_links_pipes_and_folders_are_no_files_of_ours(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("{}")
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "pipe")
    assert reading.content(str(real)) == b"{}"
    assert reading.content(str(tmp_path / "link")) is None
    # A FIFO without a writer must not block the reader.
    assert reading.content(str(tmp_path / "pipe")) is None
    assert reading.content(str(tmp_path)) is None


def test_of_a_long_file_the_beginning_or_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"begin" + b"x" * 100 + b"end")
    assert reading.content(str(path), most=5) == b"begin"
    assert reading.content(str(path), most=3, from_end=True) == b"end"
    assert reading.content(str(path), most=1000, from_end=True) == path.read_bytes()


def test_a_line_without_an_end_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\nnonsense\n[2]\n\xff\n{"a": 2}\n{"a": 3}')
    assert list(reading.lines(str(path))) == [{"a": 1}, {"a": 2}]
    assert list(reading.lines(str(tmp_path / "none"))) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ODD | st.just(10**400) | st.just("\ud800"))
def test_any_value_becomes_what_is_wanted_or_nothing(value: object) -> None:
    reading.text(value).encode()
    whole, real = reading.whole(value), reading.real(value)
    assert whole is None or type(whole) is int
    assert real is None or abs(real) < float("inf")
    assert reading.fact(value) in {None, True, False}
    json.dumps([reading.mapping(value), reading.items(value), reading.mappings(value)])


@pytest.mark.parametrize("value", [True, False])
def test_a_fact_is_no_number(*, value: bool) -> None:
    assert reading.whole(value) is None
    assert reading.real(value) is None
    assert reading.fact(value) is value


def test_a_number_is_no_fact() -> None:
    assert reading.fact(1) is None
    assert (reading.whole(3), reading.real(3)) == (3, 3.0)
    assert reading.real(10**400) is None


def test_what_cannot_be_shown_is_no_text() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert reading.text(value) == ""
    assert reading.text(None) == ""
    while value:
        # Otherwise Python frees it recursively.
        value = value.pop()  # type: ignore[assignment]
