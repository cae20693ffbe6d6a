"""An authenticated connection between two launchers: messages in and out, a line each.

Both ends first send a nonce, then a proof that they know the key of the job: an HMAC over both
nonces and the role, so that none fits another connection or the other end. Each later line is
`HMAC JSON`, by a key of this connection, over its direction, number and JSON, so that a relay can
neither add nor repeat lines.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from fleetrun.run.loop import READABLE, WRITABLE, Waiting
from fleetrun.session.codec import Codec, Malformed

# The version of lines and messages; another one cannot take part.
WIRE_VERSION = 11
# In bytes, like all that follow; each line before the messages is shorter.
_LONGEST_GREETING, _LONGEST = 128, 1 << 24
_PIECE = 1 << 16
# In hexadecimal digits; an HMAC-SHA256 is truncated to the least that RFC 2104 allows.
_MAC_DIGITS = 32
_CALLER, _LISTENER = b"caller", b"listener"
# How long unsent messages may take to leave after `finish`.
_FLUSH_S = 2.0
# By default the kernel doubles the pause after each loss, so that it would stay silent for seconds
# after the network is back; it gives up a silent host after a minute, the session long before. 16
# and 44 are from linux/tcp.h, and older kernels ignore the second.
_TUNING = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_USER_TIMEOUT, 60_000),
    (16, 1),
    (44, 1000),
)


def _hmac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256").hex().encode()


def job_key(job_id: str, token: str | None = None) -> bytes:
    """Return the key of the job JOB_ID: derived from TOKEN, or without one from the name alone.

    Without a token it keeps jobs apart, but anyone who knows the name can connect.
    """
    purpose = f"fleetrun session {WIRE_VERSION} {job_id}"
    return _hmac(os.fsencode(token or ""), purpose.encode())


class Seal:
    """The HMAC of the lines of one direction, each with its number."""

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._number = key, sender, 0

    def _mac(self, payload: bytes) -> bytes:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return _hmac(self._key, self._sender + number + payload)[:_MAC_DIGITS]

    def put(self, payload: bytes) -> bytes:
        """Return the next line, which has PAYLOAD."""
        return self._mac(payload) + b" " + payload

    def take(self, line: bytes) -> bytes:
        """Return the payload of LINE, or raise Malformed: it is not the next one."""
        mac, _, payload = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise Malformed("a message that was altered in transit")
        return payload


class Wire(NamedTuple):
    """What the connections of a session have in common: its key, its messages, and the loop."""

    key: bytes
    codec: Codec
    waiting: Waiting
    # The address of this host that the listeners expect; empty: any.
    source: str = ""


class Connection:
    """Messages to and from the launcher at ADDRESS, over LINK.

    READY is called once both ends have proved themselves, and sets `heard`, which is called with
    each message. LOST is called when there will be no more. Nothing blocks, and neither is called
    from within `send`, `finish` or `close`.
    """

    def __init__(
        self,
        link: socket.socket,
        address: str,
        wire: Wire,
        *,
        is_caller: bool,
        ready: Callable[[Connection], None],
        lost: Callable[[], None],
    ) -> None:
        self.address = address
        self.heard: Callable[[Any], None] = ignore
        self.lost = lost
        self.is_open = True
        # Whether the other end has hung up before it sent a line.
        self.has_looked = False
        self._socket, self._waiting = link, wire.waiting
        self._codec, self._key = wire.codec, wire.key
        self._ready = ready
        self._roles = (_CALLER, _LISTENER) if is_caller else (_LISTENER, _CALLER)
        self._nonce, self._nonces = os.urandom(16).hex().encode(), b""
        # For outgoing and incoming lines, once both ends have proved themselves.
        self._seals: tuple[Seal, Seal] | None = None
        self._received, self._unsent = bytearray(), bytearray()
        self._is_finishing = self._is_writing = False
        link.settimeout(0)
        for option, value in _TUNING:
            with suppress(OSError):
                link.setsockopt(socket.IPPROTO_TCP, option, value)
        self._watch()
        self._push(self._nonce)

    # For its user -------------------------------------------------------------------------------

    def send(self, message: tuple[object, ...]) -> None:
        """Send MESSAGE now or when there is room; report a failure to `lost`."""
        if self._seals is not None:
            self._push(self._seals[0].put(self._codec.write(message)))

    def finish(self) -> None:
        """Send what is left and hang up; `lost` follows when the other end hangs up as well."""
        if self.is_open:
            self._is_finishing = True
            self._later("flush", _FLUSH_S)
            self._flush()

    def close(self) -> None:
        """Close the connection at once; no callback follows."""
        if self.is_open:
            self.is_open = False
            for timer in ("flush", "later"):
                self._waiting.timer((id(self), timer), None, self.close)
            self._waiting.unwatch(self._socket.fileno())
            self._socket.close()
            self._unsent.clear()

    def lose(self) -> None:
        """Close, and report it."""
        if self.is_open:
            self.close()
            self.lost()

    # Inside -------------------------------------------------------------------------------------

    def _later(self, timer: str, seconds: float) -> None:
        """Report a loss from the loop, because `send` must not call its caller back."""
        self._waiting.timer((id(self), timer), time.monotonic() + seconds, self.lose)

    def _push(self, line: bytes) -> None:
        if self.is_open and not self._is_finishing:
            self._unsent += line + b"\n"
            self._flush()

    def _flush(self) -> None:
        """Send as much as there is room for."""
        try:
            if self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent.clear()
            self._later("later", 0.0)
        if self._is_finishing and not self._unsent:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if self._is_writing != bool(self._unsent):
            self._watch()

    def _watch(self) -> None:
        self._is_writing = bool(self._unsent)
        mask = READABLE | (WRITABLE if self._is_writing else 0)
        self._waiting.watch(self._socket.fileno(), self._turn, mask)

    def _turn(self) -> None:
        if self._is_writing:
            self._flush()
        try:
            piece = self._socket.recv(_PIECE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.lose()
            return
        if not piece:
            self.has_looked = not self._nonces
            self.lose()
            return
        searched = len(self._received)
        self._received += piece
        try:
            self._read_lines(searched)
        except Malformed:
            self.lose()

    def _read_lines(self, searched: int) -> None:
        """Take what is complete; before SEARCHED there is no end of a line."""
        while self.is_open:
            end = self._received.find(b"\n", searched)
            longest = _LONGEST if self._seals else _LONGEST_GREETING
            if (len(self._received) if end < 0 else end) > longest:
                raise Malformed(f"a line of more than {longest} bytes")
            if end < 0:
                return
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            searched = 0
            if self._seals is not None:
                self.heard(self._codec.read(self._seals[1].take(line)))
            else:
                self._take(line)

    def _take(self, line: bytes) -> None:
        """Take the nonce, and then the proof, of the other end."""
        ours, theirs = self._roles
        if not self._nonces:
            nonces = (self._nonce, line)
            self._nonces = b" ".join(nonces if ours == _CALLER else nonces[::-1])
            self._push(self._proof(ours))
            return
        if not hmac.compare_digest(line, self._proof(theirs)):
            raise Malformed("no proof")
        key = _hmac(self._key, b"lines " + self._nonces)
        self._seals = Seal(key, ours), Seal(key, theirs)
        self._ready(self)

    def _proof(self, role: bytes) -> bytes:
        return _hmac(self._key, b"proof " + role + b" " + self._nonces)


def ignore(_: object) -> None:
    """Do nothing."""
