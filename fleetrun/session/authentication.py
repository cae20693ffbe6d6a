"""Authentication: both ends of a connection prove that they know the key of the job.

    caller  -> listener   nonce of the caller
    caller  <- listener   nonce of the listener, its proof of the key
    caller  -> listener   proof of the caller

A proof is an HMAC over both nonces and the role, so that none fits another connection or the
other end. Each later line is `HMAC JSON`, by a key of this connection, over its direction, number
and JSON, so that a relay can neither add nor repeat lines.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from fleetrun.rundir.variables import TOKEN
from fleetrun.session.codec import Malformed, dump, load

# The version of lines, handshake and messages; another one cannot take part.
WIRE_VERSION = 8
# In bytes; every line of the handshake is shorter.
LONGEST_HANDSHAKE = 512
_NONCE_BYTES = 16
# In hexadecimal digits; an HMAC-SHA256 is truncated to the least that RFC 2104 allows.
MAC_DIGITS = 32
_CALLER, _LISTENER = "caller", "listener"


class AuthenticationError(Exception):
    """The other end cannot be trusted; the message says why, and is safe to print.

    ANSWER is a last line for the other end, so that it can report the same.
    """

    def __init__(self, why: str, answer: bytes | None = None) -> None:
        super().__init__(why)
        self.answer = answer


def _hmac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


class Key:
    """The key of the job JOB_ID: derived from TOKEN, or without one from the name alone.

    Without a token it keeps jobs apart, but anyone who knows the name can connect.
    """

    def __init__(self, job_id: str, token: str | None = None) -> None:
        self.has_token = bool(token)
        self.secret = _hmac(os.fsencode(token or ""), b"fleetrun session\0" + job_id.encode())


class Seal:
    """The HMAC of the lines of one direction, each with its number."""

    def __init__(self, key: bytes, sender: str) -> None:
        self._key = key
        self._sender = sender.encode()
        self._number = 0

    def mac(self, payload: bytes) -> bytes:
        """Return the HMAC of the next line, which has PAYLOAD."""
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return _hmac(self._key, self._sender + number + payload).hex()[:MAC_DIGITS].encode()

    def put(self, payload: bytes) -> bytes:
        """Return the next line, which has PAYLOAD."""
        return self.mac(payload) + b" " + payload

    def take(self, line: bytes) -> bytes:
        """Return the payload of LINE, or raise AuthenticationError: it is not the next one."""
        mac, _, payload = line.partition(b" ")
        if not hmac.compare_digest(mac, self.mac(payload)):
            raise AuthenticationError("the message was altered in transit")
        return payload


class Handshake:
    """One end of a handshake: lines in, lines out, and seals for both directions at its end."""

    def __init__(self, key: Key, *, is_caller: bool) -> None:
        self._key = key
        self._is_caller = is_caller
        self._nonce = os.urandom(_NONCE_BYTES)
        self._nonces = b""
        # The seals of outgoing and of incoming lines.
        self.seals: tuple[Seal, Seal] | None = None

    def begin(self) -> bytes | None:
        """Return the first line, if this end sends it."""
        if not self._is_caller:
            return None
        return dump(self._introduction())

    def feed(self, payload: bytes) -> bytes | None:
        """Take a line and return the answer; `seals` are set when the handshake is complete.

        Raises AuthenticationError, or Malformed for a line that no launcher sends.
        """
        values = load(payload)
        if self._is_caller:
            return self._read_listener(values)
        if not self._nonces:
            return self._read_caller(values)
        self._check_proof(values, _CALLER)
        self._agree()
        return None

    def _introduction(self) -> dict[str, object]:
        return {"fleetrun": WIRE_VERSION, "nonce": self._nonce.hex(), "token": self._key.has_token}

    def _read_caller(self, values: Mapping[str, object]) -> bytes:
        try:
            nonce = self._read_introduction(values)
        except AuthenticationError as refused:
            raise AuthenticationError(str(refused), answer=dump(self._introduction())) from None
        self._nonces = nonce + self._nonce
        return dump({**self._introduction(), "proof": self._proof(_LISTENER).hex()})

    def _read_listener(self, values: Mapping[str, object]) -> bytes:
        nonce = self._read_introduction(values)
        self._nonces = self._nonce + nonce
        self._check_proof(values, _LISTENER)
        self._agree()
        return dump({"proof": self._proof(_CALLER).hex()})

    def _read_introduction(self, values: Mapping[str, object]) -> bytes:
        version, has_token = values.get("fleetrun"), values.get("token")
        if type(version) is not int or type(has_token) is not bool:
            raise Malformed("no introduction")
        if version != WIRE_VERSION:
            raise AuthenticationError(
                f"its fleetrun speaks version {version} of the session's wire, and this one "
                f"{WIRE_VERSION}: install the same fleetrun on every host"
            )
        if has_token != self._key.has_token:
            peer, own = ("a", "none") if has_token else ("no", "one")
            raise AuthenticationError(
                f"its fleetrun has {peer} token ({TOKEN}), and this one has {own}: "
                "set the same on every host"
            )
        return _bytes(values.get("nonce"), _NONCE_BYTES)

    def _check_proof(self, values: Mapping[str, object], role: str) -> None:
        proof = _bytes(values.get("proof"), 32)
        if not hmac.compare_digest(proof, self._proof(role)):
            expectation = (
                "another token or another --job_id" if self._key.has_token else "another --job_id"
            )
            raise AuthenticationError(f"its fleetrun has {expectation}")

    def _proof(self, role: str) -> bytes:
        return _hmac(self._key.secret, b"proof\0" + role.encode() + b"\0" + self._nonces)

    def _agree(self) -> None:
        key = _hmac(self._key.secret, b"lines\0" + self._nonces)
        own, peer = (_CALLER, _LISTENER) if self._is_caller else (_LISTENER, _CALLER)
        self.seals = Seal(key, own), Seal(key, peer)


def _bytes(value: object, length: int) -> bytes:
    """Return the LENGTH bytes that VALUE has in hexadecimal."""
    if not isinstance(value, str) or len(value) != 2 * length:
        raise Malformed("no handshake")
    try:
        decoded = bytes.fromhex(value)
    except ValueError:
        raise Malformed("no handshake") from None
    if len(decoded) != length:
        raise Malformed("no handshake")
    return decoded
