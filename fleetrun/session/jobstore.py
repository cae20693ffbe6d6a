"""The launcher's end of the process that asks etcd, see etcdprocess.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.records.folder import write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.run.loop import Waiting

_CHUNK = 65536


class StoreAnswer(NamedTuple):
    """What etcd has answered to what was asked AT (monotonic seconds), or why it has not."""

    asked_at: float
    value: Any = None
    trouble: str = ""
    # Whether another attempt would be refused, too.
    is_refused: bool = False


class JobStore:
    """Asks etcd at ENDPOINTS for job NAME, one question after the other, in another process.

    IS_SECURE: over TLS.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        name: str,
        *,
        timeout_s: float,
        waiting: Waiting,
        is_secure: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._name = name
        self._timeout_s = timeout_s
        self._is_secure = is_secure
        self._waiting = waiting
        self._pid = 0
        self._orders = self._answers = -1
        self._read = b""
        self._asked: deque[tuple[str, Callable[[StoreAnswer], None]]] = deque()
        # When the one that is being answered was asked; None: none is.
        self._asked_at: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._asked)

    def elsewhere(self, waiting: Waiting) -> JobStore:
        """Return one that asks the same etcd, for another process."""
        endpoints, timeout_s, is_secure = self._endpoints, self._timeout_s, self._is_secure
        return JobStore(
            endpoints, self._name, timeout_s=timeout_s, waiting=waiting, is_secure=is_secure
        )

    def ask(self, done: Callable[[StoreAnswer], None], what: str, *values: object) -> None:
        """Ask for WHAT; DONE is called with the answer, from the loop."""
        self._asked.append((json.dumps([what, *values]) + "\n", done))
        self._go_on()

    def _go_on(self) -> None:
        if not self._asked or self._asked_at is not None:
            return
        order, _ = self._asked[0]
        # Before it is sent: a lease is renewed no earlier than this.
        self._asked_at = time.monotonic()
        try:
            if not self._pid:
                self._start()
            # It reads nothing while it is asked nothing, and a pipe takes what one order is.
            write_all(self._orders, order.encode())
        except OSError as error:
            why = f"the process that asks etcd cannot run ({error.strerror})"
            self._waiting.alarm((id(self), "failed"), time.monotonic(), lambda: self._end(why))

    def _start(self) -> None:
        from fleetrun.session import etcdprocess

        theirs, self._orders = os.pipe2(os.O_CLOEXEC)
        self._answers, answers = os.pipe2(os.O_CLOEXEC)
        words = etcdprocess.line(
            self._endpoints,
            self._name,
            launcher=os.getpid(),
            timeout_s=self._timeout_s,
            is_secure=self._is_secure,
        )
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                words,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs, 0),
                    (os.POSIX_SPAWN_DUP2, answers, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0),
                ],
                # Ctrl-C is not for it, but in our session nobody takes it for a part of the job.
                setpgroup=0,
                setsigmask=(),
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        finally:
            os.close(theirs)
            os.close(answers)
            if not self._pid:
                self._forget()
        self._read = b""
        self._waiting.watch(self._answers, self._hear)

    def _hear(self) -> None:
        part = os.read(self._answers, _CHUNK)
        if not part:
            self._end("the process that asks etcd has ended")
            return
        self._read += part
        line, newline, rest = self._read.partition(b"\n")
        if newline:
            self._read = rest
            said = json.loads(line)
            trouble = said.get("refused") or said.get("trouble") or ""
            self._answer(said.get("value"), trouble, is_refused="refused" in said)

    def _answer(self, value: object, trouble: str = "", *, is_refused: bool = False) -> None:
        if self._asked_at is None:
            return
        answer = StoreAnswer(self._asked_at, value, trouble, is_refused)
        _, done = self._asked.popleft()
        self._asked_at = None
        done(answer)
        self._go_on()

    def _end(self, why: str) -> None:
        """Answer that the process has ended; the next question starts another one."""
        self._stop()
        self._answer(None, why)

    def _stop(self) -> None:
        if self._pid:
            self._waiting.unwatch(self._answers)
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            # The supervisor, which reaps orphans, may be faster.
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0
        self._forget()

    def _forget(self) -> None:
        for fd in (self._orders, self._answers):
            if fd >= 0:
                os.close(fd)
        self._orders = self._answers = -1

    def close(self) -> None:
        """Ask no more; nothing is called any more."""
        self._waiting.alarm((id(self), "failed"), None, self._go_on)
        self._asked.clear()
        self._asked_at = None
        self._stop()
