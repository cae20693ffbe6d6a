"""Messages of the head and the agents arrive whole; differences between hosts are named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.remote import protocol
from fleetrun.remote.protocol import Answer, HostEndpoint, HostOrder, Inquiry, Unreached

# Text that is not UTF-8, as in os.environ and sys.argv.
TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8")) | st.just("\udcff\udc80")


@given(st.dictionaries(TEXTS, TEXTS), st.lists(TEXTS))
def test_any_texts_survive(environ: dict[str, str], words: list[str]) -> None:
    asked = Inquiry("/work", "file", "train.py", environ)
    assert protocol.read(protocol.line(asked), Inquiry) == asked
    written = protocol.line(HostOrder(words=tuple(words)))
    assert written.count(b"\n") == 1
    assert protocol.read(written, HostOrder).words == tuple(words)


@pytest.mark.parametrize("kind", [Inquiry, Answer, HostOrder, Unreached])
@given(text=st.binary(max_size=40) | st.sampled_from([b"[]", b"{}", b'{"version": 0}', b'"go"']))
def test_what_is_no_message_of_this_version_is_refused_and_not_quoted(
    kind: Any, text: bytes
) -> None:
    inquiry = protocol.line(Inquiry("/work", target="t.py", environ={"FLEETRUN_TOKEN": "hunter2"}))
    older = inquiry.replace(b'"version": 5', b'"version": 4')
    for line in (text, older, *([inquiry] if kind is not Inquiry else [])):
        with pytest.raises(
            ValueError, match=r"^not a message of this version$|^Expecting|codec|Extra"
        ):
            protocol.read(line, kind)


def test_hosts_arrive_as_they_are() -> None:
    order = HostOrder((HostEndpoint("a", "10.0.0.1", 6166), HostEndpoint("b", "b", 1)))
    assert protocol.read(protocol.line(order), HostOrder) == order
    unreached = Unreached((("a", "why"),))
    assert protocol.read(protocol.line(unreached), Unreached) == unreached


WELL = Answer(fleetrun="0.1.0", python="3.11.7", paddle="3.3.1", digest="aa")
NONE = dict.fromkeys("abc", 0.0)


def test_hosts_that_are_alike_are_well() -> None:
    # Patch levels of Python and a second of the clock do not count.
    answers = {"a": WELL, "b": WELL._replace(python="3.11.9", address="10.0.0.2")}
    assert protocol.faults(answers, {"a": 1.0, "b": -1.0}) == ()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"fault": "there is no folder /work."}, "there is no folder /work."),
        ({"fleetrun": "0.2.0"}, "fleetrun is 0.2.0, and on a 0.1.0."),
        ({"paddle": ""}, "Paddle is not there, and on a 3.3.1."),
        ({"python": "3.10.1"}, "Python is 3.10, and on a 3.11."),
        ({"digest": "bb"}, "the script differs from that on a."),
    ],
)
def test_each_difference_is_a_sentence(other: dict[str, Any], expected: str) -> None:
    answers = {"a": WELL, "b": WELL._replace(**other), "c": WELL}
    assert protocol.faults(answers, NONE) == (("b", expected),)


@pytest.mark.parametrize(
    ("gpus", "wanted", "problem"),
    [
        # The first host has eight.
        (8, 8, ()),
        (4, 8, ("8 ranks are requested there, and it has 4 GPUs.",)),
        (1, 2, ("2 ranks are requested there, and it has 1 GPU.",)),
        (0, 8, ("it has no GPU, and a has 8.",)),
        (0, None, ("it has no GPU, and a has 8.",)),
        # Without a requested number hosts may differ; some drivers answer only explicit requests.
        (4, None, ()),
        (-1, 8, ()),
    ],
)
def test_gpus_that_are_missing_are_told(gpus: int, wanted: int | None, problem: tuple[str]) -> None:
    answers = {"a": WELL._replace(gpus=8), "b": WELL._replace(gpus=gpus)}
    faults = protocol.faults(answers, NONE, {"a": 8, "b": wanted})
    assert faults == tuple(("b", fault) for fault in problem)
    # A job without devices may run anywhere, as may one whose hosts have none.
    assert protocol.faults(answers, NONE) == ()
    assert protocol.faults({"a": WELL._replace(gpus=0), "b": WELL}, NONE, {"a": 8, "b": 8}) == ()


def test_a_clock_that_differs_is_told() -> None:
    expected = "its clock differs by -60 s from the one here."
    assert protocol.faults({"a": WELL, "b": WELL}, {"a": 0.0, "b": -60.0}) == (("b", expected),)


def test_a_host_that_answered_long_before_the_last_one_has_no_other_clock_for_that() -> None:
    assert protocol.skew(100.0, asked_at=99.0, heard_at=101.0) == 0.0


def test_all_that_is_wrong_is_told_at_once() -> None:
    answers = {
        "a": Answer(fault="ssh: refused"),
        "b": WELL,
        "c": WELL._replace(fleetrun="0.2.0", digest="bb"),
    }
    assert [name for name, _ in protocol.faults(answers, NONE)] == ["a", "c", "c"]
