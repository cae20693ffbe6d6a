"""An authenticated connection between two launchers: messages in and out, a line each.

Both ends first send a nonce. Each later line is `HMAC JSON`, by a key that follows from that of the
job and both nonces, over its direction, number and JSON: it fits no other connection, and a relay
can neither add nor repeat lines. The first one is empty, and proves that its sender knows the key.
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
WIRE_VERSION = 12
# In bytes, like all that follow: of a line before the messages, and of any.
_LONGEST_GREETING, _LONGEST = 128, 1 << 24
_PIECE = 1 << 16
# In hexadecimal digits; an HMAC-SHA256 is truncated to the least that RFC 2104 allows.
_MAC_DIGITS = 32
_CALLER, _LISTENER = b"caller", b"listener"
# How long unsent messages may take to leave after `finish`.
_FLUSH_S = 2.0
# The kernel gives up a silent host after a minute, the session long before. 16, from linux/tcp.h,
# lets it repeat what was lost in the same rhythm, so that it is not silent after an outage.
_TUNING = ((socket.TCP_NODELAY, 1), (socket.TCP_USER_TIMEOUT, 60_000), (16, 1))


def _hmac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256").hex().encode()


def job_key(job_id: str, token: str | None = None) -> bytes:
    """Return the key of the job JOB_ID; without TOKEN, anyone who knows that name can connect."""
    purpose = f"fleetrun session {WIRE_VERSION} {job_id}"
    return _hmac(os.fsencode(token or ""), purpose.encode())


class Seal:
    """The HMAC of the lines of one direction, each with its number."""

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._number = key, sender, 0

    def put(self, payload: bytes) -> bytes:
        """Return the next line, which has PAYLOAD."""
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return _hmac(self._key, self._sender + number + payload)[:_MAC_DIGITS] + b" " + payload

    def take(self, line: bytes) -> bytes:
        """Return the payload of LINE, or raise Malformed: it is not the next one."""
        payload = line[_MAC_DIGITS + 1 :]
        if not hmac.compare_digest(line, self.put(payload)):
            raise Malformed
        return payload


class Wire(NamedTuple):
    """What the connections of a session have in common: its key, its messages, and the loop."""

    key: bytes
    codec: Codec
    waiting: Waiting


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
        self._socket, self._wire, self._waiting = link, wire, wire.waiting
        self._ready = ready
        self._is_caller = is_caller
        self._nonce = os.urandom(16).hex().encode()
        # For outgoing and incoming lines, once the other end's nonce is known.
        self._seals: tuple[Seal, Seal] | None = None
        self._is_ready = self._is_finishing = False
        # None: the socket is not watched yet.
        self._is_writing: bool | None = None
        self._received, self._unsent = bytearray(), bytearray()
        link.settimeout(0)
        for option, value in _TUNING:
            with suppress(OSError):
                link.setsockopt(socket.IPPROTO_TCP, option, value)
        self._push(self._nonce)

    @property
    def has_heard(self) -> bool:
        """Whether the other end has sent anything."""
        return self._seals is not None or bool(self._received)

    def send(self, message: tuple[object, ...]) -> None:
        """Send MESSAGE now or when there is room; report a failure to `lost`."""
        assert self._seals is not None
        self._push(self._seals[0].put(self._wire.codec.write(message)))

    def finish(self) -> None:
        """Send what is left and hang up; `lost` follows when the other end hangs up as well."""
        if self.is_open:
            self._is_finishing = True
            self._lose_in(_FLUSH_S)
            self._flush()

    def close(self) -> None:
        """Close the connection at once; no callback follows."""
        if self.is_open:
            self.is_open = False
            self._waiting.timer((id(self), "lose"), None, self.close)
            self._waiting.unwatch(self._socket.fileno())
            self._socket.close()

    def lose(self) -> None:
        """Close, and report it."""
        if self.is_open:
            self.close()
            self.lost()

    def _lose_in(self, seconds: float) -> None:
        """Report a loss from the loop, because `send` must not call its caller back."""
        self._waiting.timer((id(self), "lose"), time.monotonic() + seconds, self.lose)

    def _push(self, line: bytes) -> None:
        if self.is_open and not self._is_finishing:
            self._unsent += line + b"\n"
            self._flush()

    def _flush(self) -> None:
        """Send as much as there is room for."""
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent.clear()
            self._lose_in(0.0)
        if self._is_finishing and not self._unsent:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if self._is_writing != bool(self._unsent):
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
            piece = b""
        self._received += piece
        try:
            self._take_lines()
        except Malformed:
            piece = b""
        if not piece:
            self.lose()

    def _take_lines(self) -> None:
        while self.is_open:
            end = self._received.find(b"\n")
            longest = _LONGEST if self._is_ready else _LONGEST_GREETING
            if (len(self._received) if end < 0 else end) > longest:
                raise Malformed
            if end < 0:
                return
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._take(line)

    def _take(self, line: bytes) -> None:
        """Take the nonce of the other end, its proof, or a message."""
        if self._seals is None:
            nonces = (self._nonce, line) if self._is_caller else (line, self._nonce)
            key = _hmac(self._wire.key, b" ".join(nonces))
            caller, listener = Seal(key, _CALLER), Seal(key, _LISTENER)
            self._seals = (caller, listener) if self._is_caller else (listener, caller)
            self._push(self._seals[0].put(b""))
            return
        payload = self._seals[1].take(line)
        if self._is_ready:
            self.heard(self._wire.codec.read(payload))
        else:
            self._is_ready = True
            self._ready(self)


def ignore(_: object) -> None:
    """Do nothing."""
