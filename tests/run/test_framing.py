"""Messages between processes of this host: whole with their descriptors, or not at all."""

from __future__ import annotations

import os
import socket

import pytest

from fleetrun.run import framing


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("length", [4, 12, None])
def test_a_message_is_whole_or_leaves_nothing(length: int | None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as file:
        before = descriptors()
        data = framing.pack(("an order", 7))[:length]
        assert framing.send(ours, data, (file.fileno(),)) == len(data)
        ours.shutdown(socket.SHUT_WR)
        if length is None:
            message, (fd,) = framing.receive(theirs, lambda: True)
            assert message == ("an order", 7)
            assert os.path.sameopenfile(fd, file.fileno())
            os.close(fd)
        else:
            with pytest.raises(EOFError):
                framing.receive(theirs, lambda: True)
        assert descriptors() == before
