"""Both ends of a connection prove that they know the key; nothing else gets any further."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.session.authentication import (
    LONGEST_HANDSHAKE,
    MAC_DIGITS,
    AuthenticationError,
    Handshake,
    Key,
    Seal,
)
from fleetrun.session.codec import Malformed

KEY = Key("job", "a token")


def meet(caller_key: Key, listener_key: Key) -> tuple[Handshake, Handshake]:
    """Let a caller and a listener introduce themselves to each other."""
    caller, listener = (
        Handshake(caller_key, is_caller=True),
        Handshake(listener_key, is_caller=False),
    )
    assert listener.begin() is None
    payload: bytes | None = caller.begin()
    for end in (listener, caller, listener):
        assert payload is not None
        assert len(payload) <= LONGEST_HANDSHAKE
        payload = end.feed(payload)
    assert payload is None
    return caller, listener


def seals(end: Handshake) -> tuple[Seal, Seal]:
    assert end.seals is not None
    return end.seals


@pytest.mark.parametrize("token", ["a token", None])
def test_two_that_know_the_key_agree(token: str | None) -> None:
    caller, listener = meet(Key("job", token), Key("job", token))
    for sender, receiver in ((caller, listener), (listener, caller)):
        for payload in (b"first", b"", b"third"):
            assert seals(receiver)[1].take(seals(sender)[0].put(payload)) == payload


@pytest.mark.parametrize(
    ("caller", "listener", "why"),
    [
        (Key("job", "a"), Key("job", "b"), "another token or another --job_id"),
        (Key("job", "a"), Key("other", "a"), "another token or another --job_id"),
        (Key("job"), Key("other"), "has another --job_id"),
        (Key("job", "a"), Key("job"), "FLEETRUN_TOKEN"),
        (Key("job"), Key("job", "a"), "FLEETRUN_TOKEN"),
    ],
)
def test_another_key_is_refused_with_the_reason(caller: Key, listener: Key, why: str) -> None:
    with pytest.raises(AuthenticationError, match=why):
        meet(caller, listener)


def test_a_caller_learns_why_from_a_listener_that_refuses_it() -> None:
    caller, listener = (
        Handshake(Key("job", "a"), is_caller=True),
        Handshake(Key("job"), is_caller=False),
    )
    with pytest.raises(AuthenticationError, match="its fleetrun has a token") as refused:
        listener.feed(caller.begin() or b"")
    assert refused.value.answer is not None
    with pytest.raises(AuthenticationError, match="its fleetrun has no token"):
        caller.feed(refused.value.answer)


def test_another_version_is_named() -> None:
    introduction = json.dumps({"fleetrun": 1, "nonce": "0" * 32, "token": True})
    with pytest.raises(
        AuthenticationError, match="speaks version 1 of the session's wire, and this one 8"
    ):
        Handshake(KEY, is_caller=False).feed(introduction.encode())


def test_a_handshake_cannot_be_replayed() -> None:
    caller, listener = Handshake(KEY, is_caller=True), Handshake(KEY, is_caller=False)
    introduction = caller.begin() or b""
    proof = caller.feed(listener.feed(introduction) or b"") or b""
    listener.feed(proof)
    assert listener.seals is not None
    again = Handshake(KEY, is_caller=False)
    again.feed(introduction)
    with pytest.raises(AuthenticationError):
        again.feed(proof)


def test_a_proof_cannot_be_sent_back() -> None:
    """A stranger that returns the listener's own proof proves nothing."""
    listener = Handshake(KEY, is_caller=False)
    answer = json.loads(listener.feed(Handshake(KEY, is_caller=True).begin() or b"") or b"")
    with pytest.raises(AuthenticationError):
        listener.feed(json.dumps({"proof": answer["proof"]}).encode())


def test_a_long_line_is_as_safe_as_a_short_one() -> None:
    caller, listener = meet(KEY, KEY)
    roster = b"r" * 100_000
    sealed = seals(caller)[0].put(roster)
    for changed in (sealed[:-1] + b"s", sealed[:-1], b"\0" + sealed[1:]):
        _, other = meet(KEY, KEY)
        with pytest.raises(AuthenticationError):
            seals(other)[1].take(changed)
    assert seals(listener)[1].take(sealed) == roster
    with pytest.raises(AuthenticationError):
        seals(listener)[1].take(sealed)
    # The same message to the next host is another line.
    assert seals(meet(KEY, KEY)[0])[0].put(roster) != sealed


def test_a_sealed_line_counts_once_in_its_place_and_direction() -> None:
    caller, listener = meet(KEY, KEY)
    first, second = seals(caller)[0].put(b"one"), seals(caller)[0].put(b"two")
    with pytest.raises(AuthenticationError):
        seals(listener)[1].take(second)
    caller, listener = meet(KEY, KEY)
    first = seals(caller)[0].put(b"one")
    with pytest.raises(AuthenticationError):
        # The line comes back to its sender.
        seals(caller)[1].take(first)
    assert seals(listener)[1].take(first) == b"one"
    with pytest.raises(AuthenticationError):
        seals(listener)[1].take(first)
    _, other = meet(KEY, KEY)
    with pytest.raises(AuthenticationError):
        seals(other)[1].take(first)


@examples(100)
@given(st.binary(max_size=60), st.data())
def test_a_sealed_line_that_is_changed_is_refused(payload: bytes, data: st.DataObject) -> None:
    caller, listener = meet(KEY, KEY)
    sealed = bytearray(seals(caller)[0].put(payload))
    assert len(sealed) == len(payload) + MAC_DIGITS + 1
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(AuthenticationError):
        seals(listener)[1].take(bytes(sealed))


@examples(150)
@given(st.lists(st.binary(max_size=100), max_size=3), st.booleans())
def test_no_bytes_are_a_handshake(payloads: list[bytes], is_caller: bool) -> None:
    end = Handshake(KEY, is_caller=is_caller)
    for payload in payloads:
        with pytest.raises((Malformed, AuthenticationError)):
            end.feed(payload)
    assert end.seals is None


introductions: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries(
    {},
    optional={
        "fleetrun": st.sampled_from([1, 2, True, "1", None]),
        "nonce": st.sampled_from(["0" * 32, "é" * 32, " " * 32, "0" * 31, "", None, 0]),
        "token": st.sampled_from([True, False, 1, None]),
        "proof": st.sampled_from(["0" * 64, "x" * 64, "", None, []]),
    },
)


@examples(150)
@given(st.lists(introductions, max_size=3), st.booleans())
def test_who_does_not_know_the_key_gets_nowhere(
    values: list[dict[str, object]],
    is_caller: bool,
) -> None:
    end = Handshake(KEY, is_caller=is_caller)
    with suppress(Malformed, AuthenticationError):
        for value in values:
            end.feed(json.dumps(value).encode())
    assert end.seals is None
