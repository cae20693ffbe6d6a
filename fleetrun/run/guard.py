"""The guard: a small process between the launcher and the ranks that starts, reaps and kills them.

The guard is the parent of all ranks and a child subreaper, so every descendant of a rank descends
from it, whatever its session and environment. If the launcher is killed (`kill -9`), the guard
kills them all. If the guard is killed, its children become the launcher's, which takes over its
work, and a watcher process its last duty: if the launcher is then killed, too, it kills all
processes with the job's marker in their environment.
"""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import os
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, Protocol

from fleetrun.run import children, framing, jobprocesses, libc
from fleetrun.run.children import Ended, Order, Swept, WaitStatus
from fleetrun.run.descriptors import FileLimit
from fleetrun.run.loop import READABLE, WRITABLE, Loop, Waiting, nothing, poll
from fleetrun.run.terminal import TerminalSettings


class LossTeller(Protocol):
    """Tells the coordinator of this launcher's death."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether there is nothing more to tell."""

    def ended(self) -> None:
        """Tell that no rank is left."""


# A process that does not die by then waits for a device, and the guard gives up on it.
_SECONDS = 30.0
# The same where a launcher that was stopped may continue and want an answer.
_STUCK_S = 1.0
# How often to check whether terminated ranks have ended, and how long to try to tell other hosts.
_ENDED_S, _TOLD_S = 0.05, 3.0
# Orphans are reaped this long after SIGCHLD, when the exits of ranks have been handled.
_ORPHANS_S = 0.1
# A guard that was stopped (`kill -STOP`) is sent SIGCONT after this long.
_CONTINUE_S = 1.0
# What a sweep may take beyond its own time limit.
_MARGIN_S = 5.0


class _GuardLost(Exception):
    """The guard was killed; if `was_received`, it may have carried out the request."""

    def __init__(self, *, was_received: bool) -> None:
        super().__init__()
        self.was_received = was_received


class Guard:
    """The launcher's end of the connection to the guard process."""

    def __init__(
        self,
        marker: str,
        files: FileLimit,
        settings: TerminalSettings | None = None,
        *,
        grace_s: float = 0.0,
        tell_loss: Callable[[Waiting, tuple[str, int]], LossTeller] | None = None,
    ) -> None:
        self._files = files
        # If the launcher is killed: how long ranks may take to end, and who tells other hosts.
        self._grace_s = grace_s
        self._tell_loss = tell_loss
        self._socket, guard_socket = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._marker = os.fsencode(marker)
        # The environment of the first process: of others, only what differs from it is sent.
        self._env: Mapping[bytes, bytes] = {}
        self._is_dismissed = False
        # For how long at most the guard sweeps, if its answer is still to come; and the answer.
        self._sweeping_s: float | None = None
        self._swept: Any = None
        self._watcher: int | None = None
        self._settings = settings
        # The launcher's group has the process that reads its terminal, and unrelated ones.
        self._shared = os.getpgrp()
        launcher = os.getpid()
        try:
            self.pid = _fork(lambda: self._be_guard(launcher, guard_socket))
        finally:
            guard_socket.close()
        self._socket.setblocking(False)  # noqa: FBT003 - socket has it so
        self._has_ended = False

    def start(self, order: Order) -> int:
        """Start a process and return its id; raises OSError or ValueError."""
        changed = dict(order.env.items() - self._env.items())
        absent = tuple(self._env.keys() - order.env.keys())
        brief = tuple(order._replace(env=changed))
        try:
            self._ask("start", brief, absent, files=(order.output, order.errors))
            self._env = self._env or order.env
            kind, value = self._answer()
        except _GuardLost as lost:
            if lost.was_received:
                # It may be running, and a second one must not run beside it.
                pid = children.adopted(order)
                if pid is None:
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)) from None
                return pid
            self._files.restore()
            try:
                return children.start(order)
            finally:
                self._files.lift()
        if kind == "refused":
            raise OSError(value, os.strerror(value))
        if kind == "impossible":
            raise ValueError(value)
        return int(value)

    def end(self, pids: Sequence[int], sweep_s: float | None = None) -> list[Ended]:
        """Reap PIDS, which have ended, and kill what is left of their process groups.

        Up to the first that has failed: before the others are examined, they are to be signalled.
        SWEEP_S: nothing is started any more once all have succeeded. If none is left, the guard
        goes on, sweeps for at most so long and ends, and `sweep` has only to fetch the answer.
        """
        try:
            self._ask("end", pids, sweep_s)
            statuses = [children.WaitStatus(*how) for how in self._answer()]
        except _GuardLost:
            return children.end(pids)
        ended = self._ended(pids, statuses)
        if not self._has_ended:
            self._sweeping_s = sweep_s
            self._is_dismissed = sweep_s is not None and statuses[-1] == children.WELL
        return ended

    def end_alone(self, pids: Sequence[int]) -> dict[int, Ended]:
        """Reap those of PIDS, which have ended, whose process groups have no living member."""
        try:
            self._ask("end alone", pids)
            alone, *hows = self._answer()
        except _GuardLost:
            known = children.alone(pids)
            return dict(zip(known, children.end([*known], [*known.values()]), strict=True))
        statuses = [children.WaitStatus(*how) for how in hows]
        return dict(zip(alone, self._ended(alone, statuses), strict=True))

    def _ended(self, pids: Sequence[int], statuses: Sequence[WaitStatus]) -> list[Ended]:
        """Return how PIDS have ended with STATUSES, which the guard reaps now."""
        try:
            parts = self._answer()
        except _GuardLost:
            # The guard was killed between the two parts of its answer.
            return children.end(pids, statuses)
        return [
            children.Ended(status, peak, tuple(map(children.Leftover._make, left)))
            for status, (peak, left) in zip(statuses, parts, strict=True)
        ]

    def left_in(self, group: int) -> int | None:
        """Return a living member of GROUP, whose leader has ended; None if there is none."""
        try:
            self._ask("left", group)
            (pid,) = self._answer()
        except _GuardLost:
            return children.left_in(group)
        return pid if isinstance(pid, int) else None

    def sweep(self, ranks: AbstractSet[int], seconds: float) -> Swept:
        """Kill everything that outlived its rank, except RANKS themselves."""
        spared = ranks | self.pids
        try:
            self._fetch_swept()
            swept, self._swept = self._swept, None
            if swept is None:
                self._ask("sweep", sorted(ranks), seconds)
            # The launcher's own children are those that it runs itself, such as git.
            stuck_here = children.sweep(spared, seconds).stuck
            stuck, left = swept or self._answer(seconds + _MARGIN_S)
        except _GuardLost:
            return children.sweep(spared, seconds)
        return children.Swept((*stuck, *stuck_here), tuple(map(children.Leftover._make, left)))

    def kill_at(self, at: float | None) -> None:
        """Have the guard kill all ranks at AT (monotonic seconds); a later call replaces AT.

        Other hosts go on without a launcher that is stopped, and its ranks must be gone by then.
        """
        with suppress(_GuardLost):
            self._ask("kill at", at)

    def tell_at(self, target: tuple[str, int]) -> None:
        """Have the guard tell the coordinator at TARGET if the launcher is killed."""
        with suppress(_GuardLost):
            self._ask("tell at", tuple(target))

    def retire(self) -> None:
        """Begin to end the guard, which has no ranks any more; `dismiss` waits for its end."""
        self._is_dismissed = True
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def dismiss(self) -> None:
        """End the guard; its surviving children become the launcher's."""
        self._is_dismissed = True
        self._take_over()
        if self._watcher is not None:
            os.kill(self._watcher, signal.SIGKILL)
            os.waitpid(self._watcher, 0)
        self._socket.close()

    @property
    def pids(self) -> frozenset[int]:
        """The id of the guard, or of the watcher that replaced it."""
        if not self._has_ended and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._on_end()
        pid = self._watcher if self._has_ended else self.pid
        return frozenset() if pid is None else frozenset((pid,))

    def _take_over(self) -> None:
        """Kill the guard, so that its children become the launcher's."""
        if not self._has_ended:
            # It is not reaped yet, so its id is valid even if it has just been killed.
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._on_end()

    def _on_end(self) -> None:
        self._has_ended = True
        if not self._is_dismissed:
            launcher = os.getpid()
            # There is no watcher if no more processes are allowed.
            with suppress(OSError):
                self._watcher = _fork(lambda: self._be_watcher(launcher))

    def _fetch_swept(self) -> None:
        """Fetch what came of the sweep that `end` asked for, if it did."""
        seconds, self._sweeping_s = self._sweeping_s, None
        if seconds is not None:
            self._swept = self._answer(seconds + _MARGIN_S)

    def _ask(self, *order: Any, files: tuple[int, ...] = ()) -> None:  # noqa: ANN401 - each order's own
        # The answer to the last request comes first.
        with suppress(_GuardLost):
            self._fetch_swept()
        if self._has_ended:
            raise _GuardLost(was_received=False)
        unsent = memoryview(framing.pack(order))
        while unsent:
            try:
                unsent = unsent[framing.send(self._socket, unsent, files) :]
            except BlockingIOError:
                self._is_ready(WRITABLE)
                continue
            except ConnectionError:
                self._take_over()
                raise _GuardLost(was_received=False) from None
            files = ()

    def _answer(self, seconds: float | None = None) -> Any:  # noqa: ANN401 - each order's own
        """Return the guard's answer; take over if it has ended or does not answer in SECONDS."""
        until = None if seconds is None else time.monotonic() + seconds
        try:
            return framing.receive(self._socket, lambda: self._is_ready(READABLE, until))[0]
        except (EOFError, ConnectionError):
            self._take_over()
            raise _GuardLost(was_received=True) from None

    def _is_ready(self, event: int, until: float | None = None) -> bool:
        """Wait until the socket is ready for EVENT, at most UNTIL; continue a stopped guard."""
        while until is None or time.monotonic() <= until:
            if poll(_CONTINUE_S, self._socket.fileno(), mask=event):
                return True
            if not self._has_ended:
                os.kill(self.pid, signal.SIGCONT)
        return False

    # In the guard process ------------------------------------------------------------------------

    def _be_guard(self, launcher: int, orders: _socket.socket) -> None:
        """Serve the launcher; when it has ended, kill all processes of the job."""
        woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # A process that reads the terminal has to be started from the terminal's session.
        has_terminal = self._settings is not None
        own = (orders.fileno(), woken, waker)
        _detach(launcher, waker, own, has_terminal=has_terminal)
        self._files.restore()
        children.become_subreaper()
        guarded = _end_of(launcher)
        if guarded is not None:
            service = _Service(orders, guarded, woken)
            service.run()
            self._end_ranks(service, woken)
            return
        children.sweep(frozenset(), _SECONDS, is_guard=True)
        # This includes processes that the launcher started beside the ranks.
        self._kill_by_marker()

    def _end_ranks(self, service: _Service, woken: int) -> None:
        """End the ranks of a killed launcher (TERM, grace, KILL) and tell the other hosts.

        The grace ends before the other hosts may start again without this one.
        """
        loop = Loop()
        teller: LossTeller | None = None
        if self._tell_loss is not None and service.target is not None:
            # Ending the ranks matters more, whatever goes wrong here.
            with suppress(Exception):
                teller = self._tell_loss(loop, service.target)
        until = time.monotonic() + self._grace_s
        if service.kill_at is not None:
            until = min(until, service.kill_at)
        requests = [children.EndRequest(pid) for pid in service.ranks]

        def on_end() -> None:
            _drain(woken)
            for request in requests:
                request.repeat()

        def insist() -> None:
            for request in requests:
                request.insist()

        on_end()
        loop.watch(woken, on_end)
        loop.timer("rest", until - self._grace_s / 10, insist)
        while time.monotonic() < until and children.any_left(service.ranks):
            _turn(loop, until)
        swept = children.sweep(frozenset(), _SECONDS, is_guard=True)
        is_over = self._kill_by_marker() and not swept.stuck
        if teller is None or not is_over:
            return
        teller.ended()
        until = time.monotonic() + _TOLD_S
        while time.monotonic() < until and not teller.is_done:
            _turn(loop, until)

    def _be_watcher(self, launcher: int) -> None:
        """Wait for the end of a launcher without a guard; then kill processes with its marker."""
        _detach(launcher, -1, (), has_terminal=self._settings is not None)
        guarded = _end_of(launcher)
        if guarded is not None:
            poll(None, guarded)
        self._kill_by_marker()

    def _kill_by_marker(self) -> bool:
        """Kill every process with the job's marker; return whether none is left."""
        is_over = jobprocesses.kill_all(self._marker, _SECONDS, self._shared)
        if self._settings is not None:
            # We are in the terminal's background.
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            self._settings.restore()
        return is_over


def _turn(loop: Loop, until: float) -> None:
    """Run one turn of LOOP: short, and not beyond UNTIL."""
    loop.timer("turn", min(until, time.monotonic() + _ENDED_S), nothing)
    # Ending the ranks matters more, whatever goes wrong here.
    with suppress(Exception):
        loop.turn()


def _fork(live: Callable[[], None]) -> int:
    """Fork a child that runs LIVE, with all signals blocked at first; return its id."""
    # Otherwise a signal could reach both through the launcher's wake-up descriptor.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            try:
                live()
            finally:
                # The child must never return into the launcher's code.
                os._exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _end_of(launcher: int) -> int | None:
    """Return a pidfd of LAUNCHER, the parent; None if it has ended already."""
    try:
        guarded = os.pidfd_open(launcher)
    except ProcessLookupError:
        return None
    # If the parent is another one now, the id may have been reused.
    return guarded if os.getppid() == launcher else None


def _detach(launcher: int, waker: int, own: tuple[int, ...], *, has_terminal: bool) -> None:
    """Separate this process from the launcher: signals, name, descriptors and session.

    If a rank HAS_TERMINAL, it stays in the session.
    """
    if has_terminal:
        os.setpgid(0, 0)
    else:
        os.setsid()
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Caught and not ignored: an ignored signal would be inherited by the ranks.
        if signal.getsignal(signum) != signal.SIG_IGN or signum == signal.SIGCHLD:
            signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # If both were stopped (`kill -STOP`) and the launcher is killed, only this continues the guard.
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGCONT)
    # `pkill -9 -f fleetrun` or `-f train.py` must hit the launcher and not the guard.
    libc.prctl(libc.PR_SET_NAME, b"rank-guard")
    libc.set_command(b"rank-guard of %d" % launcher)
    _close_all_but(own)


def _close_all_but(own: tuple[int, ...]) -> None:
    """Close the launcher's own descriptors except OWN; inherited ones are for the ranks.

    A reader of the launcher's output must see end-of-file when the launcher ends.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in own:
            _close(fd)


def _close(fd: int) -> None:
    try:
        if not os.get_inheritable(fd):
            os.close(fd)
    except OSError:
        # The descriptor of the listing itself.
        return


class _Service:
    """Serves the launcher's requests until the launcher ends."""

    def __init__(self, orders: _socket.socket, guarded: int, woken: int) -> None:
        self._orders = orders
        self._guarded = guarded
        self._woken = woken
        # The children that the launcher has not asked to be reaped yet.
        self.ranks: set[int] = set()
        # The environment of the first one.
        self._env: Mapping[bytes, bytes] = {}
        # When to kill them, in case the launcher is stopped; and the coordinator to tell, in case
        # the launcher is killed.
        self.kill_at: float | None = None
        self.target: tuple[str, int] | None = None
        # When to reap orphans.
        self._orphans_at: float | None = None

    def run(self) -> None:
        """Return when the launcher has ended."""
        while True:
            due = [at for at in (self._orphans_at, self.kill_at) if at is not None]
            timeout_s = min(due) - time.monotonic() if due else None
            fds = poll(timeout_s, self._orders.fileno(), self._guarded, self._woken)
            if self._guarded in fds:
                return
            if self._woken in fds:
                _drain(self._woken)
                self._reap_orphans_later()
            if self._orders.fileno() in fds and not self._serve():
                return
            if self._orphans_at is not None and self._orphans_at <= time.monotonic():
                self._orphans_at = None
                # `os.wait4` would load it when the first rank has ended, for half a millisecond.

                children.reap_orphans(self.ranks)
            if self.kill_at is not None and self.kill_at <= time.monotonic():
                self.kill_at = None
                children.kill(self.ranks, _STUCK_S)

    def _reap_orphans_later(self) -> None:
        if self._orphans_at is None:
            self._orphans_at = time.monotonic() + _ORPHANS_S

    def _serve(self) -> bool:
        """Serve one request; False when the launcher has ended."""
        try:
            (request, *values), fds = framing.receive(self._orders, self._has_request)
        except (EOFError, ConnectionError):
            return False
        try:
            self._handle(request, values, fds)
        except ConnectionError:
            return False
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _has_request(self) -> bool:
        """Wait for the rest of a request; False when the launcher has ended."""
        orders = self._orders.fileno()
        return orders in poll(None, orders, self._guarded)

    def _handle(self, request: str, values: list[Any], fds: list[int]) -> None:  # noqa: C901, PLR0912 - one case for each
        match request, values:
            case "start", [fields, absent]:
                order = _received(fields, fds)
                env = {**self._env, **order.env}
                for name in absent:
                    del env[name]
                self._env = self._env or env
                try:
                    pid = children.start(order._replace(env=env))
                except OSError as error:
                    self._say(("refused", error.errno))
                except ValueError as error:
                    self._say(("impossible", str(error)))
                else:
                    self.ranks.add(pid)
                    # Also for what that loads.
                    self._reap_orphans_later()
                    self._say(("started", pid))
            case "end", [pids, sweep_s]:
                statuses = children.wait_statuses(pids)
                self._say(list(map(tuple, statuses)))
                self._end(pids, statuses)
                if sweep_s is not None:
                    has_succeeded = not self.ranks and statuses[-1] == children.WELL
                    swept = self._sweep(frozenset(), sweep_s) if has_succeeded else None
                    self._say(swept)
                    if swept is not None and not swept[0]:
                        _make_way()
                        os._exit(0)
            case "end alone", [pids]:
                known = children.alone(pids)
                self._say([[*known], *map(tuple, known.values())])
                self._end([*known], [*known.values()])
            case "kill at", [at]:
                self.kill_at = at
            case "tell at", [target]:
                self.target = target
            case "left", [group]:
                self._say((children.left_in(group),))
            case "sweep", [ranks, seconds]:
                self._say(self._sweep(frozenset(ranks), seconds))
            case _:  # pragma: no cover - there are no others
                raise AssertionError(request)

    def _end(self, pids: Sequence[int], statuses: Sequence[WaitStatus]) -> None:
        ended = children.end(pids, statuses)
        self.ranks.difference_update(pids[: len(ended)])
        self._say([(how.peak_bytes, list(map(tuple, how.left))) for how in ended])

    def _sweep(self, ranks: frozenset[int], seconds: float) -> tuple[Any, ...]:
        swept = children.sweep(ranks, seconds, is_guard=True)
        return swept.stuck, list(map(tuple, swept.ended))

    def _say(self, answer: Sequence[Any] | None) -> None:
        self._orders.sendall(framing.pack(answer))


def _make_way() -> None:
    """Leave this processor to the launcher, while the kernel removes this process.

    That takes a millisecond, and the kernel wakes who gets an answer where who sent it runs.
    """
    # Not where it is the only one.
    with suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {libc.processor()})


def _received(order: tuple[Any, ...], fds: list[int]) -> Order:
    """Return the ORDER that came with the descriptors FDS."""
    output, errors = fds
    return children.Order._make(order)._replace(output=output, errors=errors)


def _drain(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        return
