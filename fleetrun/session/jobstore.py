"""Asks etcd on behalf of a launcher: each request is a child that is stopped and killed with it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting, nothing

if TYPE_CHECKING:
    from fleetrun.session.jobrecord import StoreAddress


class StoreAnswer(NamedTuple):
    """The answer of etcd to a request made at ASKED_AT (monotonic), or why there is none."""

    asked_at: float
    value: Any = None
    trouble: str = ""


class JobStore:
    """Asks the etcd at ADDRESS about a job, one request at a time."""

    def __init__(self, address: StoreAddress, waiting: Waiting) -> None:
        # The one that answered last is asked first.
        self._address = address
        self._waiting = waiting
        self._requests: deque[tuple[str, tuple[object, ...], Callable[[StoreAnswer], None]]] = (
            deque()
        )
        # The current request, and when it was made; None: there is none.
        self._call: IsolatedCall | None = None
        self._asked_at: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._requests)

    def elsewhere(self, waiting: Waiting) -> JobStore:
        """Return a store of the same etcd, for another process."""
        return JobStore(self._address, waiting)

    def ask(self, done: Callable[[StoreAnswer], None], method: str, *values: object) -> None:
        """Call METHOD of the client; DONE is called with the answer, from the loop."""
        self._requests.append((method, values, done))
        self._go_on()

    def _go_on(self) -> None:
        if not self._requests or self._asked_at is not None:
            return
        from fleetrun.session import etcd  # slow to import

        method, values, _ = self._requests[0]
        client = etcd.Client(self._address)
        # Taken before it is sent: a lease is renewed no earlier than this.
        self._asked_at = time.monotonic()
        try:
            call = self._call = IsolatedCall(partial(etcd.answer, client, method, values))
        except OSError as error:
            why = f"no process can be started to ask etcd ({error.strerror})"
            end = partial(self._end, None, why)
            self._waiting.timer((id(self), "failed"), self._asked_at, end)
            return
        call.watch(self._waiting, self._answered)

    def _answered(self, result: CallResult) -> None:
        self._call = None
        value, trouble = None, result.trouble
        if not trouble:
            value, trouble, members = cast("tuple[Any, str, tuple[Any, ...]]", result.value)
            self._address = self._address._replace(endpoints=members)
        self._end(value, trouble)

    def _end(self, value: object, trouble: str) -> None:
        _, _, done = self._requests.popleft()
        answer = StoreAnswer(self._asked_at or 0.0, value, trouble)
        self._asked_at = None
        done(answer)
        self._go_on()

    def close(self) -> None:
        """Stop; no callback follows."""
        self._waiting.timer((id(self), "failed"), None, nothing)
        self._requests.clear()
        self._asked_at = None
        call, self._call = self._call, None
        if call is not None:
            with suppress(OSError):
                call.abandon()
