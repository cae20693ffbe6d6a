"""Processes that start once others listen: trainers wait for their servers, up to a timeout."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import time
from collections.abc import Callable, Container
from functools import partial

from fleetrun.model import Endpoint, LaunchPlan
from fleetrun.run.loop import Waiting
from fleetrun.run.tcpconnect import Link, TcpConnect, resolve
from fleetrun.rundir.names import listed

# Servers on other hosts, which somebody may start by hand, may take longer.
_TIMEOUT_S = 30.0
_REMOTE_TIMEOUT_S = 300.0
# When to print what it waits for.
_REMARK_S = 1.0
_PACE_S = 0.05
# After this, try less often: a slow disk, or a host that is started by hand.
_SLOWER_AFTER_S = 10.0
_SLOW_PACE_S = 0.5
# A firewall may drop packets; the kernel alone would retry for two minutes.
_UNANSWERED_S = 2.0


class Readiness:
    """Calls READY with a process and its attempt once the endpoints that it awaits listen.

    One of each group is enough. IS_ALIVE says whether a process of the plan runs; one that has
    ended is not waited for, nor are those that are GONE on other hosts. A listening process sees a
    connection that is closed at once.
    """

    def __init__(
        self,
        waiting: Waiting,
        log: Callable[[str], None],
        progress: Callable[[str], None],
        *,
        is_alive: Callable[[int], bool],
        gone: Container[Endpoint] = frozenset(),
        ready: Callable[[int, int], None],
    ) -> None:
        self._waiting = waiting
        self._log = log
        self._progress = progress
        self._is_alive = is_alive
        self._gone = gone
        self._ready = ready
        # The attempt, and the groups of endpoints that already listen in it.
        self._listening: tuple[int, frozenset[tuple[Endpoint, ...]]] = (0, frozenset())
        # Those that do not.
        self._silent: list[tuple[Endpoint, ...]] = []
        self._calls: dict[Endpoint, TcpConnect] = {}
        self._answered: set[Endpoint] = set()

    def begin(self, plan: LaunchPlan, process: int, attempt: int) -> None:
        """Let PROCESS of PLAN wait until the endpoints that it awaits listen."""
        self._process, self._attempt = process, attempt
        self._answered.clear()
        self._wanted = plan.processes[process].awaits
        if self._listening[0] != attempt:
            self._listening = attempt, frozenset()
        self._silent = [group for group in self._wanted if group not in self._listening[1]]
        if not self._silent:
            self._ready(process, attempt)
            return
        self._own = {
            spec.rank.endpoint: place
            for place, spec in enumerate(plan.processes)
            if spec.rank is not None
        }
        own_hosts = {endpoint.host for endpoint in self._own}
        is_here = all(endpoint.host in own_hosts for group in self._wanted for endpoint in group)
        timeout_s = _TIMEOUT_S if is_here else _REMOTE_TIMEOUT_S
        servers = [server for server in plan.ranks if server.role == "PSERVER"]
        names = {
            server.endpoint: f"server {server.rank} at {server.endpoint}" for server in servers
        }

        def silent() -> str:
            return listed([names.get(group[0], str(group[0])) for group in self._silent])

        def remark() -> None:
            self._progress(f"Waiting up to {timeout_s:.0f} s for {silent()} to listen.")
            self._waiting.timer("timeout", self._began + timeout_s, give_up)

        def give_up() -> None:
            why = f"did not listen within {timeout_s:.0f} s; the others start anyway."
            self._log(f"{silent()} {why}")
            self._proceed()

        self._began = time.monotonic()
        self._waiting.timer("timeout", self._began + _REMARK_S, remark)
        self._waiting.timer("listening", self._began, self._look)

    def stop(self) -> None:
        """Stop waiting."""
        for key in ("timeout", "listening"):
            self._waiting.timer(key, None, self.stop)
        for call in self._calls.values():
            call.close()
        self._calls.clear()

    def _proceed(self) -> None:
        self._listening = self._attempt, self._listening[1].union(self._wanted)
        self.stop()
        self._ready(self._process, self._attempt)

    def _look(self) -> None:
        """Try all endpoints that do not listen yet; try again later if any are left."""
        self._silent = [group for group in self._silent if not self._is_settled(group)]
        if not self._silent:
            self._proceed()
            return
        now = time.monotonic()
        pace = _PACE_S if now - self._began < _SLOWER_AFTER_S else _SLOW_PACE_S
        self._waiting.timer("listening", now + pace, self._look)

    def _is_settled(self, group: tuple[Endpoint, ...]) -> bool:
        # A process that has ended, such as a server that was not needed, will never listen.
        if any(map(self._is_gone, group)):
            return True
        for endpoint in group:
            self._call(endpoint)
        return not self._answered.isdisjoint(group)

    def _is_gone(self, endpoint: Endpoint) -> bool:
        own = self._own.get(endpoint)
        return endpoint in self._gone or (own is not None and not self._is_alive(own))

    def _call(self, endpoint: Endpoint) -> None:
        """Connect to ENDPOINT, unless that is under way; its name may be unknown as yet."""
        places = resolve(*endpoint) if endpoint not in self._calls else ()
        for place in [place for place in places if place.family == _socket.AF_INET][:1]:
            self._calls[endpoint] = TcpConnect(
                place, self._waiting, partial(self._called, endpoint), _UNANSWERED_S
            )

    def _called(self, endpoint: Endpoint, link: Link | None, _why_not: int) -> None:
        del self._calls[endpoint]
        if link is not None:
            link.socket.close()
            self._answered.add(endpoint)
            self._look()
