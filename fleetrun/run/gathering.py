"""Gathering: finding the hosts of the next generation and its plan, without blocking."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from fleetrun.errors import FleetrunError
from fleetrun.model import LaunchPlan
from fleetrun.run.loop import Loop, LoopShare, Waiting

Answer: TypeAlias = Callable[[LaunchPlan | FleetrunError], None]

# When a terminal shows what is awaited, and how often that is logged afterwards.
_FIRST_S, _PROGRESS_S = 1.0, 10.0


class Gathering:
    """Plans each generation of a job; attempts are counted from 0."""

    # Set by the supervisor, for engines that must know whether this host can start before others
    # do. `prepare` prepares an attempt's plan or raises FleetrunError; `withdraw` undoes that.
    prepare: Callable[[LaunchPlan, int], None] = staticmethod(lambda *_: None)
    withdraw: Callable[[], None] = staticmethod(lambda: None)

    # Whether other hosts take this launcher's silence for a loss.
    is_shared = False

    @property
    def may_change(self) -> bool:
        """Whether hosts may come and go while the job runs."""
        return False

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:
        """Begin to gather for ATTEMPT; call ANSWER with the plan or the error.

        ANSWER may be called at once, or later from a callback of WAITING. This must not block, or
        signals and deadlines would have to wait. An exception raised here counts as an answer.
        """
        raise NotImplementedError

    def progress(self) -> str:
        """Return a line about what it waits for; empty: nothing."""
        return ""

    def cancel(self) -> None:
        """Stop; the answer is no longer needed."""


class AtOnce(Gathering):
    """Gathering without waiting: PLAN returns the plan of each attempt."""

    def __init__(self, plan: Callable[[int], LaunchPlan]) -> None:
        self._plan = plan

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:  # noqa: ARG002 - no need to wait
        """Answer."""
        answer(self._plan(attempt))


class Round:
    """One round of GATHERING, for ATTEMPT; calls ANSWERED once, unless it is ended before.

    What GATHERING raises, now or in a callback of LOOP, counts as an answer. LOG prints a
    line, PROGRESS one for a terminal.
    """

    def __init__(
        self,
        gathering: Gathering,
        attempt: int,
        loop: Loop,
        answered: Callable[[LaunchPlan | Exception], None],
        *,
        log: Callable[[str], None],
        progress: Callable[[str], None],
    ) -> None:
        self._gathering, self._answered, self._log = gathering, answered, log
        self._answers: list[LaunchPlan | Exception] = []
        self._is_over = False
        now = time.monotonic()
        self._share = LoopShare(loop, self._shielded)
        self._share.timer("round progress", now + _FIRST_S, partial(self._tell, progress))
        begin = partial(gathering.begin, attempt, self._share, self._answers.append)
        # Not at once: the caller has to know the round first.
        self._share.timer("round", now, begin)

    def _shielded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - what cannot be planned is a verdict
            self._answers.append(error)
        if self._answers and not self._is_over:
            # What fails from here on is not the gathering's fault.
            self._answered(self._answers[0])

    def _tell(self, log: Callable[[str], None]) -> None:
        if progress := self._gathering.progress():
            log(progress)
        at = time.monotonic() + _PROGRESS_S
        self._share.timer("round progress", at, partial(self._tell, self._log))

    def end(self) -> None:
        """Stop waiting; cancel the gathering unless it has answered."""
        if not self._is_over:
            self._is_over = True
            self._share.clear()
            if not self._answers:
                with suppress(Exception):
                    self._gathering.cancel()
