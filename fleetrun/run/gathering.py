"""Gathering: finding the hosts of the next generation and its plan, without blocking."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from fleetrun.errors import FleetrunError, RendezvousError
from fleetrun.model import DEFAULTS, LaunchPlan
from fleetrun.run.loop import Loop, LoopShare, Waiting

Answer: TypeAlias = Callable[[LaunchPlan | FleetrunError], None]

_PROGRESS_S = 1.0


class Gathering:
    """Plans each generation of a job; attempts are counted from 0."""

    # Set by the supervisor, for engines that must know whether this host can start before others
    # do. `prepare` prepares an attempt's plan or raises FleetrunError; `withdraw` undoes that.
    prepare: Callable[[LaunchPlan, int], None] = staticmethod(lambda *_: None)
    withdraw: Callable[[], None] = staticmethod(lambda: None)

    # The job ends if there is no plan within this time.
    timeout_s: float = DEFAULTS["rdzv_timeout_s"]
    # Whether other hosts take this launcher's silence for a loss.
    is_shared = False
    # How often to log what it waits for; a terminal shows it once before that.
    progress_s = 10.0

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

    def missing(self) -> str:
        """Name what the answer waits for."""
        return "the hosts of the job"

    def progress(self, left_s: float) -> str:
        """Return a line about what it waits for, up to LEFT_S seconds from now; empty: nothing."""
        return f"Waiting up to {left_s:.0f} s for {self.missing()}."

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

    What GATHERING raises, now or in a callback of LOOP, counts as an answer; so does a
    RendezvousError when its time is up. LOG prints a line, PROGRESS one for a terminal.
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
        self._until = now + gathering.timeout_s
        self._share = LoopShare(loop, self._shielded)
        self._share.timer("round progress", now + _PROGRESS_S, partial(self._tell, progress))
        self._share.timer("round timeout", self._until, self._give_up)
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
        now = time.monotonic()
        progress = self._gathering.progress(self._until - now)
        if progress:
            log(progress)
        at = now + self._gathering.progress_s
        self._share.timer("round progress", at, partial(self._tell, self._log))

    def _give_up(self) -> None:
        why = f"{self._gathering.missing()} did not come within {self._gathering.timeout_s:g} s."
        with suppress(Exception):
            self._gathering.cancel()
        self._answers.append(RendezvousError(why))

    def end(self) -> None:
        """Stop waiting; cancel the gathering unless it has answered."""
        if not self._is_over:
            self._is_over = True
            self._share.clear()
            if not self._answers:
                with suppress(Exception):
                    self._gathering.cancel()
