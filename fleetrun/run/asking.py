"""A question to a driver, asked in a process of its own: one that hangs holds nobody up.

A driver that is stuck keeps whoever asks it inside the kernel, where even SIGKILL may not reach.
So a child asks, and is left behind if there is no answer in time.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.run import libc, proc

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK = 65536
# What SIGKILL reaches is gone by then, and so is what has closed its pipe by crashing.
_END_S = 0.1


class Answer(NamedTuple):
    """What the child found out; or, in `trouble`, why it could not."""

    value: object = None
    trouble: str = ""


class Question:
    """One question: `ask` runs in a child, and what it returns comes back through `fd`.

    The answer is made of plain values: numbers, text, None, tuples, lists and dicts of those.
    Raises OSError when there can be no child.
    """

    # Whether the child is still there although it was killed.
    is_left = False

    def __init__(self, ask: Callable[[], object]) -> None:
        self.fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self._parts: list[bytes] = []
        # A signal in between would be dealt with by both.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _be_child(ask, write_fd)
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.close(self.fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(write_fd)

    def read(self) -> Answer | None:
        """Take what has come through `fd`; the answer once it is whole."""
        part = os.read(self.fd, _CHUNK)
        self._parts.append(part)
        return None if part else self._ended()

    def wait(self, until: float) -> Answer | None:
        """Return the answer; None if it has not come by the moment UNTIL."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while poll.poll(max(0.0, until - time.monotonic()) * 1000):
            answer = self.read()
            if answer is not None:
                self.close()
                return answer
        return None

    def abandon(self) -> str:
        """Kill the child, without waiting for it; say how it stood."""
        standing = f"process {self.pid}, {proc.standing(self.pid)}"
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._reap(_END_S)
        self.close()
        return f"{standing}, left behind as SIGKILL does not end it" if self.is_left else standing

    def _ended(self) -> Answer:
        """Return what the child has written, or how it ended instead."""
        try:
            value = marshal.loads(b"".join(self._parts))  # noqa: S302 - our own child's
        except (EOFError, ValueError, TypeError):
            value = None
        if isinstance(value, tuple) and len(value) == len(Answer._fields):
            self._reap(0.0)
            return Answer(*value)
        return Answer(trouble=f"the process that asks it {self._reap(_END_S)}")

    def close(self) -> None:
        """Give the descriptors back, when the answer is there and nobody watches `fd` any more."""
        os.close(self._pidfd)
        os.close(self.fd)

    def _reap(self, seconds: float) -> str:
        """Reap the child if it ends within SECONDS; the supervisor does it later otherwise."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        self.is_left = not poll.poll(seconds * 1000) and seconds > 0.0
        how = "has ended"
        # The supervisor, which reaps orphans, may have been faster.
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None and ended.si_code != os.CLD_EXITED:
                how = f"was killed by {signal.Signals(ended.si_status).name}"
        return how


def _be_child(ask: Callable[[], object], write_fd: int) -> None:
    """Ask, and never return into the launcher's code."""
    try:
        launcher = os.getppid()
        for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(one, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(libc.PR_SET_NAME, b"fleetrun-asks")
        if os.getppid() != launcher:
            return
        # Whoever waits for the end of a pipe of the launcher's shall not wait for us.
        os.dup2(write_fd, 3)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        try:
            answer: tuple[object, str] = (ask(), "")
        except Exception as error:  # noqa: BLE001 - whatever a library may raise is the answer
            answer = (None, f"{type(error).__name__}: {error}")
        with os.fdopen(3, "wb") as pipe:
            # The end of the answer is its end, as to end may take a driver long, too.
            pipe.write(marshal.dumps(answer))  # type: ignore[arg-type]
    finally:
        os._exit(0)
