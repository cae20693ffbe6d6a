"""An authenticated connection between two launchers: messages in and out."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import NamedTuple

from fleetrun.run.loop import READABLE, WRITABLE, Waiting
from fleetrun.run.tcpconnect import Link
from fleetrun.session.authentication import (
    LONGEST_HANDSHAKE,
    MAC_BYTES,
    AuthenticationError,
    Handshake,
    Key,
    Seal,
)
from fleetrun.session.codec import Codec, Frames, Malformed, frame

_PIECE = 1 << 16
# The memory that each unsent part takes beside its bytes.
_PART_BYTES = 256
# In bytes. Callers send joins and failures with last lines; listeners also send rosters.
LONGEST_FROM_CALLER = 1 << 18
LONGEST_FROM_LISTENER = 1 << 24
# A peer that leaves this much unread counts as lost; several rosters of 2,000 hosts fit.
MOST_UNSENT = 1 << 25
# How long unsent messages may take to leave after `finish`.
_FLUSH_S = 2.0
# From linux/tcp.h; older kernels ignore them.
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
_LONGEST_RETRANSMIT_MS = 1000
# Why a connection was lost that the other end has closed.
HUNG_UP = "hung up"
# When the kernel gives up on a silent host; the session does so long before.
_GIVE_UP_MS = 60_000


class Wire(NamedTuple):
    """What the connections of a session have in common: its key, its messages, and the loop."""

    key: Key
    codec: Codec
    waiting: Waiting
    # The address of this host that the listeners expect; empty: any.
    source: str = ""


class Connection:
    """Messages to and from another launcher, over LINK.

    `heard` is called with each message, and `lost` with a reason when there will be no more; the
    owner sets both. Nothing blocks, and neither is called from within `send`, `finish` or `close`.
    Either READY is called once the handshake is complete, or FAILED with a reason.
    """

    def __init__(
        self,
        link: Link,
        wire: Wire,
        *,
        is_caller: bool,
        ready: Callable[[Connection], None],
        failed: Callable[[Connection, str], None],
    ) -> None:
        self.address = link.address
        self.local_address = link.local_address
        self.port = link.port
        self.heard: Callable[[tuple[object, ...]], None] = _ignore
        self.lost: Callable[[str], None] = _ignore
        self.is_open = True
        self._socket = link.socket
        self._waiting = wire.waiting
        self._codec = codec = wire.codec
        self._longest = LONGEST_FROM_LISTENER if is_caller else LONGEST_FROM_CALLER
        # Only listeners send messages that are worth compressing.
        self._write = codec.write if is_caller else codec.write_packed
        self._longest_packed = LONGEST_FROM_LISTENER if is_caller else 0
        self._handshake = Handshake(wire.key, is_caller=is_caller)
        # For outgoing and incoming frames, once the handshake is complete.
        self._sealing: Seal | None = None
        self._opening: Seal | None = None
        self._ready = ready
        self._failed = failed
        self._frames = Frames(LONGEST_HANDSHAKE)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_finishing = False
        self._is_writing = False
        _tune(self._socket)
        self._watch()
        introduction = self._handshake.begin()
        if introduction is not None:
            self._push(frame(introduction))

    # For its user -------------------------------------------------------------------------------

    def send(self, message: tuple[object, ...]) -> None:
        """Send MESSAGE now or when there is room; report a failure to `lost`."""
        if self.is_open and not self._is_finishing and self._sealing is not None:
            self._push(frame(self._sealing.put(self._write(message))))

    def finish(self) -> None:
        """Send what is left and hang up; `lost` follows when the other end hangs up as well."""
        if not self.is_open:
            return
        self._is_finishing = True
        self._waiting.timer(self._key("flush"), time.monotonic() + _FLUSH_S, self._part)
        self._flush()

    def close(self) -> None:
        """Close the connection at once; no callback follows."""
        if self.is_open:
            self.is_open = False
            for timer in ("flush", "later"):
                self._waiting.timer(self._key(timer), None, self._part)
            self._waiting.unwatch(self._socket.fileno())
            self._socket.close()
            self._forget_unsent()

    def lose(self, why: str) -> None:
        """Close, and report why to the owner of the connection or of the handshake."""
        if not self.is_open:
            return
        self.close()
        if self._opening is None:
            self._failed(self, why)
        else:
            self.lost(why)

    # Inside -------------------------------------------------------------------------------------

    def _key(self, timer: str) -> Hashable:
        return (id(self), timer)

    def _part(self) -> None:
        self.lose(HUNG_UP)

    def _lose_later(self, why: str) -> None:
        """Report a loss from the loop, because `send` must not call its caller back."""
        self._waiting.timer(self._key("later"), time.monotonic(), lambda: self.lose(why))

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _push(self, part: bytes) -> None:
        self._unsent.append(memoryview(part))
        self._unsent_bytes += _PART_BYTES + len(part)
        if self._unsent_bytes > MOST_UNSENT:
            self._forget_unsent()
            self._lose_later(f"did not read {MOST_UNSENT} bytes that were sent")
            return
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            part = self._unsent[0]
            try:
                sent = self._socket.send(part)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._forget_unsent()
                self._lose_later(reason(error))
                break
            self._unsent_bytes -= sent
            if sent < len(part):
                self._unsent[0] = part[sent:]
            else:
                self._unsent.popleft()
                self._unsent_bytes -= _PART_BYTES
        if self._is_finishing and not self._unsent:
            with suppress(OSError):
                self._socket.shutdown(_socket.SHUT_WR)
        if self._is_writing != bool(self._unsent):
            self._watch()

    def _watch(self) -> None:
        self._is_writing = bool(self._unsent)
        mask = READABLE | (WRITABLE if self._is_writing else 0)
        self._waiting.watch(self._socket.fileno(), self._turn, mask)

    def _turn(self) -> None:
        if self._is_writing:
            self._flush()
        self._read()

    def _read(self) -> None:
        try:
            piece = self._socket.recv(_PIECE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.lose(reason(error))
            return
        if not piece:
            self.lose(HUNG_UP)
            return
        payloads = self._frames.feed(piece)
        while self.is_open:
            try:
                payload = next(payloads, None)
                message = None if payload is None else self._take(payload)
            except Malformed as error:
                self.lose(f"sent {error}")
                return
            except AuthenticationError as error:
                if error.answer is not None:
                    self._push(frame(error.answer))
                self.lose(str(error))
                return
            if payload is None:
                return
            if message is not None:
                self.heard(message)

    def _take(self, payload: bytes) -> tuple[object, ...] | None:
        """Return the message in PAYLOAD; None if it was part of the handshake."""
        if self._opening is not None:
            unsealed = self._opening.take(payload)
            message: tuple[object, ...] = self._codec.read(unsealed, self._longest_packed)
            return message
        handshake = self._handshake
        answer = handshake.feed(payload)
        if answer is not None:
            self._push(frame(answer))
        if handshake.seals is not None and self.is_open:
            self._sealing, self._opening = handshake.seals
            self._frames.limit = self._longest + MAC_BYTES
            self._ready(self)
        return None


def reason(error: OSError) -> str:
    """Return the text of ERROR without Python's decoration.

    >>> reason(ConnectionResetError(104, "Connection reset by peer"))
    'connection reset by peer'
    """
    text = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ETIMEDOUT:
        return "no answer"
    return text[:1].lower() + text[1:]


def _ignore(_: object) -> None:
    """Do nothing, until the owner of the connection sets its callbacks."""


def _tune(link: _socket.socket) -> None:
    """Send short messages at once, and retransmit lost ones soon.

    By default the kernel doubles the pause after each loss, so that it would stay silent for
    seconds after the network is back.
    """
    link.settimeout(0)
    options = (
        (_socket.TCP_NODELAY, 1),
        (_socket.TCP_USER_TIMEOUT, _GIVE_UP_MS),
        (_TCP_THIN_LINEAR_TIMEOUTS, 1),
        (_TCP_RTO_MAX_MS, _LONGEST_RETRANSMIT_MS),
    )
    for option, value in options:
        with suppress(OSError):
            link.setsockopt(_socket.IPPROTO_TCP, option, value)
