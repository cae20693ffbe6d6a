"""The logs of a job by ssh arrive at the head unchanged, however they are split on the way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.remote import logsender
from fleetrun.remote.logreceiver import FetchedLogs

if TYPE_CHECKING:
    from pathlib import Path

NONCE = "0123456789abcdef"
RUN = "20261122T120000Z-default-7"


def a_run(folder: Path) -> Path:
    """Make the files of a launcher with pid 7 on the first host of two."""
    run = folder / "log" / "runs" / RUN
    (run / "gathered").mkdir(parents=True)
    (run / "events.jsonl").write_text(json.dumps({"event": "launched", "launcher_pid": 7}) + "\n")
    (run / "workerlog.0").write_bytes(b"x" * 70_000 + b"the end\n")
    (run / "gathered" / "workerlog.1").write_bytes(b"of another\xff host\n")
    (run / "empty.json").touch()
    (run / "lock").write_text("not to be sent")
    (run / "secret").symlink_to("/etc/hostname")
    (folder / "log" / "latest").symlink_to(f"runs/{RUN}")
    return run


def sent(run: Path, *, everything: bool = False) -> bytes:
    """Return the data that the agent sends after the launcher's output."""
    parts = [b"out\n", logsender.MARK, NONCE.encode(), json.dumps(RUN).encode(), b"\n"]
    logsender.send(str(run), everything=everything, write=parts.append)
    return b"".join(parts)


def received(folder: Path, text: bytes, piece: int) -> tuple[bytes, list[bytes], str]:
    """Receive TEXT in PIECEs; return what is shown, the answers, and the last sentence."""
    answers: list[bytes] = []
    logs = FetchedLogs(str(folder), NONCE, answers.append)
    shown = b"".join(logs.take(text[at : at + piece]) for at in range(0, len(text), piece))
    return shown + logs.take(b""), answers, logs.finish()


@pytest.mark.parametrize("piece", [1, 7, 100, 1 << 20])
def test_files_arrive_as_they_were_with_their_well_known_names(tmp_path: Path, piece: int) -> None:
    run = a_run(tmp_path)
    assert logsender.find(str(tmp_path / "log"), 7) == str(run)
    there = tmp_path / "head"
    shown, answers, message = received(there, sent(run, everything=True), piece)
    assert (shown, answers) == (b"out\n", [logsender.SEND])
    assert message == f"The logs are in {there}/runs/{RUN}."
    for name in ("events.jsonl", "workerlog.0", "gathered/workerlog.1", "empty.json"):
        assert (there / "latest" / name).read_bytes() == (run / name).read_bytes()
    assert not (there / "latest" / "secret").exists()
    assert (there / "latest" / "lock").read_text().startswith("fleetrun ")
    assert (there / "workerlog.1").read_bytes() == b"of another\xff host\n"
    assert (there / "workerlog.0").stat().st_size == 70_008


@pytest.mark.parametrize("folder", ["there", "there/log"])
def test_logs_that_cannot_be_kept_let_nobody_wait_for_an_answer(
    tmp_path: Path, folder: str
) -> None:
    run = a_run(tmp_path)
    (tmp_path / "there").write_text("a file")
    _, answers, message = received(tmp_path / folder, sent(run), 4096)
    assert answers == [logsender.KEEP]
    assert message.startswith("The logs could not be fetched from the first host (")
    # An invalid name of a run does not either.
    _, answers, _ = received(tmp_path / "head", sent(run).replace(b"default", b"/../.."), 7)
    assert answers == [logsender.KEEP]


def test_only_the_ends_of_logs_are_sent_unless_all_is_wanted(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    received(tmp_path / "head", sent(run), 4096)
    text = (tmp_path / "head" / "workerlog.0").read_text()
    first, rest = text.split("\n", 1)
    assert first == "[fleetrun: of 70008 bytes the last 65536]"
    assert len(rest) == 65536


def test_a_folder_that_both_have_is_left_as_it_is(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    _, answers, message = received(tmp_path / "log", sent(run), 4096)
    assert (answers, message) == ([logsender.KEEP], "")
    assert (run / "lock").read_text() == "not to be sent"


def test_the_run_of_another_launcher_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert logsender.find(str(tmp_path / "log"), 8) is None
    assert logsender.find(str(tmp_path / "nowhere"), 7) is None


def test_what_is_cut_off_or_never_comes_is_a_sentence(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    _, _, problem = received(tmp_path / "head", sent(run)[:-20], 4096)
    assert "(the connection has ended)" in problem
    shown, _, problem = received(tmp_path / "other", b"out\n" + logsender.MARK + b"01", 3)
    assert shown == b"out\n" + logsender.MARK + b"01"
    assert problem == "The logs could not be fetched from the first host."


@pytest.mark.parametrize(
    "line", [b'["../x", 1]', b'["/etc/x", 1]', b'["a/b/c", 1]', b"{", b"7", b'["x"]', b"x" * 2000]
)
def test_no_name_leads_out_of_the_run_directory(tmp_path: Path, line: bytes) -> None:
    begin = logsender.MARK + NONCE.encode() + json.dumps(RUN).encode() + b"\n"
    _, _, message = received(tmp_path / "head", begin + line + b"\nX[]\n", 4096)
    assert "(what came is no log)" in message
    assert {path.name for path in (tmp_path / "head" / "runs" / RUN).iterdir()} == {"lock"}


@given(st.binary(max_size=60), st.integers(1, 20))
def test_output_without_the_mark_is_shown_as_it_is(text: bytes, piece: int) -> None:
    logs = FetchedLogs("/nowhere", NONCE, lambda _: None)
    text = text.replace(b"a", logsender.MARK).replace(b"b", b"0")
    shown = b"".join(logs.take(text[at : at + piece]) for at in range(0, len(text), piece))
    assert shown + logs.take(b"") == text
