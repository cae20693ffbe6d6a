"""The launchers of several hosts: each tells the others when its part is done, or has failed.

They meet at one of them, the hub, and what they say is one JSON list in each line: a `Word`.
"""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.plan.hosts import is_loopback
from fleetrun.run.events import (
    Exited,
    Finished,
    Gathered,
    Hung,
    Interrupted,
    PeerFailed,
    PeersDone,
    Refuted,
    SignalAll,
)
from fleetrun.run.listeners import Source
from fleetrun.run.loop import WRITABLE, nothing
from fleetrun.run.policy import PASSED_ON

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan, Peers
    from fleetrun.run.events import Declared, Happening
    from fleetrun.run.loop import Waiting

_PACE_S = 0.5
# Who does not answer a call within this time is no launcher.
_ANSWER_S = 2.0
# A host may be started by hand; who has not called by then never will.
_PATIENCE_S = 300.0
# Who trained here has reached the servers, so the launcher beside them has long been there.
_UNHEARD_S = 10.0
_REMARK_S = 5.0
# How long the last words may take to arrive; who has not called yet may still be told.
_FAREWELL_S = 2.0
# A host that vanishes from the network is noticed after some 25 s.
_IDLE_S, _PROBE_S, _PROBES = 10, 5, 3
_LONGEST_LINE = 1 << 16
# The exit code where a launcher itself is lost.
_LOST = 1


# Who calls, and the answer; an attempt's trainers are done, of one host or of all; it has failed;
# nothing more will be said.
_HELLO, _DONE, _ALL_DONE, _FAILED, _BYE = "hello", "done", "all done", "failed", "bye"


class Word(NamedTuple):
    """What one launcher says to another, about an attempt of the job."""

    what: str
    attempt: int = 0
    # Of hello: which job it is, and who calls.
    key: str = ""
    node: int = -1
    # Of failed.
    host: str = ""
    happened: str = ""
    exit_code: int = 0
    is_final: bool = False

    def line(self) -> bytes:
        """Write it as it is sent."""
        import json  # noqa: PLC0415 - the processes have been started by now

        return json.dumps(self).encode() + b"\n"

    def failure(self) -> PeerFailed:
        """Return what has failed; the clocks of two hosts differ, so it is as if it were now."""
        code = self.exit_code or _LOST
        now = time.monotonic()
        return PeerFailed(self.host, self.happened, code, now, self.attempt, self.is_final)


def read(line: bytes) -> Word:
    """Return what another launcher says; ValueError if no launcher can have said it.

    >>> read(Word("done", 2).line()) == Word("done", 2)
    True
    """
    import json  # noqa: PLC0415 - as above

    values = json.loads(line)
    like = Word("", *Word._field_defaults.values())
    if not isinstance(values, list) or [*map(type, values)] != [*map(type, like)]:
        raise ValueError(line)
    return Word(*values)


def _told(failure: PeerFailed) -> Word:
    return Word(
        _FAILED,
        failure.attempt,
        host=failure.host,
        happened=failure.what,
        exit_code=failure.exit_code,
        is_final=failure.is_final,
    )


class Assembly(Source):
    """The session with the launchers of the other hosts.

    Without it the hosts would wait for each other for ever, so it may not fail.
    """

    name = "the session with the other hosts"
    without = "without word of the other hosts"
    is_required = True

    def __init__(
        self,
        plan: LaunchPlan,
        peers: Peers,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._peers = peers
        self._say = say
        self._me = plan.node_rank
        self._nodes = plan.nodes
        self._max_restarts = plan.rules.max_restarts
        self._essential = frozenset(i for i, spec in enumerate(plan.processes) if spec.essential)
        self._owed = set(self._essential)
        self._attempt = 0
        # Whether what happens here is a consequence of what is known already.
        self._is_settled = False
        self._is_over = False
        self._end: _Hub | _Caller
        if self._me == peers.chair:
            trainers = {spec.node_rank for spec in plan.ranks if spec.role == "TRAINER"}
            self._end = _Hub(self, peers, frozenset(trainers), plan.nodes)
        else:
            self._end = _Caller(self, peers, self._me)

    # As a source --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Listen, if the others call us; EnvironmentFault when there is no port for that."""
        self._end.prepare()

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Call, or wait for calls."""
        self._waiting = waiting
        self._declare = declare
        self._end.open(waiting)
        self._look()

    def tell(self, happening: Happening) -> None:
        """Tell the others what they must know of what happens here."""
        match happening:
            case Gathered(attempt=attempt, plan=plan) if attempt:
                self._attempt, self._is_settled = attempt, False
                self._essential = frozenset(i for i, s in enumerate(plan.processes) if s.essential)
                self._owed = set(self._essential)
                self._look()
            case Finished(outcome=outcome):
                self._is_over = True
                code = outcome.exit_code
                if outcome.cause is not None and not isinstance(outcome.cause, PeerFailed):
                    self._fail(outcome.describe(), code, is_final=True)
                self._end.leave()
                self._waiting.alarm("farewell", time.monotonic() + _FAREWELL_S, self._end.close)
            case _ if not self._is_settled:
                self._hear(happening)
            case _:
                pass

    def _hear(self, happening: Happening) -> None:
        """Say what others must know; once the end is known, what happens is its consequence."""
        match happening:
            case Exited() if happening.status.exit_code:
                hopeless = bool(happening.fault or happening.hopeless)
                self._fail(happening.describe(), happening.status.exit_code, is_final=hopeless)
            case Exited(process=process):
                self._owed.discard(process)
                self._look()
            case Interrupted(signum=signum) if signum not in PASSED_ON:
                self._fail("fleetrun was asked to stop", 128 + signum, is_final=True)
            case Hung() | Refuted():
                final = isinstance(happening, Refuted)
                self._fail(happening.describe(), happening.exit_code, is_final=final)
            case PeerFailed(attempt=attempt, is_final=False) if attempt < self._attempt:
                # Late news of an attempt that is over here, too.
                pass
            case PeersDone() | PeerFailed():
                self._is_settled = True
            case SignalAll(signum=signum) if signum not in PASSED_ON:
                self._is_settled = True
            case _:
                pass

    def is_busy(self) -> bool:
        """Whether somebody has not heard our last words yet; not for long."""
        return self._end.is_busy

    def close(self) -> None:
        """Hang up."""
        self._end.close()

    # What is known here -------------------------------------------------------------------------

    def _look(self) -> None:
        """Say so when our own trainers are done."""
        if not self._owed and not self._is_settled:
            self._end.done(self._attempt)
            if not self._is_settled and self._essential:
                self._waiting.alarm("remark", time.monotonic() + _REMARK_S, self._remark)

    def _remark(self) -> None:
        if not self._owed and not self._is_settled:
            self._say("This host's trainers are done; waiting for those of the other hosts.")

    def _fail(self, what: str, code: int, *, is_final: bool) -> None:
        self._is_settled = True
        is_final = is_final or self._attempt >= self._max_restarts
        host = self._nodes[self._me]
        self._end.failed(PeerFailed(host, what, code, time.monotonic(), self._attempt, is_final))

    # What the others know -----------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The attempt that runs here."""
        return self._attempt

    @property
    def connected(self) -> frozenset[int]:
        """The nodes whose launchers are on the line."""
        return self._end.connected

    @property
    def is_over(self) -> bool:
        """Whether nothing of the job runs here any more."""
        return self._is_over

    def remark(self, text: str) -> None:
        """Tell the user TEXT."""
        self._say(text)

    def all_done(self, attempt: int) -> None:
        """Hear that the trainers of all hosts are done."""
        if not self._is_over and not self._is_settled and attempt == self._attempt:
            self._is_settled = True
            self._declare(PeersDone(time.monotonic(), attempt))

    def other_failed(self, failure: PeerFailed) -> None:
        """Hear that the job has failed elsewhere."""
        if not self._is_over:
            self._declare(failure)

    def lost(self, host: str) -> PeerFailed:
        """Return what it means that the launcher of HOST has gone without a word."""
        now = time.monotonic()
        return PeerFailed(host, "fleetrun was lost", _LOST, now, self._attempt, is_final=True)


class _Hub:
    """The end at which all others call."""

    def __init__(
        self, ours: Assembly, peers: Peers, trainers: frozenset[int], nodes: tuple[str, ...]
    ) -> None:
        self._ours = ours
        self._peers = peers
        self._is_open = True
        self._trainers = trainers
        self._nodes = nodes
        self._lines: dict[int, _Line] = {}
        # Who has called, and not said yet who they are.
        self._strangers: set[_Line] = set()
        self._done: dict[int, set[int]] = {}
        self._announced = -1
        self._joined: set[int] = {peers.chair}
        # What has failed last, for those who have not called yet; nothing comes after a final one.
        self._failure: PeerFailed | None = None

    def prepare(self) -> None:
        """Listen at the first port that is free."""
        host = self._peers.host
        # "Hosts" on loopback are one machine, trying out: each has an address to itself.
        address = host if is_loopback(host) else "0.0.0.0"  # noqa: S104 - the other hosts call
        for port in self._peers.ports:
            self._door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            self._door.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            try:
                self._door.bind((address, port))
            except OSError as error:
                self._door.close()
                if error.errno != errno.EADDRINUSE:
                    raise EnvironmentFault(
                        f"Port {port}, where launchers tell each other when their trainers are "
                        f"done, cannot be used: {error.strerror}."
                    ) from None
                continue
            self._door.listen(128)
            self._door.settimeout(0)
            return
        raise EnvironmentFault(
            f"Ports {self._peers.ports[0]} to {self._peers.ports[-1]} are all taken, and launchers "
            "need one to tell each other when their trainers are done; another --job_id, the same "
            "on every host, means other ports."
        )

    def open(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._began = time.monotonic()
        waiting.watch(self._door.fileno(), self._answer)
        waiting.alarm("patience", self._began + _PATIENCE_S, self._look)

    def _answer(self) -> None:
        with suppress(OSError):
            fd, _ = getattr(self._door, "_accept")()  # noqa: B009 - socket.accept adds but a wrapper
            line = _Line(_socket.socket(fileno=fd), self._waiting)
            self._strangers.add(line)
            line.listen(partial(self._introduced, line), partial(self._strangers.discard, line))

    def _introduced(self, line: _Line, word: Word) -> None:
        self._strangers.discard(line)
        node = word.node
        is_ours = word.key == self._peers.key and 0 <= node < len(self._nodes)
        if not is_ours or node in self._lines:
            line.close()
            return
        self._lines[node] = line
        self._joined.add(node)
        line.listen(partial(self._heard, node), partial(self._lost, node))
        line.send(Word(_HELLO, key=self._peers.key))
        if self._announced == self._ours.attempt:
            line.send(Word(_ALL_DONE, self._announced))
        failure = self._failure
        if failure is not None and (failure.is_final or word.attempt <= failure.attempt):
            line.send(_told(failure))
        if self._ours.is_over:
            self._say_goodbye(line)

    def _heard(self, node: int, word: Word) -> None:
        if word.what == _DONE:
            self._done.setdefault(word.attempt, set()).add(node)
            self._look()
        elif word.what == _FAILED:
            failure = word.failure()
            self._fail(failure, but=node)
            self._ours.other_failed(failure)
        elif word.what == _BYE:
            self._lines.pop(node).close()

    def _lost(self, node: int) -> None:
        self._lines.pop(node)
        if not self._ours.is_over:
            failure = self._ours.lost(self._nodes[node])
            self._fail(failure)
            self._ours.other_failed(failure)

    def done(self, attempt: int) -> None:
        """Hear that our own trainers are done."""
        self._done.setdefault(attempt, set()).add(self._peers.chair)
        self._look()

    def _look(self) -> None:
        attempt = self._ours.attempt
        missing = self._trainers - self._done.get(attempt, set())
        if missing & self._joined or self._announced == attempt:
            return
        if missing:
            if time.monotonic() < self._began + _PATIENCE_S:
                return
            who = ", ".join(self._nodes[node] for node in sorted(missing))
            self._ours.remark(
                f"The launcher of {who} has not called in {_PATIENCE_S:.0f} s; the servers are "
                "stopped without its word."
            )
        self._announced = attempt
        for line in list(self._lines.values()):
            line.send(Word(_ALL_DONE, attempt))
        self._ours.all_done(attempt)

    def failed(self, failure: PeerFailed) -> None:
        """Tell all others that our part has failed."""
        self._fail(failure)

    def _fail(self, failure: PeerFailed, *, but: int = -1) -> None:
        if self._failure is None or not self._failure.is_final:
            self._failure = failure
        for node, line in list(self._lines.items()):
            if node != but:
                line.send(_told(failure))

    @property
    def connected(self) -> frozenset[int]:
        """Everybody who has called."""
        return frozenset(self._lines)

    @property
    def is_busy(self) -> bool:
        """Whether somebody is still on the line, or must still hear that the job has failed."""
        everybody = len(self._joined) == len(self._nodes)
        return self._is_open and (
            bool(self._lines) or (self._failure is not None and not everybody)
        )

    def leave(self) -> None:
        """Say that there is nothing more to say."""
        for line in list(self._lines.values()):
            self._say_goodbye(line)

    def _say_goodbye(self, line: _Line) -> None:
        line.send(Word(_BYE))
        line.hang_up()

    def close(self) -> None:
        """End all calls."""
        self._is_open = False
        if self._door.fileno() >= 0:
            self._waiting.unwatch(self._door.fileno())
            self._door.close()
        for line in (*self._lines.values(), *self._strangers):
            line.close()
        self._lines.clear()
        self._strangers.clear()


class _Caller:
    """The end that calls the hub, again and again until somebody answers."""

    def __init__(self, ours: Assembly, peers: Peers, me: int) -> None:
        self._ours = ours
        self._peers = peers
        self._me = me
        self._line: _Line | None = None
        self._is_open = True
        self._is_joined = False
        self._tries = 0
        # What could not be said yet.
        self._unsaid: list[Word] = []

    def prepare(self) -> None:
        """Open nothing: who is called must listen first."""

    def open(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._call()

    def _call(self) -> None:
        port = self._peers.ports[self._tries % len(self._peers.ports)]
        self._tries += 1
        link = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        link.settimeout(0)
        self._waiting.alarm("call", time.monotonic() + _ANSWER_S, self._again)
        try:
            link.connect_ex((self._peers.host, port))
        except OSError:
            # No such name yet.
            link.close()
            return
        self._line = line = _Line(link, self._waiting)
        self._waiting.watch(link.fileno(), partial(self._connected, line), WRITABLE)

    def _connected(self, line: _Line) -> None:
        if line.is_refused():
            self._again()
            return
        line.listen(self._heard, self._lost)
        line.send(Word(_HELLO, self._ours.attempt, self._peers.key, self._me))

    def _again(self) -> None:
        """Try the next port, the first one again after a while."""
        if self._line is not None:
            self._line.close()
            self._line = None
        is_round = self._tries % len(self._peers.ports) == 0
        self._waiting.alarm("call", time.monotonic() + (_PACE_S if is_round else 0.0), self._call)

    def _heard(self, word: Word) -> None:
        if not self._is_joined:
            if word.key != self._peers.key:
                self._again()
                return
            self._is_joined = True
            self._waiting.alarm("call", None, self._call)
            self._waiting.alarm("unheard", None, nothing)
            for unsaid in self._unsaid:
                self._send(unsaid)
            self._unsaid.clear()
            if self._ours.is_over:
                self.leave()
        elif word.what == _ALL_DONE:
            self._ours.all_done(word.attempt)
        elif word.what == _FAILED:
            self._ours.other_failed(word.failure())
        elif word.what == _BYE:
            self.close()

    def _lost(self) -> None:
        self._line = None
        if not self._is_joined:
            self._again()
        else:
            self._ours.other_failed(self._ours.lost(self._peers.host))

    def _send(self, word: Word) -> None:
        if self._line is not None and self._is_joined:
            self._line.send(word)
        else:
            self._unsaid.append(word)

    def done(self, attempt: int) -> None:
        """Tell the hub that our own trainers are done."""
        self._send(Word(_DONE, attempt))
        if not self._is_joined:
            self._waiting.alarm(
                "unheard", time.monotonic() + _UNHEARD_S, partial(self._unheard, attempt)
            )

    def _unheard(self, attempt: int) -> None:
        ports = f"{self._peers.ports[0]} to {self._peers.ports[-1]}"
        self._ours.remark(
            f"The launcher of {self._peers.host} does not answer at ports {ports}: what runs here "
            "is stopped without its word."
        )
        self._ours.all_done(attempt)

    def failed(self, failure: PeerFailed) -> None:
        """Tell the hub that our part has failed."""
        self._send(_told(failure))

    @property
    def connected(self) -> frozenset[int]:
        """The hub, once it has answered."""
        is_there = self._is_joined and self._line is not None
        return frozenset((self._peers.chair,)) if is_there else frozenset()

    @property
    def is_busy(self) -> bool:
        """Whether the hub is still on the line, or must still hear that the job has failed."""
        is_failure_unsaid = any(word.what == _FAILED for word in self._unsaid)
        return self._is_open and (is_failure_unsaid or bool(self.connected))

    def leave(self) -> None:
        """Say that there is nothing more to say."""
        if self._line is not None and self._is_joined:
            self._line.send(Word(_BYE))
            self._line.hang_up()

    def close(self) -> None:
        """End the call."""
        self._is_open = False
        self._waiting.alarm("call", None, self._call)
        if self._line is not None:
            self._line.close()
            self._line = None


class _Line:
    """A connection that carries words, one in each line."""

    def __init__(self, link: _socket.socket, waiting: Waiting) -> None:
        link.settimeout(0)
        link.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
        for option, value in (
            (_socket.TCP_KEEPIDLE, _IDLE_S),
            (_socket.TCP_KEEPINTVL, _PROBE_S),
            (_socket.TCP_KEEPCNT, _PROBES),
            (_socket.TCP_USER_TIMEOUT, (_IDLE_S + _PROBE_S * _PROBES) * 1000),
        ):
            link.setsockopt(_socket.IPPROTO_TCP, option, value)
        self._link = link
        self._waiting = waiting
        self._rest = b""
        self._is_open = True

    def listen(self, heard: Callable[[Word], None], lost: Callable[[], None]) -> None:
        """Call HEARD with each word, and LOST when the other end has hung up or vanished."""
        self._heard, self._lost = heard, lost
        self._waiting.watch(self._link.fileno(), self._read)

    def is_refused(self) -> bool:
        """Whether a call that was to connect has failed."""
        return self._link.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR) != 0

    def send(self, word: Word) -> None:
        """Say WORD; what cannot be said is a lost line, which we shall hear of."""
        with suppress(OSError):
            self._link.send(word.line())

    def _read(self) -> None:
        try:
            piece = self._link.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        try:
            words = [read(line) for line in lines]
        except (ValueError, RecursionError):
            # No launcher talks like that.
            words, piece = [], b""
        for word in words:
            if self._is_open:
                self._heard(word)
        if self._is_open and (not piece or len(self._rest) > _LONGEST_LINE):
            self.close()
            self._lost()

    def hang_up(self) -> None:
        """Say nothing more, and wait until the other end has heard it all."""
        with suppress(OSError):
            self._link.shutdown(_socket.SHUT_WR)

    def close(self) -> None:
        """End the connection."""
        if self._is_open:
            self._is_open = False
            self._waiting.unwatch(self._link.fileno())
            self._link.close()
