"""Processes that start once others listen: trainers wait for their servers, up to a timeout."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.records.names import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from fleetrun.model import Endpoint, LaunchPlan
    from fleetrun.run.loop import Loop
    from fleetrun.run.portwait import PortWait

# Servers on other hosts, which somebody may start by hand, may take longer.
_TIMEOUT_S = 30.0
_REMOTE_TIMEOUT_S = 300.0
# When to print what it waits for.
_REMARK_S = 1.0


class Readiness:
    """Calls READY with a process and its attempt once the endpoints that it awaits listen.

    IS_ALIVE says whether a process of the plan runs; one that has ended is not waited for, nor are
    those that are GONE on other hosts.
    """

    def __init__(
        self,
        loop: Loop,
        log: Callable[[str], None],
        progress: Callable[[str], None],
        *,
        is_alive: Callable[[int], bool],
        gone: Container[Endpoint] = frozenset(),
        ready: Callable[[int, int], None],
    ) -> None:
        self._loop = loop
        self._log = log
        self._progress = progress
        self._is_alive = is_alive
        self._gone = gone
        self._ready = ready
        self._ports: PortWait | None = None
        # The attempt, and the groups of endpoints that already listen in it.
        self._listening: tuple[int, frozenset[tuple[Endpoint, ...]]] = (0, frozenset())

    def begin(self, plan: LaunchPlan, process: int, attempt: int) -> None:
        """Let PROCESS of PLAN wait until the endpoints that it awaits listen."""
        from fleetrun.run.portwait import PortWait  # only with servers

        wanted = plan.processes[process].awaits
        listening = self._listening[1] if self._listening[0] == attempt else frozenset()
        began = time.monotonic()
        own = {
            spec.rank.endpoint: place
            for place, spec in enumerate(plan.processes)
            if spec.rank is not None
        }
        own_hosts = {endpoint.host for endpoint in own}
        is_here = all(endpoint.host in own_hosts for group in wanted for endpoint in group)
        timeout_s = _TIMEOUT_S if is_here else _REMOTE_TIMEOUT_S

        def proceed() -> None:
            self._listening = (attempt, listening | frozenset(wanted))
            self.stop()
            self._ready(process, attempt)

        def is_gone(endpoint: Endpoint) -> bool:
            return endpoint in self._gone or (endpoint in own and not self._is_alive(own[endpoint]))

        def remark() -> None:
            self._progress(f"Waiting up to {timeout_s:.0f} s for {self._silent(plan)} to listen.")
            self._loop.timer("timeout", began + timeout_s, give_up)

        def give_up() -> None:
            self._log(
                f"{self._silent(plan)} did not listen within {timeout_s:.0f} s; the others start "
                "anyway."
            )
            proceed()

        missing = [group for group in wanted if group not in listening]
        if not missing:
            self._ready(process, attempt)
            return
        self._ports = PortWait(missing, waiting=self._loop, is_gone=is_gone, done=proceed)
        self._loop.timer("timeout", began + _REMARK_S, remark)
        self._loop.timer("listening", began, self._ports.look)

    def _silent(self, plan: LaunchPlan) -> str:
        """Name the servers that do not listen yet."""
        silent = self._ports.silent if self._ports is not None else ()
        servers = [one for one in plan.ranks if one.role == "PSERVER"]
        names = {one.endpoint: f"server {one.rank} at {one.endpoint}" for one in servers}
        return listed([names.get(group[0], str(group[0])) for group in silent])

    def stop(self) -> None:
        """Stop waiting."""
        if self._ports is not None:
            self._ports.stop()
            self._ports = None
            self._loop.timer("timeout", None, self.stop)
