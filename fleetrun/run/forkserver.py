"""The guard's end of the fork server: a process with Paddle imported, from which ranks are forked.

`inject/site/fork_server.py` is the other end. If it fails, ranks are started the ordinary way.
"""

from __future__ import annotations

import _socket
import os
import time

from fleetrun.records import variables
from fleetrun.run import children, framing, proc
from fleetrun.run.loop import poll
from fleetrun.typehints import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import LaunchPlan, ProcessSpec
    from fleetrun.run.children import Order

# The longest time that an answer may take on a machine that is busy or swaps.
_ANSWER_S = 20.0
# The pause between two looks whether who shall answer has been stopped.
_LOOK_S = 0.1
_LOST = "the waiting processes are gone"
# Padding, for ranks' environments longer than the server's own.
_ROOM = 16 * 1024
LOADING, READY, UNFIT = "loading", "ready", "unfit"
_MB = 1024 * 1024


class ServerState(NamedTuple):
    """Whether ranks can be forked, the server's own memory in bytes, or why not."""

    state: str
    own_bytes: int = 0
    why: str = ""

    def __str__(self) -> str:
        """Return it as a sentence."""
        if self.state != READY:
            return f"ranks cannot be forked: {self.why}."
        return (
            "ranks of another attempt are forked from a process that has imported Paddle; "
            f"it adds {self.own_bytes / _MB:.0f} MB to this host's memory."
        )


def forkable(plan: LaunchPlan) -> list[int]:
    """Return the processes of PLAN that can be forked: no wrapped command, and no other program."""
    return [process for process, spec in enumerate(plan.processes) if is_forkable(spec)]


def is_forkable(spec: ProcessSpec) -> bool:
    """Whether a process runs a Python script or module itself, as we start it."""
    return spec.argv[1:2] == ("-u",)


class Unable(Exception):
    """The rank cannot be forked; the argument says why."""


class ForkServer:
    """Starts a fork server with ORDER, which imports MODULES besides Paddle.

    It keeps COUNT forks parked; they are children of this process, ready to become ranks.
    """

    def __init__(self, order: Order, modules: Sequence[str], count: int) -> None:
        self._socket, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        number = theirs.fileno()
        os.set_inheritable(number, True)  # noqa: FBT003 - os has it so
        words = (str(number), str(os.getpid()), ",".join(modules), "-" * _ROOM)
        env = {**order.env, os.fsencode(variables.FORK_SERVER): ":".join(words).encode()}
        try:
            self._pid = children.start(order._replace(env=env))
        finally:
            theirs.close()
        self._count = count
        self._parked: dict[int, _socket.socket] = {}
        self._state = ServerState(LOADING)

    @property
    def pids(self) -> frozenset[int]:
        """Its processes, except those that have become ranks."""
        return frozenset((self._pid, *self._parked)) - {0}

    def state(self) -> ServerState:
        """Return how far the server has got; let it refill the parked forks."""
        try:
            if self._state.state == LOADING and poll(0.0, self._socket.fileno()):
                kind, value = _receive(self._socket, self._pid)[0]
                if kind == "unfit":
                    self._lose(value)
                else:
                    self._state = ServerState(READY, value)
            if self._state.state == READY and len(self._parked) < self._count:
                self._park(self._count - len(self._parked))
        except (OSError, EOFError):
            self._lose(_LOST)
        return self._state

    def fork(self, order: Order) -> int:
        """Let a parked child become the rank of ORDER and return its id; raises Unable."""
        if not self._parked and self.state().state != READY:
            raise Unable(self._state.why or "Paddle is not imported yet")
        request = {
            "argv": order.argv,
            "env": dict(order.env),
            "takes_stdin": order.takes_our_stdin,
            "cpus": tuple(order.cpus or os.sched_getaffinity(0)),
        }
        while self._parked:
            pid, link = next(iter(self._parked.items()))
            try:
                _send(link, request, order.output, order.errors)
                (kind, why), _ = _receive(link, pid)
            except (OSError, EOFError):
                # It was killed or stopped, or is too slow.
                self._forget(pid)
                continue
            if kind != "forked":
                raise Unable(why)
            self._parked.pop(pid).close()
            return pid
        raise Unable(_LOST)

    def _park(self, count: int) -> None:
        _send(self._socket, count)
        for _ in range(count):
            (kind, pid), fds = _receive(self._socket, self._pid)
            if kind != "parked":
                # The server has failed, and says why.
                self._lose(str(pid))
                return
            link = _socket.socket(fileno=fds[0])
            if pid:
                self._parked[pid] = link
            else:
                # No more processes are allowed.
                link.close()

    def _forget(self, pid: int) -> None:
        self._parked.pop(pid).close()
        # Not reaped before, so its id is its own.
        _kill(pid)

    def _lose(self, why: str) -> None:
        """Kill a server that is of no use; its parked forks remain."""
        self._state = ServerState(UNFIT, why=why)
        self._socket.close()
        _kill(self._pid)
        # The id may be reused from now on.
        self._pid = 0


def _kill(pid: int) -> None:
    children.kill_child(pid)
    os.waitpid(pid, 0)


def _send(to: _socket.socket, message: Any, *fds: int) -> None:  # noqa: ANN401 - what marshal takes
    whole = framing.pack(message)
    sent = framing.send(to, whole, fds)
    if sent < len(whole):
        # Sending zero bytes would fail if the other end has answered and gone.
        to.sendall(whole[sent:])


def _receive(link: _socket.socket, pid: int) -> tuple[tuple[str, Any], list[int]]:
    """Return the message of process PID; raises EOFError if it does not answer or is stopped."""
    deadline = time.monotonic() + _ANSWER_S

    def is_readable() -> bool:
        while not poll(_LOOK_S, link.fileno()):
            status = proc.stat(pid)
            if status is None or status.state == "T" or time.monotonic() > deadline:
                return False
        return True

    return framing.receive(link, is_readable)
