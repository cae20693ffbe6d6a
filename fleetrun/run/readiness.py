"""Processes that start once others listen: trainers wait for their servers, up to a timeout."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import time
from collections.abc import Callable

from fleetrun.model import Endpoint, LaunchPlan
from fleetrun.run.loop import Waiting, nothing
from fleetrun.rundir.names import listed

# Servers on other hosts, which somebody may start by hand, may take longer.
_TIMEOUT_S = 30.0
_REMOTE_TIMEOUT_S = 300.0
# When to print what it waits for.
_REMARK_S = 1.0
# How often to try; less often after a while: a slow disk, or a host that is started by hand.
_PACE_S, _SLOW_PACE_S, _SLOWER_AFTER_S = 0.05, 0.5, 10.0
# A firewall may drop packets; the kernel alone would try again ever more rarely.
_UNANSWERED_S = 2.0


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
        # Connections under way, and since when.
        self._calls: dict[Endpoint, tuple[_socket.socket, float]] = {}
        own_hosts = {spec.rank.endpoint.host for spec in plan.processes if spec.rank is not None}
        awaited = {end for spec in plan.processes for group in spec.awaits for end in group}
        is_here = all(endpoint.host in own_hosts for endpoint in awaited)
        self._timeout_s = _TIMEOUT_S if is_here else _REMOTE_TIMEOUT_S

    def begin(self, process: int) -> None:
        """Call READY with PROCESS once the endpoints that it awaits listen, or time is up."""
        began, has_told = time.monotonic(), False

        def poll() -> None:
            nonlocal has_told
            groups = self._plan.processes[process].awaits
            silent = [group for group in groups if not self._is_settled(group)]
            waited_s = time.monotonic() - began
            if waited_s > self._timeout_s and silent:
                why = f"did not listen within {self._timeout_s:.0f} s; the others start anyway."
                self._log(f"{self._names(silent)} {why}")
                self._settled.update(silent)
                silent = []
            if not silent:
                self.stop()
                self._ready(process)
                return
            if waited_s > _REMARK_S and not has_told:
                has_told = True
                names = self._names(silent)
                self._progress(f"Waiting up to {self._timeout_s:.0f} s for {names} to listen.")
            pace_s = _PACE_S if waited_s < _SLOWER_AFTER_S else _SLOW_PACE_S
            self._waiting.timer("readiness", time.monotonic() + pace_s, poll)

        poll()

    def stop(self) -> None:
        """Stop waiting."""
        self._waiting.timer("readiness", None, nothing)
        for call, _ in self._calls.values():
            call.close()
        self._calls.clear()

    def _names(self, groups: list[tuple[Endpoint, ...]]) -> str:
        servers = [server for server in self._plan.ranks if server.role == "PSERVER"]
        names = {
            server.endpoint: f"server {server.rank} at {server.endpoint}" for server in servers
        }
        return listed([names.get(group[0], str(group[0])) for group in groups])

    def _is_settled(self, group: tuple[Endpoint, ...]) -> bool:
        # A process that has ended, such as a server that was not needed, will never listen.
        if group in self._settled:
            return True
        answers = [self._is_gone(endpoint) or self._listens(endpoint) for endpoint in group]
        if any(answers):
            self._settled.add(group)
        return any(answers)

    def _listens(self, endpoint: Endpoint) -> bool:
        """Whether a connection to ENDPOINT is accepted; its name may be unknown as yet."""
        now = time.monotonic()
        call, since = self._calls.pop(endpoint, (None, now))
        if call is None or now - since > _UNANSWERED_S:
            if call is not None:
                call.close()
            call, since = _socket.socket(type=_socket.SOCK_STREAM | _socket.SOCK_CLOEXEC), now
            call.setblocking(False)  # noqa: FBT003 - socket has it so
        try:
            number = call.connect_ex(tuple(endpoint))
            if number in {errno.EINPROGRESS, errno.EALREADY}:
                self._calls[endpoint] = call, since
                return False
            # A caller that was given the very port that it calls reaches itself.
            is_open = number in {0, errno.EISCONN} and call.getsockname() != call.getpeername()
        except OSError:
            is_open = False
        call.close()
        return is_open
