"""A session of simulated launchers: the real protocol, with a network, clocks and ranks of chance.

One seed is one history. Nothing here waits or sleeps; time is a number.
"""

from __future__ import annotations

import heapq
import itertools
import random
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.run.events import Failure, TimerExpired
from fleetrun.session import coordinator, member, state
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import (
    Done,
    Failed,
    HostReady,
    JoinRequest,
    LauncherKilled,
    Leave,
    Missing,
    RosterMessage,
    Start,
    Stop,
    Stopped,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.session.messages import FromCoordinator, FromMember

# A firewall opens again, or a host is for ever cut off.
SHORT_CUT_S = 3.0


class Chances(NamedTuple):
    """How likely things go wrong in a history, for each host."""

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
    duplicate: float = 0.03
    no_plan: float = 0.03
    # A host is asked to end, and the job may go on without it.
    departs: float = 0.1
    # A host comes while the job may run already.
    late: float = 0.2
    # Something is wrong with a host before another generation.
    trouble: float = 0.1
    # One of these is how long ranks last at most, and until when something goes wrong.
    lasts_s: tuple[float, ...] = (3.0, 8.0, 40.0)
    spans_s: tuple[float, ...] = (1.0, 10.0, 40.0)


class Wire:
    """A connection: messages arrive in order, each after a while, until it breaks."""

    def __init__(self, number: int, host: Launcher, leader: Launcher) -> None:
        self.number = number
        # Whose it is, and whom that has called.
        self.host, self.leader = host, leader
        self.is_open = True
        # When the last message arrives, each way.
        self.arrival = {True: 0.0, False: 0.0}


class Launcher:
    """A host: its launcher, its ranks, its clock."""

    def __init__(self, world: World, index: int, *, name: str) -> None:
        self.world = world
        self.index = index
        self.name = name
        self.skew = world.chance.uniform(0.0, 1000.0)
        self.is_alive = True
        self.is_local = index == 0
        self.wire: Wire | None = None
        # What it knows as the coordinator, which the first host is, or one that is elected.
        self.coordinator: state.State | None = None
        self.coordinator_timer = 0
        self.cut_until = 0.0
        self.was_cut_long = False
        # The generation of the ranks that run here, and until when they cannot but end.
        self.ranks: int | None = None
        self.rosters: dict[int, RosterMessage] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.has_ended = False
        self.ended_at = 0.0
        self.failure: Failure | None = None
        # Why it leaves a job that can go on without it.
        self.departure: Failure | None = None
        self.run = 0
        self.timer = 0
        # What its options say; the job has what those of the coordinator's host say.
        self.asked = world.asked[index]
        # When the guard kills the ranks, if the launcher cannot.
        self.kill_at: float | None = None
        self.stopped_until = 0.0
        # Whether the last connection was ended in order, by the coordinator's end.
        self.has_hung_up = False
        self.state = member.begin(self.asked, name, "host 0", self.clock(), is_local=self.is_local)

    def clock(self) -> float:
        """Return the time on this host."""
        return self.world.now + self.skew

    def is_cut(self) -> bool:
        """Whether nothing gets through to it now."""
        return self.world.now < self.cut_until

    def is_turned_away(self) -> bool:
        """Whether it came when there was no place, and never had one."""
        ends = [one.failure.what for one in self.verdicts.values() if one.failure is not None]
        return not self.rosters and any("refused this host" in what for what in ends)

    def feed(self, event: member.Event) -> None:
        """Let the launcher take EVENT."""
        if not self.is_alive or self.has_ended:
            return
        if self.puts_off(lambda: self.feed(event._replace(at=self.clock()))):
            return
        before = self.state.phase
        self.state, actions = member.step(self.state, event)
        assert not (before == member.ENDED and actions)
        for action in actions:
            self.perform(action)
        self.set_timer()

    def say(self, message: Done | Failed | Stopped | Leave) -> None:
        """Let the launcher say what becomes of its ranks, or that it ends."""
        self.feed(member.Said(message, self.clock()))

    def puts_off(self, call: Callable[[], None]) -> bool:
        """Do CALL later, where the launcher is stopped now."""
        is_stopped = self.world.now < self.stopped_until
        if is_stopped:
            self.world.at(self.stopped_until, call)
        return is_stopped

    def set_timer(self) -> None:
        """Let time pass until something is due."""
        self.timer += 1
        timer = self.timer
        due = max(self.world.now, self.state.wake_at - self.skew)

        def elapse() -> None:
            if timer == self.timer:
                self.feed(TimerExpired(self.clock()))

        self.world.at(due + 1e-6, elapse)

    def coordinate(self, event: state.Event) -> None:
        """Let the launcher, which is the coordinator, take EVENT."""
        if self.puts_off(lambda: self.coordinate(event._replace(at=self.clock()))):
            return
        if self.coordinator is None or not self.is_alive:
            return
        self.coordinator, actions = coordinator.step(self.coordinator, event)
        for action in actions:
            match action:
                case state.Send(connections=connections, message=message):
                    for number in connections:
                        self.send(number, message)
                case state.Close(connection=connection):
                    wire = self.world.wires.get(connection)
                    if wire is not None:
                        self.world.after(0.001, partial(self.world.break_wire, wire))
        self.set_coordinator_timer()

    def send(self, number: int, message: FromCoordinator) -> None:
        """Send the coordinator's MESSAGE."""
        if isinstance(message, RosterMessage):
            known = self.world.generations.setdefault(message.generation, message)
            assert known == message, "the coordinator made two rosters"
        self.world.to_member(number, message)

    def set_coordinator_timer(self) -> None:
        """Let time pass until something is due for the coordinator."""
        self.coordinator_timer += 1
        timer = self.coordinator_timer
        if self.coordinator is None:
            return
        due = max(self.world.now, self.coordinator.wake_at - self.skew)

        def elapse() -> None:
            if timer == self.coordinator_timer:
                self.coordinate(TimerExpired(self.clock()))

        self.world.at(due + 1e-6, elapse)

    def called(self) -> Launcher | None:
        """Return whom it calls."""
        return self.world.launchers[0]

    def begin(self) -> None:
        """Begin to take part; the first host coordinates."""
        if not self.is_local:
            self.world.dial(self)
            return
        self.world.connect(self, self)
        self.set_coordinator_timer()

    def perform(self, action: member.Action) -> None:  # noqa: C901 - one case for each kind
        """Do what the member wants."""
        world = self.world
        match action:
            case member.SendToCoordinator(message=message):
                world.to_coordinator(self, message)
            case member.Redial():
                world.hang_up(self)
                world.dial(self)
            case member.Deliver(message=RosterMessage() as roster):
                known = self.rosters.setdefault(roster.generation, roster)
                assert known == roster, "two rosters in one generation"
                failure = None
                if world.chance.random() < world.chances.no_plan:
                    failure = Failure(self.name, "no plan", 3, no_retry="no plan helps")
                said = HostReady(roster.generation)
                event = member.Said(
                    said if failure is None else Stopped(roster.generation, failure), self.clock()
                )
                world.after(0.01, lambda: self.feed(event._replace(at=self.clock())))
            case member.Deliver(message=Start()):
                world.check_alone(self)
                self.start_ranks()
            case member.Deliver(message=Stop()):
                self.end_ranks(self.grace())
            case member.Fence():
                self.ranks = None
                self.end_ranks(0.01)
            case member.KillAt(at=at):
                self.let_guard_kill_at(at)
            case member.Deliver(message=Missing()):
                pass
            case member.Deliver(message=Verdict() as verdict):
                assert self.ranks is None, "a verdict while ranks run"
                self.conclude(verdict)

    def conclude(self, verdict: Verdict) -> None:
        """Take the verdict, and go on or end."""
        assert verdict.generation not in self.verdicts, "two verdicts in one generation"
        self.verdicts[verdict.generation] = verdict
        if verdict.is_final or self.departure is not None:
            self.world.to_coordinator_leave(self)
        else:
            self.world.after(self.world.chance.uniform(0.1, 1.0), self.offer)

    def offer(self) -> None:
        """Join the next generation."""
        if self.is_alive and not self.has_ended and self.state.phase == member.IDLE:
            ports = (7000 + self.state.generation,)
            is_ill = self.world.chance.random() < self.world.chances.trouble
            trouble = "its disk is full" if is_ill and self.state.generation else ""
            offer = JoinRequest(self.name, self.name, self.index, ports, ((),), trouble=trouble)
            self.feed(member.JoinRequested(offer, self.clock()))
            generation = self.state.generation
            patience = max(asked.rdzv_timeout_s for asked in self.world.asked) + 5.0
            self.world.after(patience, lambda: self.lose_patience(generation))

    def lose_patience(self, generation: int) -> None:
        """Give up what nobody has answered."""
        if self.state.stands_by:
            return
        gathering = (member.IDLE, member.JOINING, member.PLANNING, member.READY)
        if self.state.generation == generation and self.state.phase in gathering:
            self.world.to_coordinator_leave(self)

    # Ranks ----------------------------------------------------------------------------------

    def start_ranks(self) -> None:
        """Start ranks that end well or fail, some time."""
        world = self.world
        self.ranks = self.state.generation
        self.run += 1
        run, self.failure = self.run, None
        lasts = world.chance.uniform(0.0, world.chance.choice(world.chances.lasts_s))
        if world.chance.random() < world.chances.failure:
            code = world.chance.randint(1, 139)
            no_retry = world.chance.choice(("", "", "no use"))
            failure = Failure(self.name, f"rank {self.index} died", code, no_retry=no_retry)
            world.after(lasts, lambda: self.fail(run, failure))
        else:
            world.after(lasts, lambda: self.succeed(run))

    def succeed(self, run: int) -> None:
        """Let the ranks end well."""
        if run == self.run and self.ranks is not None and self.state.phase == member.RUNNING:
            self.ranks = None
            self.say(Done(self.state.generation))

    def fail(self, run: int, failure: Failure) -> None:
        """Let a rank fail, and those of others that depend on it."""
        if run != self.run or self.ranks is None or self.state.phase != member.RUNNING:
            return
        self.failure = failure
        self.say(Failed(self.state.generation, failure))
        self.end_ranks(self.grace())
        for other in self.world.launchers:
            if other is not self and self.world.chance.random() < 0.5:
                self.world.victim(other)

    def let_guard_kill_at(self, at: float | None) -> None:
        """Let the guard kill the ranks at a moment, unless another one is named before."""
        self.kill_at = at

        def kill() -> None:
            if self.kill_at != at or self.ranks is None or not self.is_alive:
                return
            self.ranks, self.failure = None, Failure(self.name, "killed", 137)
            self.say(Failed(self.state.generation, self.failure))
            self.end_ranks(0.0)

        if at is not None:
            self.world.at(max(self.world.now, at - self.skew), kill)

    def depart(self) -> None:
        """Let a host be asked to end, as by a scheduler that wants it back."""
        if self.ranks is not None and self.state.config.may_change and not self.is_local:
            self.departure = Failure(self.name, "interrupted", 143, is_departure=True)
            self.fail(self.run, self.departure)

    def grace(self) -> float:
        """Return how long the ranks take to end; some do only when they are killed."""
        patience = self.world.grace_s
        return self.world.chance.choice((self.world.chance.uniform(0.0, 1.0), patience))

    def end_ranks(self, after_s: float) -> None:
        """Let the ranks be gone after a while."""
        run = self.run

        def ended() -> None:
            if self.puts_off(ended):
                return
            stops = (member.RUNNING, member.STOPPING)
            if run == self.run and self.is_alive and self.state.phase in stops:
                self.ranks = None
                self.say(Stopped(self.state.generation, self.failure))

        self.world.after(after_s, ended)


class World:
    """All hosts, the network and the time."""

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
        self.wires: dict[int, Wire] = {}
        self.messages = 0
        self.generations: dict[int, RosterMessage] = {}
        self.launchers = self.made()

    def made(self) -> Sequence[Launcher]:
        """Return the launchers, of which the first coordinates."""
        launchers = [Launcher(self, i, name=f"host {i}") for i in range(len(self.asked))]
        launchers[0].coordinator = state.begin(self.config, launchers[0].clock())
        return launchers

    # Time -----------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Do CALL at a moment."""
        heapq.heappush(self.queue, (when, next(self.count), call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Do CALL in a while."""
        self.at(self.now + delay, call)

    def play(self, until: float) -> None:
        """Let happen what is due."""
        while self.queue and self.queue[0][0] <= until:
            when, _, call = heapq.heappop(self.queue)
            self.now = max(self.now, when)
            call()

    # The network ----------------------------------------------------------------------------

    def delay(self) -> float:
        """Return how long a message takes."""
        # Most messages are quick, some are lost and sent again.
        return self.chance.choice((0.001, 0.001, 0.001, 0.02, 0.3))

    def apart_until(self, host: Launcher, leader: Launcher) -> float:
        """Return until when nothing gets through between HOST and LEADER."""
        return 0.0 if host is leader else max(host.cut_until, leader.cut_until)

    def deliver(self, wire: Wire, call: Callable[[], None], *, up: bool) -> None:
        """Let CALL happen at the other end of WIRE, in order, if it gets there."""
        self.messages += 1
        host, leader = wire.host, wire.leader
        start = max(self.now, self.apart_until(host, leader))
        arrival = max(wire.arrival[up], start + (0.0 if host is leader else self.delay()))
        wire.arrival[up] = arrival

        def arrive() -> None:
            if not wire.is_open:
                return
            until = self.apart_until(host, leader)
            if self.now < until:
                self.at(until + 0.001, arrive)
                return
            call()

        self.at(arrival, arrive)

    def to_coordinator(self, host: Launcher, message: FromMember) -> None:
        """Send a message to the coordinator that HOST has called."""
        wire = host.wire
        if wire is None:
            return
        leader = wire.leader

        def call() -> None:
            addresses = f"10.0.0.{host.index}", f"10.0.0.{leader.index}"
            received = state.Received(wire.number, message, leader.clock(), *addresses)
            leader.coordinate(received._replace(is_local=host is leader))

        self.deliver(wire, call, up=True)

    def to_coordinator_leave(self, host: Launcher) -> None:
        """Let a launcher end."""
        if host.state.phase == member.ENDED:
            self.to_coordinator(host, Leave(None))
        host.say(Leave(host.departure))
        host.has_ended = True
        host.ended_at = self.now

    def to_member(self, number: int, message: FromCoordinator) -> None:
        """Send a message to a member."""
        wire = self.wires.get(number)
        if wire is None:
            return
        host = wire.host

        def call() -> None:
            if host.wire is wire:
                host.feed(member.Heard(message, host.clock()))

        self.deliver(wire, call, up=False)

    def dial(self, host: Launcher) -> None:
        """Let a launcher call the coordinator that it knows of, until it gets through."""
        leader = host.called()
        if leader is None:
            return

        def ask() -> None:
            is_over = not host.is_alive or host.has_ended or host.called() is not leader
            if is_over or host.wire or host.coordinator is not None or host.puts_off(ask):
                return
            is_there = leader.is_alive and leader.coordinator is not None
            are_apart = self.now < self.apart_until(host, leader)
            if is_there and not are_apart:
                self.connect(host, leader)
                return
            self.after(0.5, ask)
            if host.has_hung_up and not are_apart and not is_there:
                host.feed(member.Gone(host.clock()))

        self.after(self.delay(), ask)

    def connect(self, host: Launcher, leader: Launcher) -> None:
        """Connect HOST to LEADER."""
        host.has_hung_up = False
        host.wire = wire = Wire(next(self.count), host, leader)
        self.wires[wire.number] = wire
        host.feed(member.Connected(host.clock()))

    def hang_up(self, host: Launcher) -> None:
        """Let a launcher give its connection up."""
        wire, host.wire = host.wire, None
        if wire is None:
            return
        # What is on its way still arrives; the end of it comes last.
        self.deliver(wire, lambda: self.break_wire(wire), up=True)

    def break_wire(self, wire: Wire) -> None:
        """Let a connection break, with all that is on its way."""
        if not wire.is_open:
            return
        wire.is_open = False
        del self.wires[wire.number]
        host, leader = wire.host, wire.leader
        leader.coordinate(state.Broken(wire.number, leader.clock()))

        def notice() -> None:
            if host.wire is wire:
                host.wire = None
                host.feed(member.Disconnected(host.clock()))

        self.after(0.001, notice)

    def stop_serving(self, leader: Launcher) -> None:
        """Let all connections to LEADER, which coordinates no more, break."""
        leader.coordinator = None
        for wire in [wire for wire in self.wires.values() if wire.leader is leader]:
            host = wire.host
            if host is leader:
                leader.wire = None
                self.break_wire(wire)
            elif self.now >= self.apart_until(host, leader):
                # What was not read makes the kernel reset the connection.
                host.has_hung_up = self.chance.random() < 0.8
                self.after(self.delay(), partial(self.break_wire, wire))

    # What happens to hosts --------------------------------------------------------------------

    def die(self, host: Launcher, *, is_silent: bool) -> None:
        """Kill a launcher (its connection breaks, its guard ends the ranks) or its host."""
        if not host.is_alive or host.has_ended:
            return
        wire = host.wire
        host.is_alive = False
        self.end_of_ranks(host, is_silent=is_silent)
        if is_silent:
            return
        if host.coordinator is not None:
            self.stop_serving(host)
        elif wire is not None:
            self.deliver(wire, lambda: self.break_wire(wire), up=True)

    def end_of_ranks(self, host: Launcher, *, is_silent: bool) -> None:
        """Let the guard of a launcher that was killed end its ranks, and tell the coordinator."""
        if is_silent:
            host.ranks = None
            return
        grace_s = self.chance.choice((0.1, 1.0, self.grace_s))
        until = self.now + grace_s
        if host.kill_at is not None:
            until = min(until, max(self.now, host.kill_at - host.skew))

        def gone() -> None:
            host.ranks = None
            self.tell_loss(host, has_ranks=False)

        self.at(until, gone)
        if self.chance.random() < 0.8:
            self.after(0.05, lambda: self.tell_loss(host, has_ranks=host.ranks is not None))

    def tell_loss(self, host: Launcher, *, has_ranks: bool) -> None:
        """Let the guard of HOST say that its launcher was killed to whom that last called."""
        leader = host.called()
        if leader is None or leader is host or self.now < self.apart_until(host, leader):
            return
        message = LauncherKilled(host.name, "", has_ranks)

        def arrive() -> None:
            at, address = leader.clock(), f"10.0.0.{host.index}"
            leader.coordinate(state.Received(next(self.count), message, at, address))

        self.after(self.delay(), arrive)

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
        """Break a connection, as a firewall does; a coordinator has none to itself."""
        if host.wire is not None and host.wire.leader is not host:
            self.break_wire(host.wire)

    def jump(self, host: Launcher, seconds: float) -> None:
        """Let a host's clock go forward, as after a pause of the machine."""
        host.skew += seconds
        host.was_cut_long = True
        if self.chance.random() < 0.5:
            # The guard is faster than the launcher.
            host.let_guard_kill_at(host.kill_at)
        host.set_timer()
        host.set_coordinator_timer()

    def victim(self, host: Launcher) -> None:
        """Let the ranks of a host fail of another's failure."""
        run = host.run
        failure = Failure(host.name, "connection closed by peer", 1, is_victim=True)
        self.after(self.chance.uniform(0.0, 0.2), lambda: host.fail(run, failure))

    def check_alone(self, host: Launcher) -> None:
        """See that no ranks of an earlier generation are left anywhere."""
        for other in self.launchers:
            assert other.ranks is None or other.ranks == host.state.generation, (
                f"{other.name} still runs generation {other.ranks}, and {host.name} starts "
                f"{host.state.generation}"
            )

    # A history --------------------------------------------------------------------------------

    def script(self) -> None:
        """Plan what goes wrong, and when."""
        chance, chances = self.chance, self.chances
        for host in self.launchers:
            if not host.is_local and chance.random() < chances.never_comes:
                host.is_alive = False
                continue
            is_late = host.index >= self.config.most or (
                self.config.is_elastic and chance.random() < chances.late
            )
            begin = chance.uniform(0.0, 60.0 if is_late and not host.is_local else 3.0)
            self.after(begin, host.begin)
            self.after(begin, host.offer)
            self.after(begin, host.set_timer)
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
        """Play, and see that all ended, and ended alike."""
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
            final = [one.failure for one in host.verdicts.values() if one.is_final]
            assert final in ([], ends := ends or final), f"{host.name}: {final}, not {ends}"
            if not host.rosters:
                # Whoever never had a place knows no generation but the first.
                continue
            for generation, verdict in host.verdicts.items():
                known = alike.setdefault(generation, verdict)
                assert known == verdict, f"{host.name}: {verdict}, not {known}"


def play(
    seed: int,
    world: type[World],
    chances: Chances,
    *,
    has_store: bool = False,
    is_mixed: bool = False,
) -> None:
    """Play the history of SEED in a WORLD, and check what became of its hosts.

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
        message = f"history {seed}: {error}"
        raise AssertionError(message) from error


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
