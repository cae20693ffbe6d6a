"""Gathering: finding the hosts of the next generation and its plan, without blocking."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fleetrun.errors import FleetrunError
from fleetrun.model import LaunchPlan
from fleetrun.run.loop import Waiting

Answer: TypeAlias = Callable[[LaunchPlan | FleetrunError], None]


class Gathering:
    """Plans each generation of a job by PLAN; attempts are counted from 0."""

    # Set by the supervisor, for engines that must know whether this host can start before others
    # do. `prepare` prepares an attempt's plan or raises FleetrunError; `withdraw` undoes that.
    prepare: Callable[[LaunchPlan, int], None] = staticmethod(lambda *_: None)
    withdraw: Callable[[], None] = staticmethod(lambda: None)
    # Whether other hosts take this launcher's silence for a loss.
    is_shared = False

    def __init__(self, plan: Callable[[int], LaunchPlan]) -> None:
        self._plan = plan

    @property
    def may_change(self) -> bool:
        """Whether hosts may come and go while the job runs."""
        return False

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:  # noqa: ARG002 - no need to wait
        """Begin to gather for ATTEMPT; call ANSWER with the plan or the error.

        ANSWER may be called at once, or later from a callback of WAITING. This must not block, or
        signals and deadlines would have to wait. An exception raised here counts as an answer.
        """
        answer(self._plan(attempt))

    def progress(self) -> str:
        """Return a line about what it waits for; empty: nothing."""
        return ""

    def cancel(self) -> None:
        """Stop; the answer is no longer needed."""
