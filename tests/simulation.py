"""Sessions of simulated launchers: the real code with a random network, clocks and ranks.

One seed is one history. Nothing here waits or sleeps; time is a number.
"""

from __future__ import annotations

import heapq
import itertools
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fleetrun.run.events import Failure
from fleetrun.session import member
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.connection import HUNG_UP, Connection
from fleetrun.session.dialer import Dialer, Target
from fleetrun.session.driver import RendezvousEndpoint, Session, SessionHandler, Transport
from fleetrun.session.listener import Listener
from fleetrun.session.messages import JoinRequest, LauncherKilled, RosterMessage, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

# A firewall opens again, or a host is cut off for ever.
SHORT_CUT_S = 3.0
PORT = 1
# A call that fails is repeated after this; a connection that is finished may stay open so long.
_AGAIN_S, _FLUSH_S = 0.5, 2.0


class Chances(NamedTuple):
    """The probability of each fault in a history, per host."""

    failure: float = 0.3
    kill: float = 0.1
    crash: float = 0.1
    reset: float = 0.2
    short_cut: float = 0.2
    long_cut: float = 0.1
    jump: float = 0.05
    # A launcher is stopped for a while (`kill -STOP`), its ranks and its guard are not.
    stop: float = 0.1
    never_comes: float = 0.03
    no_plan: float = 0.03
    # A host is asked to end, and the job may go on without it.
    departs: float = 0.1
    # A host comes while the job may run already.
    late: float = 0.2
    # Something is wrong with a host before another generation.
    trouble: float = 0.1
    # A host loses its way to etcd, and etcd is gone for a while.
    astray: float = 0.2
    down: float = 0.2
    # One of these is how long ranks last at most, and until when something goes wrong.
    lasts_s: tuple[float, ...] = (3.0, 8.0, 40.0)
    spans_s: tuple[float, ...] = (1.0, 10.0, 40.0)


# Nothing goes wrong by chance, and all train for a while.
QUIET = Chances(
    failure=0.0,
    kill=0.0,
    crash=0.0,
    reset=0.0,
    short_cut=0.0,
    long_cut=0.0,
    jump=0.0,
    stop=0.0,
    never_comes=0.0,
    no_plan=0.0,
    departs=0.0,
    late=0.0,
    trouble=0.0,
    astray=0.0,
    down=0.0,
    lasts_s=(40.0,),
)


class End(Connection):
    """A launcher's end of a connection: messages arrive in order, each after a while."""

    def __init__(self, host: Launcher, other: Launcher) -> None:
        self.host = host
        self.address, self.local_address, self.port = other.name, host.name, PORT
        self.heard = self.lost = _ignore
        self.is_open = True
        self.peer: End
        self._is_finishing = False
        # When the last message from here arrives.
        self._arrival = 0.0
        host.ends.append(self)

    def send(self, message: tuple[object, ...]) -> None:
        """Send MESSAGE."""
        if self.is_open and not self._is_finishing:
            self._deliver(lambda: self.peer.hear(message))

    def hear(self, message: tuple[object, ...]) -> None:
        """Take MESSAGE of the other end."""
        if self.is_open:
            self.heard(message)

    def finish(self) -> None:
        """Hang up after what was sent."""
        if self.is_open and not self._is_finishing:
            self._is_finishing = True
            self._deliver(lambda: self.peer.lose(HUNG_UP))
            self.host.after(_FLUSH_S, lambda: self.lose(HUNG_UP))

    def close(self) -> None:
        """Hang up; what was not read makes the kernel reset the connection."""
        if self.is_open:
            self.is_open = False
            self.host.ends.remove(self)
            is_reset = not self._is_finishing and self.host.world.chance.random() < 0.2
            self._deliver(lambda: self.peer.lose("reset" if is_reset else HUNG_UP))

    def lose(self, why: str) -> None:
        """Close, and say so."""
        if self.is_open:
            self.close()
            self.lost(why)

    def _deliver(self, call: Callable[[], None]) -> None:
        """Let CALL happen at the other end, in order, if it gets there."""
        world, other = self.host.world, self.peer.host
        start = max(world.now, world.apart_until(self.host, other))
        self._arrival = max(self._arrival, start + world.delay())

        def arrive() -> None:
            until = world.apart_until(self.host, other)
            if world.now < until:
                world.at(until + 0.001, arrive)
            else:
                other.do(call)

        world.at(self._arrival, arrive)


class Calls(Dialer):
    """Calls the launcher at a target until it answers."""

    def __init__(
        self,
        host: Launcher,
        targets: Sequence[Target],
        _: object,
        *,
        opened: Callable[[Connection], None],
        closed: Callable[[Target], None],
    ) -> None:
        self._host = host
        (self._target,) = targets
        self._opened, self._refused_by = opened, closed
        self._connection = None
        self.troubles = {}
        # Of the call that is under way, if any is.
        self._number = 0
        self._is_calling = False

    @property
    def is_calling(self) -> bool:
        """Whether a call is under way."""
        return self._is_calling

    def begin(self) -> None:
        """Call."""
        self.hang_up()
        self._call(self._number)

    def close(self) -> None:
        """Call no more."""
        self._number += 1
        self._is_calling = False

    def _call(self, number: int) -> None:
        if number == self._number:
            self._is_calling = True
            self._host.after(self._host.world.delay(), lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        if number != self._number:
            return
        host, world = self._host, self._host.world
        called = world.called(self._target.host)
        is_silent = called.has_crashed or called.is_stopped or called.is_apart_from(host)
        if called.listener is None or is_silent:
            self._is_calling = False
            host.after(_AGAIN_S, lambda: self._call(number))
            if not is_silent:
                self._refused_by(self._target)
            return
        self.close()
        self._connection = world.connect(host, called)
        self._opened(self._connection)


class Door(Listener):
    """Where a launcher is called, while it is open."""

    port = PORT

    def __init__(self, host: Launcher, *_: object, opened: Any, refused: Any, allowed: Any) -> None:
        self._host = host
        self.opened: Callable[[Connection], None] = opened

    def prepare(self) -> None:
        """Keep the port, which is free."""

    def open(self) -> None:
        """Take calls."""
        self._host.listener = self

    def close(self) -> None:
        """Take no more calls."""
        if self._host.listener is self:
            self._host.listener = None


class Launcher(SessionHandler):
    """A host: its launcher with its session and loop, its guard, its ranks, its clock."""

    # Until when it does not reach etcd, although it reaches the others; and etcd alone.
    astray_until = apart_until = 0.0

    def __init__(self, world: World, index: int, *, name: str) -> None:
        self.world = world
        self.index = index
        self.name = name
        self.skew = world.chance.uniform(0.0, 1000.0)
        self.is_alive = True
        self.has_crashed = False
        # Whether it coordinates from the start.
        self.is_local = index == 0
        self.timers: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self.ends: list[End] = []
        self.listener: Door | None = None
        self.cut_until = 0.0
        self.was_cut_long = False
        # The generation of the ranks that run here, and until when they cannot but end.
        self.ranks: int | None = None
        self.rosters: dict[int, RosterMessage] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.has_ended = False
        self.failure: Failure | None = None
        # Why it leaves a job that can go on without it.
        self.departure: Failure | None = None
        self.run_number = self.offers = 0
        # What its options say; the job has what those of the coordinator's host say.
        self.asked = world.asked[index]
        # When the guard kills the ranks, and whom it tells, if the launcher cannot.
        self.killed_at: float | None = None
        self.told: tuple[str, int] | None = None
        self.stopped_until = 0.0
        self.transport = Transport(partial(Calls, self), partial(Door, self), self.clock)
        self.session = self.made()
        self.session.handler = self
        self.session.guard(self)

    def made(self) -> Session:
        """Return its session, which coordinates on the first host."""
        addresses = (self.name,) if self.is_local else ()
        endpoint = RendezvousEndpoint(
            self.asked, "host0", (PORT,), "job", "known to all", addresses=addresses
        )
        return Session(endpoint, self.name, host=self.name, log=_ignore, transport=self.transport)

    @property
    def state(self) -> member.MemberState:
        """What the session knows."""
        assert self.session._member is not None
        return self.session._member

    def clock(self) -> float:
        """Return the time on this host."""
        return self.world.now + self.skew

    @property
    def is_stopped(self) -> bool:
        """Whether the launcher is stopped now."""
        return self.world.now < self.stopped_until

    def is_apart_from(self, other: Launcher) -> bool:
        """Whether nothing gets through to OTHER now."""
        return self.world.now < self.world.apart_until(self, other)

    def is_turned_away(self) -> bool:
        """Whether it came when there was no place, and never had one."""
        ends = [
            verdict.failure.what
            for verdict in self.verdicts.values()
            if verdict.failure is not None
        ]
        return not self.rosters and any("refused this host" in what for what in ends)

    # Its loop -------------------------------------------------------------------------------

    def do(self, call: Callable[[], None]) -> None:
        """Let the launcher do CALL, later if it is stopped now."""
        if self.is_stopped:
            self.world.at(self.stopped_until, lambda: self.do(call))
        elif self.is_alive:
            call()

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Let the launcher do CALL in a while."""
        self.world.after(delay, lambda: self.do(call))

    def timer(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Do CALLBACK at a moment of this host's clock."""
        self.timers.pop(key, None)
        if at is None:
            return
        timer = self.timers[key] = (at, callback)

        def ring() -> None:
            if self.timers.get(key) is timer:
                del self.timers[key]
                callback()

        self.world.at(max(self.world.now, at - self.skew) + 1e-6, lambda: self.do(ring))

    def watch(self, fd: int, callback: Callable[[], None], mask: int = 0) -> None:
        """Refuse to watch a file: there is none here."""
        raise AssertionError(fd)

    def unwatch(self, fd: int) -> None:
        """Refuse, too."""
        raise AssertionError(fd)

    def jump(self, seconds: float) -> None:
        """Let the clock go forward, as after a pause of the machine: timers are late."""
        self.skew += seconds
        for key, timer in list(self.timers.items()):
            self.timer(key, *timer)

    # Its part in the job --------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to take part."""
        self.session.open(self)
        self.offer()

    def offer(self) -> None:
        """Join the next generation."""
        if self.has_ended or self.state.phase != member.IDLE:
            return
        ports = (7000 + self.state.generation,)
        is_ill = self.world.chance.random() < self.world.chances.trouble
        trouble = "its disk is full" if is_ill and self.state.generation else ""
        self.session.join(
            JoinRequest(self.name, self.name, self.index, ports, ((),), trouble=trouble)
        )
        config, offer = self.session.config, self.offers
        longest_s = config.quarantine_s + config.elastic_timeout_s + 2 * config.heartbeat_timeout_s
        patience = max(longest_s, *(asked.rdzv_timeout_s for asked in self.world.asked)) + 5.0
        self.after(patience, lambda: self.lose_patience(offer))

    def lose_patience(self, offer: int) -> None:
        """Give up an OFFER that nobody has answered, as Rendezvous does."""
        gathering = (member.IDLE, member.JOINING, member.PLANNING, member.READY)
        is_answered = self.offers != offer or self.state.phase not in gathering
        if not self.state.stands_by and not is_answered:
            self.leave()

    def plan(self, roster: RosterMessage) -> None:
        """Plan, or find that this is not possible."""
        known = self.rosters.setdefault(roster.generation, roster)
        assert known == roster, "two rosters in one generation"
        self.world.check_roster(self, roster)
        failure = None
        if self.world.chance.random() < self.world.chances.no_plan:
            failure = Failure(self.name, "no plan", 3, no_retry="no plan helps")

        def planned() -> None:
            if self.state.generation == roster.generation:
                self.session.planned(failure)

        self.after(0.01, planned)

    def run(self) -> None:
        """Start the ranks, where none of an earlier generation may be left."""
        self.world.check_alone(self)
        self.start_ranks()

    def stop(self, failure: Failure, *, is_fenced: bool = False) -> None:
        """Stop the ranks, or kill them."""
        if is_fenced:
            self.ranks = None
        self.end_ranks(0.01 if is_fenced else self.grace())

    def conclude(self, verdict: Verdict) -> None:
        """Take the verdict, and go on or end."""
        assert self.ranks is None, "a verdict while ranks run"
        assert verdict.generation not in self.verdicts, "two verdicts in one generation"
        self.verdicts[verdict.generation] = verdict
        self.offers += 1
        if verdict.is_final or self.departure is not None:
            self.after(0.0, self.leave)
        else:
            self.after(self.world.chance.uniform(0.1, 1.0), self.offer)

    def leave(self) -> None:
        """End, once all have heard it."""
        if not self.has_ended:
            self.has_ended = True
            self.session.quit(self.departure)
            self.close()

    def close(self) -> None:
        """End the session when nothing is left to say."""
        if self.session.is_busy:
            self.after(0.1, self.close)
        else:
            self.session.close()

    # Ranks ----------------------------------------------------------------------------------

    def start_ranks(self) -> None:
        """Start ranks that succeed or fail some time later."""
        world = self.world
        self.ranks = self.state.generation
        self.run_number += 1
        run, self.failure = self.run_number, None
        lasts = world.chance.uniform(0.0, world.chance.choice(world.chances.lasts_s))
        if world.chance.random() < world.chances.failure:
            code = world.chance.randint(1, 139)
            no_retry = world.chance.choice(("", "", "no use"))
            failure = Failure(self.name, f"rank {self.index} died", code, no_retry=no_retry)
            world.after(lasts, lambda: self.fail(run, failure))
        else:
            world.after(lasts, lambda: self.succeed(run))

    def is_running(self, run: int) -> bool:
        """Whether the ranks of RUN, which nothing has ended yet, are here."""
        is_here = run == self.run_number and self.ranks is not None
        return is_here and self.state.phase == member.RUNNING

    def succeed(self, run: int) -> None:
        """Let the ranks succeed."""
        if self.is_running(run):
            self.ranks = None
            self.do(self.session.done)

    def fail(self, run: int, failure: Failure) -> None:
        """Let a rank fail, and those of others that depend on it."""
        if not self.is_running(run):
            return
        self.failure = failure
        self.do(lambda: self.session.failed(failure))
        self.end_ranks(self.grace())
        for other in self.world.launchers:
            if other is not self and self.world.chance.random() < 0.5:
                self.world.victim(other)

    def kill_at(self, at: float | None) -> None:
        """Let the guard kill the ranks at a moment, unless another one is named before."""
        self.killed_at = at

        def kill() -> None:
            if self.killed_at != at or self.ranks is None or not self.is_alive:
                return
            self.ranks = None
            failure = self.failure = Failure(self.name, "killed", 137)
            self.do(lambda: self.session.failed(failure))
            self.end_ranks(0.0)

        if at is not None:
            self.world.at(max(self.world.now, at - self.skew), kill)

    def tell_at(self, target: Target) -> None:
        """Let the guard tell a coordinator if this launcher is killed."""
        self.told = target

    def depart(self) -> None:
        """Let a host be asked to end, as by a scheduler that wants it back."""
        stays = self.session.serves and not self.session.may_hand_over
        if self.ranks is not None and self.state.config.may_change and not stays:
            self.departure = Failure(self.name, "interrupted", 143, is_departure=True)
            self.fail(self.run_number, self.departure)

    def grace(self) -> float:
        """Return how long the ranks take to end; some do only when they are killed."""
        patience = self.world.grace_s
        return self.world.chance.choice((self.world.chance.uniform(0.0, 1.0), patience))

    def end_ranks(self, after_s: float) -> None:
        """Let the ranks be gone after a while."""
        run = self.run_number

        def ended() -> None:
            if run == self.run_number and self.state.phase in {member.RUNNING, member.STOPPING}:
                self.ranks = None
                self.session.stopped(self.failure)

        self.after(after_s, ended)


class World:
    """All hosts, the network and the time."""

    kind: type[Launcher] = Launcher

    def __init__(
        self,
        seed: int,
        *,
        asked: Sequence[RendezvousConfig],
        chances: Chances,
        grace_s: float = 20.0,
    ) -> None:
        self.chance = random.Random(seed)
        self.chances = chances
        # By each host; without a store, the first one's hold.
        self.asked = asked
        self.config = asked[0]
        self.grace_s = grace_s
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        # By job and generation.
        self.rosters: dict[tuple[str, int], RosterMessage] = {}
        self.launchers: Sequence[Launcher] = [
            self.kind(self, i, name=f"host{i}") for i in range(len(asked))
        ]

    # Time -----------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Do CALL at a moment."""
        heapq.heappush(self.queue, (when, next(self.count), call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Do CALL in a while."""
        self.at(self.now + delay, call)

    def play(self, until: float) -> None:
        """Run what is due."""
        while self.queue and self.queue[0][0] <= until:
            when, _, call = heapq.heappop(self.queue)
            self.now = max(self.now, when)
            call()

    # The network ----------------------------------------------------------------------------

    def delay(self) -> float:
        """Return how long a message takes."""
        # Most messages are quick, some are lost and sent again.
        return self.chance.choice((0.001, 0.001, 0.001, 0.02, 0.3))

    def apart_until(self, host: Launcher, other: Launcher) -> float:
        """Return until when nothing gets through between HOST and OTHER."""
        return max(host.cut_until, other.cut_until)

    def called(self, name: str) -> Launcher:
        """Return the launcher NAME."""
        return next(launcher for launcher in self.launchers if launcher.name == name)

    def connect(self, host: Launcher, called: Launcher) -> End:
        """Connect HOST to the launcher that it has CALLED, and return its end."""
        assert called.listener is not None
        end, other = End(host, called), End(called, host)
        end.peer, other.peer = other, end
        called.do(partial(called.listener.opened, other))
        return end

    # What happens to hosts --------------------------------------------------------------------

    def die(self, host: Launcher, *, is_silent: bool) -> None:
        """Kill a launcher (its connection breaks, its guard ends the ranks) or its host."""
        if not host.is_alive or host.has_ended:
            return
        host.is_alive = False
        host.has_crashed = is_silent
        self.end_of_ranks(host, is_silent=is_silent)
        if not is_silent:
            host.listener = None
            for end in list(host.ends):
                end.close()

    def end_of_ranks(self, host: Launcher, *, is_silent: bool) -> None:
        """Let the guard of a launcher that was killed end its ranks, and tell the coordinator."""
        if is_silent:
            host.ranks = None
            return
        grace_s = self.chance.choice((0.1, 1.0, self.grace_s))
        until = self.now + grace_s
        if host.killed_at is not None:
            until = min(until, max(self.now, host.killed_at - host.skew))

        def gone() -> None:
            host.ranks = None
            self.tell_loss(host, has_ranks=False)

        self.at(until, gone)
        if self.chance.random() < 0.8:
            self.after(0.05, lambda: self.tell_loss(host, has_ranks=host.ranks is not None))

    def tell_loss(self, host: Launcher, *, has_ranks: bool) -> None:
        """Let the guard of HOST say that its launcher was killed to whom that last called."""
        if host.told is not None:
            leader = self.called(host.told[0])
            if leader.listener is not None and not host.is_apart_from(leader):
                self.connect(host, leader).send(LauncherKilled(host.name, has_ranks))

    def cut(self, host: Launcher, seconds: float) -> None:
        """Let nothing through to a host or from it."""
        host.cut_until = self.now + seconds
        shortest_s = min(asked.heartbeat_timeout_s for asked in self.asked)
        host.was_cut_long = host.was_cut_long or seconds > min(SHORT_CUT_S, 0.3 * shortest_s)

    def stop(self, host: Launcher, seconds: float) -> None:
        """Stop a launcher for a while."""
        host.stopped_until = max(host.stopped_until, self.now + seconds)
        host.was_cut_long = True

    def reset(self, host: Launcher) -> None:
        """Break the connections of HOST, as a firewall does, with all that is on its way."""
        for end in list(host.ends):
            for endpoint in (end, end.peer):
                endpoint.host.do(partial(endpoint.lose, "reset"))

    def jump(self, host: Launcher, seconds: float) -> None:
        """Let a host's clock go forward, as after a pause of the machine."""
        host.was_cut_long = True
        host.jump(seconds)
        if self.chance.random() < 0.5:
            # The guard is faster than the launcher.
            host.kill_at(host.killed_at)

    def victim(self, host: Launcher) -> None:
        """Let the ranks of a host fail of another's failure."""
        run = host.run_number
        failure = Failure(host.name, "connection closed by peer", 1, is_victim=True)
        self.after(self.chance.uniform(0.0, 0.2), lambda: host.fail(run, failure))

    def check_alone(self, host: Launcher) -> None:
        """Check that no ranks of an earlier generation are left anywhere."""
        for other in self.launchers:
            assert other.ranks is None or other.ranks == host.state.generation, (
                f"{other.name} still runs generation {other.ranks}, and {host.name} starts "
                f"{host.state.generation}"
            )

    def check_roster(self, host: Launcher, roster: RosterMessage) -> None:
        """Check that a generation of a job has one roster."""
        known = self.rosters.setdefault((roster.session, roster.generation), roster)
        assert known == roster, f"{host.name} has another roster of {roster.generation}"

    # A history --------------------------------------------------------------------------------

    def script(self) -> None:
        """Plan the faults, and when they happen."""
        chance, chances = self.chance, self.chances
        for host in self.launchers:
            if not host.is_local and chance.random() < chances.never_comes:
                host.is_alive = False
                continue
            is_late = host.index >= self.config.most or (
                self.config.is_elastic and chance.random() < chances.late
            )
            begin = chance.uniform(0.0, 60.0 if is_late and not host.is_local else 3.0)
            host.after(begin, host.begin)
            span = chance.choice(chances.spans_s)
            for likely, what in (
                (chances.kill, lambda h=host: self.die(h, is_silent=False)),
                (chances.crash, lambda h=host: self.die(h, is_silent=True)),
                (chances.reset, lambda h=host: self.reset(h)),
                (chances.reset, lambda h=host: self.reset(h)),
                (chances.jump, lambda h=host: self.jump(h, 60.0)),
                (chances.stop, lambda h=host: self.stop(h, chance.choice((2.0, 8.0, 12.0, 90.0)))),
                (chances.departs, host.depart),
            ):
                if chance.random() < likely:
                    self.after(chance.uniform(0.0, span), what)
            if not host.is_local and chance.random() < chances.short_cut:
                self.after(
                    chance.uniform(0.0, span),
                    lambda h=host: self.cut(h, chance.uniform(0.0, SHORT_CUT_S)),  # type: ignore[misc]
                )
            elif not host.is_local and chance.random() < chances.long_cut:
                seconds = chance.uniform(SHORT_CUT_S, 300.0)
                moment = chance.uniform(0.0, span)
                if chance.random() < 0.5:
                    # A firewall that says so.
                    self.after(moment, partial(self.reset, host))
                self.after(moment, partial(self.cut, host, seconds))

    def check(self, until: float) -> None:
        """Play, and check that all hosts ended, with the same result."""
        self.play(until)
        live = [host for host in self.launchers if host.is_alive]
        for host in live:
            assert host.has_ended, f"{host.name} still waits: {host.state}"
        if not self.launchers[0].is_alive or self.launchers[0].stopped_until:
            return
        alike: dict[int, Verdict] = {}
        ends: list[Failure | None] = []
        for host in live:
            if host.was_cut_long or host.is_turned_away():
                continue
            final = [verdict.failure for verdict in host.verdicts.values() if verdict.is_final]
            assert final in ([], ends := ends or final), f"{host.name}: {final}, not {ends}"
            if not host.rosters:
                # A host that never had a place knows only the first generation.
                continue
            for generation, verdict in host.verdicts.items():
                known = alike.setdefault(generation, verdict)
                assert known == verdict, f"{host.name}: {verdict}, not {known}"


AnyWorld = TypeVar("AnyWorld", bound=World)


def play(
    seed: int,
    world: type[AnyWorld],
    chances: Chances,
    *,
    has_store: bool = False,
    is_mixed: bool = False,
) -> AnyWorld:
    """Play the history of SEED in a WORLD, check what became of its hosts, and return it.

    IS_MIXED: each host has options of its own.
    """
    most = 1 + seed % 5
    # Every other history is of a job that goes on without a host that is lost; some have hosts that
    # stand by, and in some more come than have a place.
    least = max(1, most - 2) if seed % 2 else most
    spares = (0, 0, 1, 2)[seed // 5 % 4]
    surplus = (0, 0, 1)[seed // 20 % 3]
    config = RendezvousConfig(
        least,
        most,
        max_restarts=seed % 3,
        rdzv_timeout_s=30.0,
        elastic_timeout_s=5.0,
        spares=spares,
        has_store=has_store,
    )
    asked = [config] * (most + spares + surplus)
    if is_mixed:
        asked = [_other(config, random.Random(f"{seed}.{i}")) for i in range(len(asked))]
    made = world(seed, asked=asked, chances=chances)
    made.script()
    try:
        made.check(1000.0)
    except AssertionError as error:
        raise AssertionError(f"history {seed}: {error}") from error
    return made


def _other(config: RendezvousConfig, chance: random.Random) -> RendezvousConfig:
    """Return CONFIG as another command line may have them."""
    return config._replace(
        least=chance.randint(1, config.most),
        heartbeat_timeout_s=chance.choice((2.0, 4.0, 5.0, 10.0, 60.0)),
        elastic_timeout_s=chance.choice((1.0, 5.0, 20.0)),
        rdzv_timeout_s=chance.choice((10.0, 30.0)),
        max_restarts=chance.randint(0, 3),
        spares=chance.choice((0, config.spares)),
    )


def _ignore(_: object) -> None:
    """Do nothing."""
