"""Calls that may hang, such as into a driver, made in a child process with a timeout.

A stuck driver holds its caller in the kernel, where even SIGKILL may not end it. So a child makes
the call and is abandoned on timeout.
"""

from __future__ import annotations

import marshal
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fleetrun.run import libc
from fleetrun.run.loop import Loop, Waiting, nothing, poll

# The child's end of the pipe.
PIPE = 3
# A child that SIGKILL can end is gone within this time, even on a busy host.
_END_S = 1.0
# After this time, the user is told what is awaited.
_REMARK_S = 10.0


class CallResult(NamedTuple):
    """What the function returned, or in `trouble` why it did not."""

    value: object = None
    trouble: str = ""
    # Whether it did not answer in time and was abandoned.
    is_late: bool = False


class IsolatedCall:
    """One CALL in a child, which returns values that marshal takes.

    The call may also become a program that writes to PIPE what DECODE makes value and trouble of.
    """

    def __init__(
        self, call: Callable[[], object], decode: Callable[[bytes], Any] = marshal.loads
    ) -> None:
        self._began, self._decode, self._written, self._pid = time.monotonic(), decode, b"", 0
        self._fd, write_fd = os.pipe2(os.O_CLOEXEC)
        # Otherwise both processes would handle a signal that arrives in between.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _be_child(call, write_fd)
        except OSError as error:
            self._written = marshal.dumps((None, f"no process can be started: {error.strerror}"))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(write_fd)
        # Until the child says that it holds nothing of ours, such as ports to be released.
        os.read(self._fd, 1)

    def result(
        self,
        timeout_s: float,
        *,
        callee: str = "it",
        log: Callable[[str], None] | None = None,
        awaited: str = "",
    ) -> CallResult:
        """Wait for the result; if that takes long, LOG gets a line that names what is AWAITED."""
        loop, results = Loop(), list[CallResult]()
        self.watch(loop, results.append, timeout_s, callee=callee)
        if log is not None:
            remark = partial(log, f"Waiting up to {timeout_s:g} s for {awaited}.")
            loop.timer("remark", self._began + _REMARK_S, remark)
        while not results:
            loop.turn()
        loop.close()
        return results[0]

    def watch(
        self,
        waiting: Waiting,
        done: Callable[[CallResult], None],
        timeout_s: float | None = None,
        *,
        callee: str = "it",
    ) -> Callable[[], object]:
        """Let DONE get the result from WAITING, or the trouble that CALLEE has not answered.

        Return how to abandon the child; DONE is not called then.
        """
        self._waiting = waiting

        def read() -> None:
            part = os.read(self._fd, 65536)
            self._written += part
            if not part:
                done(self._ended(self.abandon(signum=0)))

        def be_late() -> None:
            self.abandon()
            why = f"{callee} has not answered within {timeout_s:g} s"
            done(CallResult(trouble=why, is_late=True))

        waiting.watch(self._fd, read)
        if timeout_s is not None:
            waiting.timer(self, self._began + timeout_s, be_late)
        return self.abandon

    def _ended(self, how: str) -> CallResult:
        try:
            return CallResult(*self._decode(self._written))
        except (EOFError, ValueError, TypeError):
            return CallResult(trouble=f"the process that asks it {how}")

    def abandon(self, signum: int = signal.SIGKILL) -> str:
        """End the child, which is left behind if the kernel holds it; return how it has ended."""
        self._waiting.unwatch(self._fd)
        self._waiting.timer(self, None, nothing)
        os.close(self._fd)
        if not self._pid:
            return ""
        os.kill(self._pid, signum)
        pidfd = os.pidfd_open(self._pid)
        poll(_END_S, pidfd)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        os.close(pidfd)
        if ended is None or ended.si_code == os.CLD_EXITED:
            return "has ended"
        return f"was killed by {signal.Signals(ended.si_status).name}"


def _be_child(call: Callable[[], object], write_fd: int) -> None:
    """Make CALL, write its result to WRITE_FD and exit."""
    try:
        launcher = os.getppid()
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(libc.PR_SET_NAME, b"fleetrun-asks")
        if os.getppid() != launcher:
            return
        # This child must not keep the launcher's pipes open for their readers.
        os.dup2(write_fd, PIPE)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.closerange(PIPE + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(PIPE, b".")
        try:
            answer: tuple[object, str] = (call(), "")
        except Exception as error:  # noqa: BLE001 - whatever a library may raise is the answer
            answer = (None, f"{type(error).__name__}: {error}")
        with os.fdopen(PIPE, "wb") as pipe:
            # The reader waits for the end of the pipe, not of the process, which may hang as well.
            pipe.write(marshal.dumps(answer))  # type: ignore[arg-type]
    finally:
        os._exit(0)
