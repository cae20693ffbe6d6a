"""Processes that start when others listen: trainers wait for their servers, but not for ever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.records.names import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import Endpoint, LaunchPlan
    from fleetrun.run.listening import Listening
    from fleetrun.run.loop import Loop

# Those that somebody starts on other hosts may take longer.
_PATIENCE_S = 30.0
_PATIENCE_ELSEWHERE_S = 300.0
# After this many seconds, say for whom.
_REMARK_S = 5.0


class Awaiting:
    """Calls READY with a process and its attempt when those whom it needs listen.

    IS_ALIVE says whether a process of the plan runs: who has ended is not waited for.
    """

    def __init__(
        self,
        loop: Loop,
        say: Callable[[str], None],
        *,
        is_alive: Callable[[int], bool],
        ready: Callable[[int, int], None],
    ) -> None:
        self._loop = loop
        self._say = say
        self._is_alive = is_alive
        self._ready = ready
        self._listening: Listening | None = None
        # What already listened in this attempt.
        self._heard: tuple[int, frozenset[tuple[Endpoint, ...]]] = (0, frozenset())

    def begin(self, plan: LaunchPlan, process: int, attempt: int) -> None:
        """Let PROCESS of PLAN wait until those whom it needs listen."""
        from fleetrun.run.listening import Listening  # noqa: PLC0415 - only with servers

        wanted = plan.processes[process].awaits
        heard = self._heard[1] if self._heard[0] == attempt else frozenset()
        began = time.monotonic()
        own = {
            spec.rank.endpoint: place
            for place, spec in enumerate(plan.processes)
            if spec.rank is not None
        }
        ours = {endpoint.host for endpoint in own}
        is_here = all(endpoint.host in ours for group in wanted for endpoint in group)
        patience_s = _PATIENCE_S if is_here else _PATIENCE_ELSEWHERE_S

        def go_on() -> None:
            self._heard = (attempt, heard | frozenset(wanted))
            self.stop()
            self._ready(process, attempt)

        def is_gone(endpoint: Endpoint) -> bool:
            return endpoint in own and not self._is_alive(own[endpoint])

        def remark() -> None:
            self._say(f"Waiting up to {patience_s:.0f} s for {self._silent(plan)} to listen.")
            self._loop.alarm("patience", began + patience_s, give_up)

        def give_up() -> None:
            self._say(
                f"{self._silent(plan)} did not listen within {patience_s:.0f} s; the others start "
                "all the same."
            )
            go_on()

        missing = [group for group in wanted if group not in heard]
        if not missing:
            self._ready(process, attempt)
            return
        self._listening = Listening(missing, waiting=self._loop, is_gone=is_gone, done=go_on)
        self._loop.alarm("patience", began + _REMARK_S, remark)
        self._loop.alarm("listening", began, self._listening.look)

    def _silent(self, plan: LaunchPlan) -> str:
        """Name those who are waited for."""
        silent = self._listening.silent if self._listening is not None else ()
        servers = [one for one in plan.ranks if one.role == "PSERVER"]
        names = {one.endpoint: f"server {one.rank} at {one.endpoint}" for one in servers}
        return listed([names.get(group[0], str(group[0])) for group in silent])

    def stop(self) -> None:
        """Wait for nobody any more."""
        if self._listening is not None:
            self._listening.stop()
            self._listening = None
            self._loop.alarm("patience", None, self.stop)
