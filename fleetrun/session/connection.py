"""An authenticated connection between two launchers: messages in and out, a line each."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.run.loop import READABLE, WRITABLE, Waiting
from fleetrun.run.tcpconnect import Link
from fleetrun.session.authentication import (
    LONGEST_HANDSHAKE,
    MAC_DIGITS,
    AuthenticationError,
    Handshake,
    Key,
    Seal,
)
from fleetrun.session.codec import Codec, Malformed

if TYPE_CHECKING:
    import _socket

_PIECE = 1 << 16
# In bytes. Callers send joins and failures with last lines; listeners also send rosters.
LONGEST_FROM_CALLER = 1 << 18
LONGEST_FROM_LISTENER = 1 << 24
# A peer that leaves this much unread, in bytes, counts as lost; several rosters fit.
MOST_UNSENT = 1 << 25
# How long unsent messages may take to leave after `finish`.
_FLUSH_S = 2.0
# From linux/tcp.h; older kernels ignore them.
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
_LONGEST_RETRANSMIT_MS = 1000
# When the kernel gives up on a silent host; the session does so long before.
_GIVE_UP_MS = 60_000
# Why a connection was lost that the other end has closed.
HUNG_UP = "hung up"
# How much of what another program sends is quoted.
_SHOWN = 24


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
        self.heard: Callable[[Any], None] = _ignore
        self.lost: Callable[[str], None] = _ignore
        self.is_open = True
        self._socket, self._waiting, self._codec = link.socket, wire.waiting, wire.codec
        self._handshake = Handshake(wire.key, is_caller=is_caller)
        # For outgoing and incoming lines, once the handshake is complete.
        self._sealing: Seal | None = None
        self._opening: Seal | None = None
        self._longest = LONGEST_HANDSHAKE
        self._longest_later = LONGEST_FROM_LISTENER if is_caller else LONGEST_FROM_CALLER
        self._ready, self._failed = ready, failed
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_finishing = self._is_writing = False
        _tune(self._socket)
        self._watch()
        introduction = self._handshake.begin()
        if introduction is not None:
            self._push(introduction)

    # For its user -------------------------------------------------------------------------------

    def send(self, message: tuple[object, ...]) -> None:
        """Send MESSAGE now or when there is room; report a failure to `lost`."""
        if self.is_open and not self._is_finishing and self._sealing is not None:
            self._push(self._sealing.put(self._codec.write(message)))

    def finish(self) -> None:
        """Send what is left and hang up; `lost` follows when the other end hangs up as well."""
        if self.is_open:
            self._is_finishing = True
            self._later("flush", _FLUSH_S, HUNG_UP)
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

    def _later(self, timer: str, seconds: float, why: str) -> None:
        """Report a loss from the loop, because `send` must not call its caller back."""
        at = time.monotonic() + seconds
        self._waiting.timer((id(self), timer), at, lambda: self.lose(why))

    def _push(self, line: bytes) -> None:
        self._unsent.append(memoryview(line + b"\n"))
        self._unsent_bytes += len(line) + 1
        if self._unsent_bytes > MOST_UNSENT:
            self._later("later", 0.0, f"did not read {MOST_UNSENT} bytes that were sent")
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
                self._unsent.clear()
                self._later("later", 0.0, reason(error))
                break
            self._unsent_bytes -= sent
            if sent < len(part):
                self._unsent[0] = part[sent:]
            else:
                self._unsent.popleft()
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
        except OSError as error:
            self.lose(reason(error))
            return
        if not piece:
            self.lose(HUNG_UP)
            return
        searched = len(self._received)
        self._received += piece
        try:
            self._read_lines(searched)
        except Malformed as error:
            self.lose(f"sent {error}")
        except AuthenticationError as error:
            if error.answer is not None:
                self._push(error.answer)
            self.lose(str(error))

    def _read_lines(self, searched: int) -> None:
        """Take what is complete; before SEARCHED there is no end of a line."""
        while self.is_open:
            end = self._received.find(b"\n", searched)
            if max(end, len(self._received) if end < 0 else end) > self._longest:
                begin = b"" if self._opening is not None else self._received[:_SHOWN]
                raise Malformed(_strange(bytes(begin), self._longest))
            if end < 0:
                return
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            searched = 0
            if self._opening is not None:
                self.heard(self._codec.read(self._opening.take(line)))
            else:
                self._introduce(line)

    def _introduce(self, line: bytes) -> None:
        if not line.startswith(b"{"):
            raise Malformed(_strange(line[:_SHOWN], self._longest))
        handshake = self._handshake
        answer = handshake.feed(line)
        if answer is not None:
            self._push(answer)
        if handshake.seals is not None and self.is_open:
            self._sealing, self._opening = handshake.seals
            self._longest = self._longest_later + MAC_DIGITS
            self._ready(self)


def _strange(begin: bytes, longest: int) -> str:
    """Return what a program has sent that begins so, and does not end a line in time."""
    begin = begin.split(b"\r")[0]
    if begin and begin.isascii() and begin.decode().isprintable() and not begin.startswith(b"{"):
        # Mostly HTTP, or the greeting of an ssh server.
        return f"{begin.decode()!r}, which no launcher sends: another program uses that port"
    return f"a line of more than {longest} bytes"


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
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, _GIVE_UP_MS),
        (_TCP_THIN_LINEAR_TIMEOUTS, 1),
        (_TCP_RTO_MAX_MS, _LONGEST_RETRANSMIT_MS),
    )
    for option, value in options:
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
