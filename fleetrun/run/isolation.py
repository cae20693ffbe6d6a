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
from contextlib import suppress
from typing import NamedTuple

from fleetrun.run import libc
from fleetrun.run.loop import Waiting, nothing, poll

_CHUNK = 65536
# A child that SIGKILL can end is gone within this time, even on a busy host.
_END_S = 1.0
# After this time, the user is told what is awaited.
_REMARK_S = 10.0
# The child's end of the pipe.
_PIPE = 3


class CallResult(NamedTuple):
    """What the function returned, or in `trouble` why it did not."""

    value: object = None
    trouble: str = ""
    # Whether it did not answer in time and was abandoned.
    is_late: bool = False


class IsolatedCall:
    """One CALL in a child, whose result comes back through `fd`.

    The result consists of values that marshal takes. IS_PROGRAM: the call becomes a program, and
    what that prints is the result, as bytes. Raises OSError if no child can be started.
    """

    _waiting: Waiting | None = None

    def __init__(self, call: Callable[[], object], *, is_program: bool = False) -> None:
        self._began = time.monotonic()
        self._is_program = is_program
        self.fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self._written = b""
        # Otherwise both processes would handle a signal that arrives in between.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _be_child(call, write_fd, is_program=is_program)
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.close(self.fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(write_fd)

    def _read(self) -> CallResult | None:
        """Read what has arrived through `fd`; return the result and close once it is complete."""
        part = os.read(self.fd, _CHUNK)
        self._written += part
        if part:
            return None
        how = self._end()
        if self._is_program:
            return CallResult(self._written)
        try:
            value, trouble = marshal.loads(self._written)  # noqa: S302 - our own child's
        except (EOFError, ValueError, TypeError):
            return CallResult(trouble=f"the process that asks it {how}")
        return CallResult(value, trouble)

    def result(
        self,
        timeout_s: float,
        *,
        callee: str = "it",
        log: Callable[[str], None] | None = None,
        awaited: str = "",
    ) -> CallResult:
        """Return the result, or the trouble that CALLEE did not answer within TIMEOUT_S.

        If that takes long, LOG gets a line that names what is AWAITED.
        """
        answer = None
        until = self._began + (timeout_s if log is None else min(_REMARK_S, timeout_s))
        while answer is None:
            if poll(until - time.monotonic(), self.fd):
                answer = self._read()
            elif until < self._began + timeout_s and log is not None:
                log(f"Waiting up to {timeout_s:g} s for {awaited}.")
                until = self._began + timeout_s
            else:
                answer = self._late(callee, timeout_s)
        return answer

    def watch(
        self,
        waiting: Waiting,
        done: Callable[[CallResult], None],
        timeout_s: float | None,
        callee: str,
    ) -> None:
        """Do as `ask` says."""
        self._waiting = waiting

        def read() -> None:
            answer = self._read()
            if answer is not None:
                done(answer)

        waiting.watch(self.fd, read)
        if timeout_s is not None:
            at = time.monotonic() + timeout_s
            key = IsolatedCall, self.pid
            waiting.timer(key, at, lambda: done(self._late(callee, timeout_s)))

    def _late(self, callee: str, timeout_s: float) -> CallResult:
        self.abandon()
        return CallResult(trouble=f"{callee} has not answered within {timeout_s:g} s", is_late=True)

    def abandon(self) -> None:
        """Kill the child, which is left behind if the kernel holds it."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._end()

    def _end(self) -> str:
        """Reap the child, which ends now unless the kernel holds it; return how it has ended."""
        poll(_END_S, self._pidfd)
        how = "has ended"
        # The supervisor, which reaps orphans, may have been faster.
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None and ended.si_code != os.CLD_EXITED:
                how = f"was killed by {signal.Signals(ended.si_status).name}"
        if self._waiting is not None:
            self._waiting.unwatch(self.fd)
            self._waiting.timer((IsolatedCall, self.pid), None, nothing)
        os.close(self._pidfd)
        os.close(self.fd)
        return how


def _be_child(call: Callable[[], object], write_fd: int, *, is_program: bool) -> None:
    """Make CALL, write its result to WRITE_FD and exit."""
    try:
        launcher = os.getppid()
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(libc.PR_SET_NAME, b"fleetrun-asks")
        if os.getppid() != launcher:
            return
        # This child must not keep the launcher's pipes open for their readers.
        os.dup2(write_fd, _PIPE)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(_PIPE if is_program and fd == 1 else null, fd)
        os.closerange(_PIPE + 1, os.sysconf("SC_OPEN_MAX"))
        try:
            answer: tuple[object, str] = (call(), "")
        except Exception as error:  # noqa: BLE001 - whatever a library may raise is the answer
            answer = (None, f"{type(error).__name__}: {error}")
        with os.fdopen(_PIPE, "wb") as pipe:
            # The reader waits for the end of the pipe, not of the process, which may hang as well.
            pipe.write(marshal.dumps(answer))  # type: ignore[arg-type]
    finally:
        os._exit(0)


def ask(
    call: Callable[[], object],
    waiting: Waiting,
    done: Callable[[CallResult], None],
    timeout_s: float | None = None,
    *,
    callee: str = "it",
    is_program: bool = False,
) -> Callable[[], object]:
    """Make CALL in a child; DONE gets the result, or why there is none, from WAITING.

    The function returned abandons the child; DONE is not called any more.
    """
    try:
        asked = IsolatedCall(call, is_program=is_program)
    except OSError as error:
        result = CallResult(trouble=f"no process can be started: {error.strerror}")
        key = object()
        waiting.timer(key, time.monotonic(), lambda: done(result))
        return lambda: waiting.timer(key, None, nothing)
    asked.watch(waiting, done, timeout_s, callee)
    return asked.abandon
