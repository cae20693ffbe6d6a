"""Whatever bytes come, the codec returns what was written, or reports them as malformed."""

import json

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from wire import CODEC, End, Hello, Part

from fleetrun.session.codec import LONGEST_TEXT, Malformed

numbers = st.integers(-(2**63), 2**63 - 1)
# No lone surrogates and no control characters: those are escaped, see below.
texts = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=50)
parts = st.builds(Part, name=texts, weight=st.floats(allow_nan=False, allow_infinity=False))
hellos = st.builds(
    Hello,
    host=texts,
    rank=st.none() | numbers,
    ports=st.lists(numbers, max_size=5).map(tuple),
    pair=st.tuples(texts, numbers),
    parts=st.lists(parts, max_size=5).map(tuple),
    is_final=st.booleans(),
    lines=texts,
)
messages = hellos | st.builds(End, code=st.integers(0, 255))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(messages)
def test_what_is_written_is_read(message: Hello | End) -> None:
    assert CODEC.read(CODEC.write(message)) == message


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed):
        CODEC.read(payload)


@examples(150)
@given(messages, st.data())
def test_a_field_that_is_replaced_fits_or_is_malformed(
    message: Hello | End, data: st.DataObject
) -> None:
    values = json.loads(CODEC.write(message))
    fields = values[1]
    fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(anything)
    try:
        read = CODEC.read(json.dumps(values).encode())
    except Malformed:
        return
    assert type(read) in {Hello, End}
    assert CODEC.read(CODEC.write(read)) == read


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 100_000,
        b'["End",[' + b"9" * 200_000 + b"]]",
        *(b'["End",[%s]]' % value for value in (b"1e999", b"NaN", b"true", b"1.0", b"", b"1,1")),
        b'["End",[256]]',
        b'["End",1]',
        b'[["End"],[1]]',
        b'{"code":1}',
        b"\xff\xfe",
        b"",
    ],
)
def test_what_no_launcher_sends_is_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed):
        CODEC.read(payload)


@given(st.text(max_size=50))
def test_a_text_is_read_so_that_no_terminal_acts_on_it(text: str) -> None:
    read = CODEC.read(CODEC.write(Hello(text, lines=text)))
    assert read.host.isprintable()
    assert read.lines.replace("\n", "").isprintable()
    assert (read.host == text) == text.isprintable()


def test_a_text_has_a_longest_length() -> None:
    assert CODEC.read(CODEC.write(Hello("x" * LONGEST_TEXT))).host == "x" * LONGEST_TEXT
    with pytest.raises(Malformed):
        CODEC.read(CODEC.write(Hello("x" * (LONGEST_TEXT + 1))))
