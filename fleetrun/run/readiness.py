"""Processes that start once others listen: trainers wait for their servers, up to a timeout."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

from fleetrun.model import Endpoint, LaunchPlan
from fleetrun.run.loop import Waiting, nothing
from fleetrun.rundir.names import listed

# Servers on other hosts, which somebody may start by hand, may take longer.
_TIMEOUT_S, _REMOTE_TIMEOUT_S = 30.0, 300.0
# When to print what it waits for, how often to try, and for how long: a host that does not answer
# holds up the launcher for that long.
_REMARK_S, _PACE_S, _CALL_S = 1.0, 0.1, 0.3


class Readiness:
    """Finds out for processes of PLAN whether the endpoints that they await listen.

    One of each group is enough. IS_GONE says of which process it is known that it will never
    listen. READY is called with the process that may start. A listening process sees a connection
    that is closed at once.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        waiting: Waiting,
        *,
        log: Callable[[str], None],
        progress: Callable[[str], None],
        is_gone: Callable[[Endpoint], bool],
        ready: Callable[[int], None],
    ) -> None:
        self._plan, self._waiting = plan, waiting
        self._log, self._progress = log, progress
        self._is_gone, self._ready = is_gone, ready
        # The groups that nobody waits for any more.
        self._settled: set[tuple[Endpoint, ...]] = set()
        own_hosts = {spec.rank.endpoint.host for spec in plan.processes if spec.rank is not None}
        awaited = {end for spec in plan.processes for group in spec.awaits for end in group}
        is_here = all(endpoint.host in own_hosts for endpoint in awaited)
        self._timeout_s = _TIMEOUT_S if is_here else _REMOTE_TIMEOUT_S

    def begin(self, process: int) -> None:
        """Call READY with PROCESS once the endpoints that it awaits listen, or time is up."""
        self._poll(process, time.monotonic(), has_told=False)

    def _poll(self, process: int, began: float, *, has_told: bool) -> None:
        now = time.monotonic()
        groups = set(self._plan.processes[process].awaits) - self._settled
        # A process that has ended, such as a server that was not needed, will never listen.
        for group in groups:
            if any(self._is_gone(end) or _listens(end) for end in group):
                self._settled.add(group)
        silent = sorted(groups - self._settled)
        if silent and now - began > self._timeout_s:
            why = f"did not listen within {self._timeout_s:.0f} s; the others start anyway."
            self._log(f"{self._names(silent)} {why}")
            self._settled.update(silent)
            silent = []
        if not silent:
            self.stop()
            self._ready(process)
            return
        if now - began > _REMARK_S and not has_told:
            has_told = True
            names = self._names(silent)
            self._progress(f"Waiting up to {self._timeout_s:.0f} s for {names} to listen.")
        again = partial(self._poll, process, began, has_told=has_told)
        self._waiting.timer("readiness", now + _PACE_S, again)

    def stop(self) -> None:
        """Stop waiting."""
        self._waiting.timer("readiness", None, nothing)

    def _names(self, groups: list[tuple[Endpoint, ...]]) -> str:
        servers = [server for server in self._plan.ranks if server.role == "PSERVER"]
        names = {
            server.endpoint: f"server {server.rank} at {server.endpoint}" for server in servers
        }
        return listed([names.get(group[0], str(group[0])) for group in groups])


def _listens(endpoint: Endpoint) -> bool:
    """Whether a connection to ENDPOINT is accepted; its name may be unknown as yet."""
    try:
        with socket.create_connection(endpoint, _CALL_S) as call:
            # A caller that was given the very port that it calls reaches itself.
            return bool(call.getsockname() != call.getpeername())
    except OSError:
        return False
