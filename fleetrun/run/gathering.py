"""Who takes part in the next generation, and its plan: asked for, and answered when it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.errors import FleetrunError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from fleetrun.model import LaunchPlan
    from fleetrun.run.loop import Waiting

    Answer: TypeAlias = Callable[[LaunchPlan | FleetrunError], None]

# So long may hosts take that are started by hand or by a queue.
PATIENCE_S = 600.0


class Gathering:
    """Plans each generation of a job; attempts are counted from 0."""

    # The job ends when there is no answer within this time.
    patience_s = PATIENCE_S

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:
        """Begin to gather for ATTEMPT, and give ANSWER a plan, or why there can be none.

        The answer may come at once, or later, from something that WAITING calls. Nothing here may
        block: signals and deadlines wait for it. What is raised is an answer, too.
        """
        raise NotImplementedError

    def missing(self) -> str:
        """Name what the answer waits for."""
        return "the hosts of the job"

    def cancel(self) -> None:
        """Stop; nobody waits for the answer any more."""


class AtOnce(Gathering):
    """Knows everything from the start: PLAN answers for each attempt."""

    def __init__(self, plan: Callable[[int], LaunchPlan]) -> None:
        self._plan = plan

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:  # noqa: ARG002 - no need to wait
        """Answer."""
        try:
            planned: LaunchPlan | FleetrunError = self._plan(attempt)
        except FleetrunError as error:
            planned = error
        answer(planned)
