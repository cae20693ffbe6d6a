"""Messages on a local socket: length-prefixed marshalled values, with descriptors."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import marshal
import os
import sys
from collections.abc import Callable
from typing import Any

_LENGTH = 8
# The bytes of a C int.
_INT = 4
_SPACE = _socket.CMSG_SPACE(2 * _INT)
# Most of what is awaited is there already: wait only where it is not.
_FLAGS = _socket.MSG_CMSG_CLOEXEC | _socket.MSG_DONTWAIT


def pack(message: Any) -> bytes:  # noqa: ANN401 - what marshal takes
    """Return MESSAGE, marshalled and prefixed with its length."""
    text = marshal.dumps(message)
    return len(text).to_bytes(_LENGTH, "little") + text


def send(to: _socket.socket, data: bytes | memoryview, fds: tuple[int, ...] = ()) -> int:
    """Send as much of DATA as fits, with the descriptors FDS; return the number of bytes."""
    numbers = b"".join(fd.to_bytes(_INT, sys.byteorder) for fd in fds)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)] if fds else []
    return to.sendmsg([data], rights)


def receive(sender: _socket.socket, is_readable: Callable[[], bool]) -> tuple[Any, list[int]]:
    """Return the next message from SENDER, and the descriptors that came with it.

    IS_READABLE waits for data. Raises EOFError if it returns False or SENDER has closed the
    connection, OSError if the connection is broken.
    """
    fds: list[int] = []

    def read(length: int) -> bytes:
        data = b""
        while len(data) < length:
            try:
                part, more, _, _ = sender.recvmsg(length - len(data), _SPACE, _FLAGS)
            except BlockingIOError:
                if not is_readable():
                    raise EOFError from None
                continue
            for _, _, numbers in more:
                fds.extend(memoryview(numbers).cast("i"))
            if not part:
                raise EOFError
            data += part
        return data

    try:
        length = int.from_bytes(read(_LENGTH), "little")
        return marshal.loads(read(length)), fds  # noqa: S302 - of our own processes
    except (EOFError, OSError):
        for fd in fds:
            os.close(fd)
        raise
