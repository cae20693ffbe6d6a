"""Simulated hosts, launchers, networks and an etcd: one seed is one history.

Sessions, memberships, elections and coordinators are the real ones; ranks, connections, the store
and time are not.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict, deque
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from fleetrun.run.events import Failure
from fleetrun.session.connecting import PortTaken
from fleetrun.session.coordinator import PREPARING as PLACED
from fleetrun.session.driver import RendezvousEndpoint, Session, SessionHandler
from fleetrun.session.election import Election
from fleetrun.session.etcd import KeyAnswer
from fleetrun.session.messages import (
    DONE,
    LOST,
    READY,
    UNMET,
    Acknowledged,
    Heartbeat,
    Join,
    JoinRequest,
    RosterMessage,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fleetrun.session.coordinator import State
    from fleetrun.session.messages import RendezvousConfig

GATHERING, PREPARING, RUNNING, STOPPING, STOPPED, OVER = range(6)
# Longer than any history may take.
_LIMIT_S = 3000.0
# How long a caller waits before it calls again, and a launcher before it is gone.
_AGAIN_S, _LINGER_S = 0.5, 15.0
# After this long, what was due has been done; and a launcher that was stopped hears messages.
_MOMENT_S, WOKEN_S = 0.1, 0.01
_PORT = 6166


class Violation(AssertionError):
    """A promise was broken."""


class World:
    """Time, the network, the store and all hosts of one history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        # How long a message may take.
        self.longest_delay_s = 1.5
        self.log: list[tuple[float, str, str]] = []
        self.hosts: list[Host] = []
        # Until when a host is cut off from another, from all (None) or from the store ("").
        self.cuts: list[tuple[float, Host, Host | str | None]] = []
        # Those to which anything has been done.
        self.harmed: set[Host] = set()
        self.store = Key(self)
        # The launchers that are ready for each generation, that are done, and that have failed.
        self.ready: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        # The launchers that start each one: two coordinators may give the same number.
        self.started: defaultdict[tuple[str, int], set[frozenset[str]]] = defaultdict(set)
        self.done: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.failed: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        # How often each host has made a coordinator's job start again; where ranks fail often.
        self.faults = Counter[tuple[str, str]]()
        self.weak: int | None = None
        # How much later than messages the timers of a launcher ring that was stopped.
        self.wakes_s = 0.0
        self._rosters: set[tuple[str, int]] = set()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._delay_s = self.random.choice((0.001, 0.02, 0.2))

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Make CALL at the moment WHEN."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), call))

    def cut(self, until: float, host: Host, other: Host | str | None) -> None:
        """Cut HOST off from OTHER, from all (None) or from the store ("")."""
        self.cuts.append((until, host, other))
        self.harmed |= {it for it in (host, other) if isinstance(it, Host)}

    def delay(self) -> float:
        """Return how long a message takes; some take long."""
        if self.random.random() < 0.01:
            return self.random.uniform(0.0, self.longest_delay_s)
        return self.random.uniform(0.2, 1.0) * self._delay_s

    def passes_at(self, host: Host, other: Host | str) -> float:
        """Return when packets pass between HOST and OTHER again."""
        parted = (
            until
            for until, cut, peer in self.cuts
            if host is not other and cut in {host, other} and peer in {None, host, other}
        )
        return max(parted, default=0.0)

    def run(self) -> None:
        """Play until all launchers have ended, and check after each event."""
        while self._heap and any(not host.is_over for host in self.hosts):
            when, _, call = heapq.heappop(self._heap)
            if when > _LIMIT_S:
                raise Violation(f"somebody waits for ever: {self.log[-20:]}")
            self.now = when
            call()
            self._check()

    def _check(self) -> None:
        """Two generations never train at once, nor two sessions."""
        running = {host.trains for host in self.hosts if host.trains is not None}
        if len(running) > 1:
            raise Violation(f"{running} train at once at {self.now:.2f}: {self.log[-20:]}")
        for host in self.hosts:
            if host.is_awake and host.keeps_expired_lease:
                raise Violation(f"{host.name} coordinates without a lease: {self.log[-20:]}")
            if host.session.server is not None and host.is_awake:
                state = host.session.server.state
                self._check_places(host.session.launcher, state)
                silent_since = self.now - state.config.heartbeat_timeout_s - 2 * state.config.look_s
                if any(it.heard_at < silent_since for it in state.hosts.values()):
                    raise Violation(f"{host.name} waits for the silent: {self.log[-20:]}")

    def _check_places(self, coordinator: str, state: State) -> None:
        """Check that a host that failed twice has no place while others wait for one."""
        if state.phase != PLACED or (coordinator, state.generation) in self._rosters:
            return
        self._rosters.add((coordinator, state.generation))
        failing, others = dict[str, bool](), dict[str, bool]()
        for host in state.hosts.values():
            name = host.request.hostname
            is_failing = self.faults[coordinator, name] > 1 and not host.is_local
            (failing if is_failing else others)[name] = host.place is not None
        if any(failing.values()) and not all(others.values()):
            raise Violation(f"{failing} have places, not {others}: {self.log[-20:]}")


class Waits:
    """The loop of a launcher, which a stopped host does not run."""

    def __init__(self, world: World, host: Host) -> None:
        self._world, self._host = world, host
        self._timers: dict[Hashable, int] = {}
        self._numbers = itertools.count()

    def timer(self, key: Hashable, at: float | None, call: Callable[[], None]) -> None:
        """Call once at the moment AT; None takes KEY's timer away."""
        number = self._timers[key] = next(self._numbers)

        def ring() -> None:
            if self._timers.get(key) != number or self._host.is_dead:
                return
            if self._host.stopped_until > self._world.now:
                self._world.at(self._host.stopped_until + self._world.wakes_s, ring)
                return
            del self._timers[key]
            call()

        if at is None:
            del self._timers[key]
        else:
            # After those that were due while it was stopped.
            self._world.at(max(at, self._host.stopped_until + self._world.wakes_s), ring)

    def watch(self, *_: Any) -> None:
        """Watch nothing: there are no descriptors."""

    def unwatch(self, *_: Any) -> None:
        """Watch nothing."""


class End:
    """One end of a simulated connection: messages arrive in order, or it is lost."""

    def __init__(self, world: World, owner: Host, other: Host) -> None:
        self.world, self.owner, self.other = world, owner, other
        self.address = f"10.0.0.{other.number}"
        self.heard: Callable[[Any], None] = _ignore
        self.lost: Callable[[], None] = _nothing
        self.is_open = True
        self.peer: End
        self._is_finishing = False
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()

    def send(self, message: Any) -> None:
        """Send MESSAGE, which arrives unless a network or a host is gone."""
        if self.is_open and not self._is_finishing:
            if isinstance(message, Join):
                self.owner.beats.setdefault(0, self.world.now)
            elif isinstance(message, Heartbeat):
                self.owner.beats[message.number] = self.world.now
            elif isinstance(message, Acknowledged):
                self.owner.promise(message.left_s)
            self._later(lambda: self.peer._take(message))

    def finish(self) -> None:
        """Hang up after what was sent."""
        if self.is_open and not self._is_finishing:
            self._is_finishing = True
            self._later(self.peer._end)

    def close(self) -> None:
        """Hang up; what was sent is delivered by the kernel."""
        self.finish()
        self.is_open = False

    def _take(self, message: Any) -> None:
        if self.is_open and not self._is_finishing:
            if isinstance(message, Acknowledged):
                # A promise counts from when the heartbeat was sent.
                owner, until = self.owner, self.owner.beats[message.number] + message.left_s
                owner.promised_until = max(owner.promised_until, until)
            self.heard(message)

    def _end(self) -> None:
        """Take note that the other end has hung up."""
        if self.is_open:
            self.is_open = False
            if not self._is_finishing:
                self._later(self.peer._end)
            self.lost()

    def _later(self, call: Callable[[], None]) -> None:
        self._queue.append((self.world.now + self.world.delay(), call))
        if len(self._queue) == 1:
            self.world.at(self._queue[0][0], self._pump)

    def _pump(self) -> None:
        """Deliver what is due, in order; what a cut or a stopped host holds up comes later."""
        world, (due, call) = self.world, self._queue[0]
        free_at = max(due, world.passes_at(self.owner, self.other), self.other.stopped_until)
        if free_at > world.now:
            world.at(free_at + WOKEN_S, self._pump)
            return
        self._queue.popleft()
        if not self.other.is_dead:
            call()
        if self._queue:
            world.at(max(self._queue[0][0], world.now), self._pump)


class Listens:
    """The port of HOST, where callers of the simulation arrive."""

    port = _PORT

    opened: Callable[[End], None] | None = None

    def __init__(self, host: Host, *_: Any, **_others: Any) -> None:
        if host.listens is not None:
            raise PortTaken("the port is taken")
        self._host, host.listens = host, self

    def open(self, opened: Callable[[End], None]) -> None:
        """Accept callers."""
        self.opened = opened

    def close(self) -> None:
        """Free the port."""
        self._host.listens = None


class Dials:
    """Calls the host that a target names until it answers."""

    trouble = ""
    is_begun = False

    def __init__(
        self,
        host: Host,
        where: str,
        *_: object,
        opened: Callable[[End], None],
        **_others: Any,
    ) -> None:
        self._host, self._opened = host, opened
        self._where = where

    def begin(self) -> None:
        """Call, or call again."""
        self.close()
        self.is_begun = True
        self._call()

    def close(self) -> None:
        """Call no more."""
        self.is_begun = False
        self._host.waits.timer((id(self), "call"), self._host.world.now + _LIMIT_S, _nothing)

    def _call(self) -> None:
        host, world = self._host, self._host.world
        other = next((h for h in world.hosts if h.address == self._where and not h.is_dead), None)
        if other is not None and world.passes_at(host, other) <= world.now:
            listens = other.listens
            if listens is not None and listens.opened is not None:
                self.is_begun = False
                here, there = End(world, host, other), End(world, other, host)
                here.peer, there.peer = there, here
                host.beats.clear()
                listens.opened(there)
                self._opened(here)
                return
        host.waits.timer((id(self), "call"), world.now + _AGAIN_S, self._call)


class Key:
    """The key of an etcd, with its lease."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._value, self._lease, self._revision = "", 0, 0
        self._until: dict[int, float] = {}
        self._numbers = itertools.count(1)

    def ends_at(self, lease: int) -> float:
        """Return when LEASE ends; 0: it has been revoked."""
        return self._until.get(lease, 0.0)

    def _is_live(self, lease: int) -> bool:
        return self.ends_at(lease) > self._world.now

    def look(self) -> tuple[str, int, str]:
        """Return the value, its revision, and the address of who asks."""
        if not self._is_live(self._lease):
            return "", 0, ""
        return self._value, self._revision, ""

    def campaign(self, value: str, ttl_s: float, revision: int) -> tuple[int, int] | None:
        """Put the value if the key still has this revision."""
        if self.look()[1] != revision:
            return None
        self._lease = next(self._numbers)
        self._until[self._lease] = self._world.now + ttl_s
        self._value, self._revision = value, self._revision + 1
        return self._lease, self._revision

    def renew(self, lease: int, ttl_s: float) -> bool:
        """Renew the lease if it is still there."""
        if not self._is_live(lease):
            return False
        self._until[lease] = self._world.now + ttl_s
        return True

    def revoke(self, lease: int) -> None:
        """End the lease."""
        self._until.pop(lease, None)


class Asks:
    """A launcher's way to the key: requests take time, and fail while the store is out of reach."""

    def __init__(self, host: Host, *_: Any) -> None:
        self._host = host

    def ask(self, done: Callable[[KeyAnswer], None], method: str, *values: Any) -> None:
        """Call METHOD of the key, then DONE with its answer."""
        host, world = self._host, self._host.world
        asked_at = world.now
        if method == "renew":
            values = (*values, host.config.heartbeat_timeout_s)

        def arrive() -> None:
            if world.passes_at(host, "") > world.now:
                answer = KeyAnswer(asked_at, None, "no answer")
            else:
                value = getattr(world.store, method)(*values)
                answer = KeyAnswer(asked_at, value)
            key = ("answer", id(answer))
            host.waits.timer(key, world.now + world.delay(), lambda: done(answer))

        world.at(world.now + world.delay(), arrive)

    def is_busy(self) -> bool:
        """Whether the launcher waits for answers before it ends."""
        return False

    def close(self) -> None:
        """Ask no more."""


class Host(SessionHandler):
    """A launcher with the phases of the run policy, and its ranks."""

    has_ranks = True

    def __init__(
        self, world: World, number: int, config: RendezvousConfig, leader: Host | None
    ) -> None:
        self.world, self.number, self.config = world, number, config
        self.address = f"10.0.0.{number}"
        self.waits = Waits(world, self)
        self.phase = GATHERING
        self.is_dead = self.is_over = False
        self.stopped_until = 0.0
        self.stands_still_when_ready = False
        self.code: int | None = None
        self.verdict: Verdict | None = None
        self.listens: Listens | None = None
        # The session and generation that trains here.
        self.trains: tuple[str, int] | None = None
        self._kill_at: float | None = None
        # When the heartbeats of this connection were sent, and until when ranks may run.
        self.beats: dict[int, float] = {}
        self.promised_until = 0.0
        self._started: set[tuple[str, int]] = set()
        self._roster: RosterMessage | None = None
        self._own: Failure | None = None
        # Whether it has been asked to end; whether the last failure has used up a restart.
        self._leaves = self._has_restarted = False
        # Whether it waits without a limit, or for a place while the job runs.
        self._stands_by = self.is_spare = False
        where = self.address if leader is None else leader.address
        if config.has_store:
            where = self.address
        endpoint = RendezvousEndpoint(
            config,
            where,
            _PORT,
            "default",
            "token",
            address=self.address if leader is None or config.has_store else "",
        )
        launcher = f"launcher-{number}-{len(world.hosts)}"
        key: Any = partial(Asks, self)
        elect = partial(Election, members=(("etcd", 1),), make_key=key)
        dialer: Any = partial(Dials, self)
        listener: Any = partial(Listens, self)
        self.session = Session(
            endpoint,
            launcher,
            host=self.name,
            log=self.trace,
            elect=elect if config.has_store else None,
            dialer=dialer,
            listener=listener,
            now=lambda: world.now,
        )
        self.session.handler = self
        world.hosts.append(self)

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"node-{self.number}"

    @property
    def is_awake(self) -> bool:
        """Whether the launcher runs, and has been running for a moment."""
        return not self.is_dead and self.stopped_until < self.world.now - _MOMENT_S

    @property
    def _lease(self) -> Election | None:
        """Return the election if it coordinates and needs a lease."""
        election = self.session._election
        if not isinstance(election, Election) or not self.session.serves:
            return None
        return None if election.until is None or not election.is_needed else election

    @property
    def keeps_expired_lease(self) -> bool:
        """Whether it coordinates, needs a lease, and believes in more than it has."""
        election = self._lease
        if election is None or election.until is None:
            return False
        ends_at = self.world.store.ends_at(election.lease)
        return election.until < self.world.now - _MOMENT_S or (election.until > ends_at > 0.0)

    def promise(self, left_s: float) -> None:
        """Check that no other host can coordinate for LEFT_S seconds."""
        election, until = self._lease, self.world.now + left_s
        ends_at = inf if election is None else self.world.store.ends_at(election.lease)
        if left_s and until > ends_at + _MOMENT_S:
            raise Violation(f"{self.name} promises more than its lease: {self.world.log[-20:]}")

    def trace(self, what: str) -> None:
        """Keep WHAT for the message about a broken promise."""
        self.world.log.append((round(self.world.now, 2), self.name, what))

    def begin(self) -> None:
        """Start the launcher."""
        self.session.open(self.waits)
        self.session.guard(self.kill_at)
        self._gather()

    def _gather(self) -> None:
        self.phase, self._own = GATHERING, None
        rank = None if self.config.may_change else self.number
        self.session.join(JoinRequest("", self.name, self.number, (7000,), ((),), rank))
        self._stands_by = True
        self.look_again()

    def _give_up(self) -> None:
        if self.phase in {GATHERING, PREPARING}:
            self._finish(UNMET, Failure(self.name, "gives up", UNMET, is_departure=True))

    # As the handler of its session

    def stand_by(self) -> None:
        """Wait without a limit."""
        self.trace("stands by")
        self._stands_by = self.is_spare = True
        self.waits.timer("gather", self.world.now + _LIMIT_S, _nothing)

    def look_again(self) -> None:
        """Wait with a limit, if this host stood by."""
        if self._stands_by:
            self._stands_by = False
            limit_s = self.config.rdzv_timeout_s + self.config.elastic_timeout_s
            limit_s += 6 * self.config.heartbeat_timeout_s + 60.0
            self.waits.timer("gather", self.world.now + limit_s, self._give_up)

    def plan(self, roster: RosterMessage) -> None:
        """Plan, which takes a moment."""
        launchers = {entry.launcher for entry in roster.entries}
        if not self.config.least <= len(launchers) == len(roster.entries) <= self.config.most:
            raise Violation(f"{launchers} are the hosts: {self.world.log[-20:]}")
        # What has never started is forgotten with its coordinator.
        before = self._roster if self._started else None
        least = 0 if before is None else before.restarts + self._has_restarted
        if not least <= roster.restarts <= self.config.max_restarts:
            raise Violation(f"{roster.restarts} restarts, of at least {least}")
        self._has_restarted = self.is_spare = False
        self.phase, self._own, self._roster = PREPARING, None, roster
        after_s = self.world.random.uniform(0.0, 0.5)
        self.waits.timer("plan", self.world.now + after_s, lambda: self._planned(roster))

    def _planned(self, roster: RosterMessage) -> None:
        if self.phase != PREPARING:
            return
        self.world.ready[roster.session, roster.generation].add(self.session.launcher)
        self.session.report(READY)
        if self.stands_still_when_ready:
            # So that the start comes too late.
            self.stands_still_when_ready = False
            self.stand_still(self.world.random.uniform(0.1, 25.0))

    def run(self) -> None:
        """Start the ranks, which end or fail after a while."""
        roster = self._roster
        assert roster is not None
        if not self.session.serves and self.world.now >= self.promised_until:
            raise Violation(f"{self.name} starts when the others may have started without it")
        self.phase, self.trains = RUNNING, (roster.session, roster.generation)
        if self.trains in self._started:
            raise Violation(f"{self.name} starts {self.trains} twice")
        self._started.add(self.trains)
        launchers = frozenset(entry.launcher for entry in roster.entries)
        self.world.started[self.trains].add(launchers)
        unready = launchers - self.world.ready[self.trains]
        if unready:
            raise Violation(f"{self.name} starts {self.trains} before {unready} are ready")
        self.trace(f"starts {roster.generation}")
        self.waits.timer("gather", self.world.now + _LIMIT_S, _nothing)
        lasts_s = self.world.random.uniform(5.0, 60.0)
        fails = self.world.random.random() < (0.8 if self.number == self.world.weak else 0.15)
        self.waits.timer("rank", self.world.now + lasts_s, lambda: self._rank_ends(fails=fails))

    def _rank_ends(self, *, fails: bool) -> None:
        if self.phase != RUNNING:
            return
        if fails:
            self._fail(Failure(self.name, "rank exited with 7", 7))
        elif self.trains is not None:
            self.world.done[self.trains].add(self.session.launcher)
            self.trains = None
            self.session.report(DONE)

    def _fail(self, failure: Failure) -> None:
        assert self._roster is not None
        key = self._roster.session, self._roster.generation
        self.world.failed[key].add(self.session.launcher)
        self._own = failure
        self.session.failed(failure)
        self._stop()

    def _stop(self) -> None:
        self.phase = STOPPING
        after_s = self.world.random.uniform(0.0, self.config.grace_s)
        self.waits.timer("stop", self.world.now + after_s, self._stopped)

    def _stopped(self) -> None:
        if self.phase == STOPPING:
            self.trains, self.phase = None, STOPPED
            self.session.stopped(self._own)

    def stop(self, failure: Failure) -> None:
        """Ask the ranks to end."""
        self.trace(f"stops: {failure.what}")
        if self.phase == RUNNING:
            self._stop()

    def kill_at(self, at: float | None) -> None:
        """Kill the ranks at that moment, even if the launcher stands still or is gone."""
        self._kill_at = at
        if at is not None and at >= self.promised_until and not self.session.serves:
            raise Violation(f"{self.name} lets ranks run until {at}, not {self.promised_until}")

        def ring() -> None:
            if self._kill_at == at:
                if self.phase == RUNNING and self.is_awake:
                    raise Violation(f"{self.name} has not stopped: {self.world.log[-20:]}")
                self.trains = None
                if self.phase == STOPPING:
                    self.waits.timer("stop", self.world.now, self._stopped)

        if at is not None:
            self.world.at(at, ring)

    def conclude(self, verdict: Verdict) -> None:
        """End, or join the next generation."""
        self.trace(f"hears {verdict}")
        self._check(verdict)
        if self._leaves:
            self._finish(143, self._own)
        elif verdict.is_final:
            self.verdict = verdict
            self._finish(0 if verdict.failure is None else verdict.failure.exit_code, None)
        else:
            self._gather()

    def _check(self, verdict: Verdict) -> None:
        """Check that all are done if that is the verdict, and else that the culprit has failed."""
        failure, world, roster = verdict.failure, self.world, self._roster
        if roster is None or self.is_spare or verdict.generation != roster.generation:
            return
        key = roster.session, roster.generation
        if key not in self._started:
            # Others may have started one with this number.
            return
        if failure is None and not any(it <= world.done[key] for it in world.started[key]):
            raise Violation(f"{self.name} hears that all is done: {world.log[-20:]}")
        culprits = [it for it in world.hosts if it.session.launcher == verdict.launcher]
        has_lost = failure is not None and failure.exit_code == LOST and not failure.is_victim
        # A coordinator that is cut off cannot know that it is not the others.
        is_known = not world.cuts and self.config.heartbeat_timeout_s > 4 * world.longest_delay_s
        if has_lost and is_known and not world.harmed.issuperset(culprits):
            raise Violation(f"{verdict.launcher} was not lost: {world.log[-20:]}")
        is_departure = failure is not None and failure.is_departure and not failure.is_victim
        if is_departure and verdict.is_final and not verdict.given_up:
            raise Violation(f"{self.name} hears that a departure ends all: {world.log[-20:]}")
        is_ranks = failure is not None and failure.exit_code == 7
        if is_ranks and verdict.launcher not in world.failed[key]:
            raise Violation(f"{verdict.launcher} has not failed: {world.log[-20:]}")
        if not verdict.is_final and failure is not None:
            self._has_restarted = not failure.is_departure
            if self.session.serves and failure.exit_code != 143:
                world.faults.update((self.session.launcher, it.name) for it in culprits)

    def _finish(self, code: int, failure: Failure | None) -> None:
        if self.is_over or self.phase == OVER:
            return
        self.code, self.trains, self.phase = code, None, OVER
        self.trace(f"ends with {code}")
        self.session.quit(failure)
        self._linger(self.world.now + _LINGER_S + self.config.heartbeat_timeout_s)

    def _linger(self, until: float) -> None:
        """Stay until all is delivered, for a while."""
        if self.session.is_busy and self.world.now < until:
            again = partial(self._linger, until)
            self.waits.timer("linger", self.world.now + _AGAIN_S, again)
            return
        self.is_over = True
        self.session.close()
        self.is_dead = True

    # What goes wrong --------------------------------------------------------------------------

    def die(self) -> None:
        """Kill the launcher; its ranks go on until the moment at which the guard kills them."""
        if self.is_over:
            return
        self.trace("is killed")
        self.world.harmed.add(self)
        self.is_dead = self.is_over = True
        server, connection = self.session.server, self.session._connection
        for end in (*(() if server is None else server.links.values()), connection):
            # The kernel closes them.
            if isinstance(end, End):
                end.finish()
        self.listens = None

    def leave(self) -> None:
        """Ask the launcher to end, as by TERM."""
        failure = Failure(self.name, "interrupted", 143, is_departure=self.config.may_change)
        if self.is_awake and self.phase in {RUNNING, GATHERING}:
            self.trace("leaves")
            self.world.harmed.add(self)
            self._leaves = True
            if self.phase == RUNNING:
                self._fail(failure)
            else:
                self._finish(143, failure)

    def stand_still(self, seconds: float) -> None:
        """Stop the launcher, as by SIGSTOP; its guard goes on."""
        self.trace(f"stands still for {seconds:.1f} s")
        self.world.harmed.add(self)
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)


def _ignore(_: object) -> None:
    """Do nothing."""


def _nothing() -> None:
    """Do nothing."""
