"""Simulated launchers whose coordinator is elected by a simulated etcd, see simulation.py.

Everything that can happen to a host happens to the coordinator's, too.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation import Chances, Launcher, Wire, World

from fleetrun.run.events import TimerExpired
from fleetrun.session import coordinator, member, messages, state
from fleetrun.session.election import Election
from fleetrun.session.jobstore import StoreAnswer
from fleetrun.session.messages import LauncherKilled, Leave, Missing, RosterMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from fleetrun.session.config import RendezvousConfig
    from fleetrun.session.jobrecord import JobRecord, LeaderRecord
    from fleetrun.session.messages import FromCoordinator, FromMember

# How long an answer of etcd is awaited, and how late it may end a lease.
_TIMEOUT_S, _LATE_S = 2.0, 0.6
# How likely a host loses its way to etcd, and etcd is gone for a while.
_ASTRAY, _DOWN = 0.2, 0.2
# How likely a host is cut off from the others, and not from etcd.
_APART = 0.4


class Etcd:
    """Two keys and their leases, as `fleetrun.session.etcd` asks for them."""

    def __init__(self, world: ElectedWorld) -> None:
        self._world = world
        self._revision = 1
        self._leases: dict[int, tuple[int, float]] = {}
        # Value, revision and lease; no lease is 0.
        self._leader: tuple[str, int, int] | None = None
        self._record: tuple[str, int, int] | None = None
        # Nobody is answered before.
        self.down_until = 0.0

    def do(self, what: str, values: tuple[Any, ...]) -> Any:  # noqa: PLR0911 - one for each
        """Do what one of the launchers asks for."""
        self._expire()
        match what, values:
            case "look", ():
                leader, record = self._leader or ("", 0, 0), self._record or ("", 0, 0)
                return (*leader[:2], *record[:2], "")
            case "campaign", (value, ttl_s, record_revision):
                known = 0 if self._record is None else self._record[1]
                if self._leader is not None or known != record_revision:
                    return None
                lease = self._next()
                self._leases[lease] = (ttl_s, self._world.now + ttl_s)
                self._leader = (value, self._next(), lease)
                return [lease, self._leader[1]]
            case "renew", (lease,):
                if lease in self._leases:
                    ttl_s, _ = self._leases[lease]
                    late_s = self._world.chance.uniform(0.0, _LATE_S)
                    self._leases[lease] = (ttl_s, self._world.now + ttl_s + late_s)
                return lease in self._leases
            case "keep", (value, revision, lease) if self._is_led(revision):
                self._record = (value, self._next(), lease)
                return True
            case "leave", (revision, lease, is_final) if self._is_led(revision):
                self._record = None if is_final else self._record
                self._end(lease)
                return True
        return False

    def _is_led(self, revision: int) -> bool:
        return self._leader is not None and self._leader[1] == revision

    def _next(self) -> int:
        self._revision += 1
        return self._revision

    def _expire(self) -> None:
        for lease, (_, until) in list(self._leases.items()):
            if until < self._world.now:
                self._end(lease)

    def _end(self, lease: int) -> None:
        self._leases.pop(lease, None)
        if self._leader is not None and self._leader[2] == lease:
            self._leader = None
        if self._record is not None and lease and self._record[2] == lease:
            self._record = None


class Asker:
    """What a launcher asks of etcd, one question after the other, and its timers."""

    def __init__(self, host: ElectedLauncher) -> None:
        self._host = host
        self._queue: deque[tuple[Callable[[StoreAnswer], None], str, tuple[Any, ...]]] = deque()
        self._is_asking = False
        self._timers: dict[Hashable, int] = {}
        self._count = 0

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._queue)

    def ask(self, done: Callable[[StoreAnswer], None], what: str, *values: Any) -> None:
        """Ask, as JobStore does."""
        self._queue.append((done, what, values))
        self._go_on()

    def _go_on(self) -> None:
        if self._is_asking or not self._queue:
            return
        self._is_asking = True
        host, world = self._host, self._host.world
        done, what, values = self._queue[0]
        asked_at = host.clock()

        def answer(value: Any, trouble: str = "") -> None:
            if host.is_alive and not host.puts_off(lambda: answer(value, trouble)):
                self._queue.popleft()
                self._is_asking = False
                done(StoreAnswer(asked_at, value, trouble))
                self._go_on()

        def arrive() -> None:
            if host.is_cut() or world.now < max(world.etcd.down_until, host.astray_until):
                world.after(_TIMEOUT_S, lambda: answer(None, "no answer"))
                return
            if not host.is_alive:
                return
            value = world.etcd.do(what, values)

            def back() -> None:
                if host.is_cut():
                    world.after(_TIMEOUT_S, lambda: answer(None, "no answer"))
                else:
                    answer(value)

            world.after(world.delay(), back)

        world.after(world.delay(), arrive)

    def timer(self, key: Hashable, at: float | None, call: Callable[[], None]) -> None:
        """Call CALL at a moment of the host's clock."""
        self._count += 1
        number = self._timers[key] = self._count
        if at is None:
            return
        world, host = self._host.world, self._host

        def ring() -> None:
            if not host.is_alive or host.puts_off(ring):
                return
            if self._timers.get(key) == number:
                call()

        world.at(max(world.now, at - host.skew) + 1e-6, ring)


class ElectedLauncher(Launcher):
    """A launcher that may become the coordinator, as ElectedSession does."""

    world: ElectedWorld

    def __init__(self, world: ElectedWorld, index: int, *, name: str) -> None:
        super().__init__(world, index, name=name)
        self.is_local = False
        self.state = member.begin(self.asked, name, "", self.clock(), is_local=False)
        self.coordinator: state.State | None = None
        self.coordinator_timer = 0
        asker = Asker(self)
        self.election = Election(self.asked, name, asker, asker, self, clock=self.clock)  # type: ignore[arg-type]
        self.called: LeaderRecord | None = None
        # Until when it does not reach etcd, although it reaches the others.
        self.astray_until = 0.0
        # And until when it reaches etcd alone.
        self.apart_until = 0.0
        self.unkept: RosterMessage | None = None
        self.kept_generation = -1
        self.held: list[tuple[int, FromCoordinator]] = []

    # What the election wants.
    def may_lead(self) -> bool:
        """Whether it can coordinate."""
        is_here = self.is_alive and not self.has_ended
        return is_here and self.state.phase == member.JOINING and self.state.request is not None

    def listen(self, local: str) -> tuple[str, int]:
        """Listen where its name is."""
        del local
        return self.name, 1

    def unlisten(self) -> None:
        """Listen no more."""

    def lead(self, job: JobRecord | None, lost_at: float) -> None:
        """Coordinate."""
        if self.has_ended:
            self.election.leave(is_final=False)
            return
        self.world.hang_up(self)
        leader = self.election.leader
        assert leader is not None
        begun = (
            state.begin(self.state.config, self.clock(), leader.job)
            if job is None
            else state.resume(self.clock(), job, self.name, lost_at)
        )
        generation = max(begun.generation, self.state.generation)
        self.coordinator = begun._replace(generation=generation)
        self.is_local = True
        self.state = self.state._replace(
            config=begun.config, is_local=True, coordinator=self.name, generation=generation
        )
        self.world.connect(self, self)
        self.world.set_coordinator_timer(self)

    def follow(self) -> None:
        """Call another one, when it is time."""
        self.world.hang_up(self)
        self.called = None
        self.feed(member.Gone(self.clock()))

    def unfollow(self) -> None:
        """Call nobody."""
        self.seek()

    def resign(self, why: str, renewed_at: float) -> None:
        """Coordinate no more."""
        del why
        self.world.stop_serving(self)
        self.is_local = False
        self.state = self.state._replace(is_local=False, alive_at=renewed_at)
        self.feed(member.Gone(self.clock()))

    def renewed(self, at: float) -> None:
        """Put off the death of the ranks, as ElectedSession does."""
        if self.state.config.starts_again:
            self.let_guard_kill_at(at + self.state.config.guard_s)

    def end(self, why: str) -> None:
        """End."""
        self.feed(member.Gone(self.clock(), why))

    def note(self, text: str) -> None:
        """Print nothing."""

    # What differs from other launchers.
    def feed(self, event: member.Event) -> None:
        """Let the launcher take EVENT."""
        if self.puts_off(lambda: self.feed(event._replace(at=self.clock()))):
            return
        self.election.check()
        asked = self.state.config
        super().feed(event)
        if self.state.config != asked:
            self.election.config = self.state.config
        self.seek()

    def seek(self) -> None:
        """Look for a coordinator, or call it."""
        is_connected = self.coordinator is not None or self.wire is not None
        if not self.is_alive or self.has_ended or is_connected or self.state.phase == member.ENDED:
            return
        self.election.seek()
        leader = self.election.leader
        if leader == self.called or self.state.phase not in {member.IDLE, member.JOINING}:
            return
        self.called = leader
        if leader is not None:
            generation = max(self.state.generation, leader.generation)
            self.state = self.state._replace(coordinator=leader.host, generation=generation)
            self.world.dial(self)

    def perform(self, action: member.Action) -> None:
        """Do what the member wants."""
        match action:
            case member.Deliver(message=RosterMessage() as roster):
                self.election.take_part()
                self.world.check_roster(self, roster)
            case member.Deliver(message=Missing(stands_by=True)):
                self.election.take_part()
        super().perform(action)

    def depart(self) -> None:
        """Let a host be asked to end, the coordinator's, too."""
        is_local, self.is_local = self.is_local, False
        super().depart()
        self.is_local = is_local


class ElectedWorld(World):
    """All hosts, the network, the time, and etcd."""

    launchers: Sequence[ElectedLauncher]

    def __init__(self, seed: int, *, asked: Sequence[RendezvousConfig], chances: Chances) -> None:
        super().__init__(seed, asked=asked, chances=chances)
        self.etcd = Etcd(self)
        self.ends: dict[int, ElectedLauncher] = {}
        self.rosters: dict[tuple[str, int], RosterMessage] = {}

    def made(self) -> Sequence[ElectedLauncher]:
        """Return the launchers."""
        return [ElectedLauncher(self, i, name=f"host {i}") for i in range(len(self.asked))]

    # The coordinator's end of a wire.
    def connect(self, host: ElectedLauncher, leader: ElectedLauncher) -> None:
        """Connect HOST to LEADER."""
        host.has_hung_up = False
        host.wire = wire = Wire(next(self.count))
        self.wires[wire.number] = (wire, host)
        self.ends[wire.number] = leader
        if host is not leader:
            host.election.connected()
        host.feed(member.Connected(host.clock()))

    def feed_leader(self, leader: ElectedLauncher, event: state.Event) -> None:
        """Let LEADER take EVENT as the coordinator."""
        if leader.puts_off(lambda: self.feed_leader(leader, event._replace(at=leader.clock()))):
            return
        leader.election.check()
        if leader.coordinator is None or not leader.is_alive:
            return
        leader.coordinator, actions = coordinator.step(leader.coordinator, event)
        for action in actions:
            match action:
                case state.Send(connections=connections, message=message):
                    for number in connections:
                        self.send(leader, number, message)
                case state.Close(connection=connection):
                    wire = self.wires.get(connection)
                    if wire is not None:
                        self.after(0.001, lambda w=wire[0]: self.break_wire(w))  # type: ignore[misc]
        if leader.coordinator is not None and state.is_below_minimum(leader.coordinator):
            leader.election.give_way("it reaches too few")
        self.set_coordinator_timer(leader)

    def send(self, leader: ElectedLauncher, number: int, message: FromCoordinator) -> None:
        """Send MESSAGE when etcd has the roster, as ElectedSession does."""
        if (
            isinstance(message, RosterMessage)
            and leader.unkept is None
            and message.generation != leader.kept_generation
        ):
            leader.unkept = message
            assert leader.coordinator is not None
            record = state.record(leader.coordinator, message, leader.name)
            leader.election.keep(record, lambda: self.has_kept(leader))
        held = {one for one, _ in leader.held}
        is_held = leader.unkept is not None and (
            isinstance(message, RosterMessage) or number in held
        )
        if is_held and not isinstance(message, messages.Acknowledged):
            leader.held.append((number, message))
        else:
            self.to_member(number, message)

    def has_kept(self, leader: ElectedLauncher) -> None:
        """Send what had to wait."""
        if leader.unkept is None:
            return
        leader.kept_generation, leader.unkept = leader.unkept.generation, None
        if not leader.state.config.starts_again:
            leader.election.fix()
        held, leader.held = leader.held, []
        for number, message in held:
            self.send(leader, number, message)

    def set_coordinator_timer(self, leader: ElectedLauncher) -> None:
        """Let time pass until something is due."""
        leader.coordinator_timer += 1
        timer = leader.coordinator_timer
        if leader.coordinator is None:
            return
        due = max(self.now, leader.coordinator.wake_at - leader.skew)

        def elapse() -> None:
            if timer == leader.coordinator_timer:
                self.feed_leader(leader, TimerExpired(leader.clock()))

        self.at(due + 1e-6, elapse)

    def set_timer(self) -> None:
        """Set none: each coordinator has its own."""

    def stop_serving(self, leader: ElectedLauncher) -> None:
        """Let all connections to LEADER break."""
        leader.coordinator = None
        leader.unkept = None
        leader.held.clear()
        for number, end in list(self.ends.items()):
            if end is leader and number in self.wires:
                wire, host = self.wires[number]
                if host is leader:
                    leader.wire = None
                    self.break_wire(wire)
                elif not leader.is_cut() and self.now >= leader.apart_until:
                    host.has_hung_up = self.chance.random() < 0.8
                    self.after(self.delay(), lambda w=wire: self.break_wire(w))  # type: ignore[misc]

    # The network.
    def to_coordinator(self, host: Launcher, message: FromMember) -> None:
        """Send a message to the coordinator that HOST has called."""
        wire = host.wire
        if wire is None:
            return
        leader = self.ends[wire.number]

        def call() -> None:
            received = state.Received(
                wire.number,
                message,
                leader.clock(),
                f"10.0.0.{host.index}",
                f"10.0.0.{leader.index}",
                is_local=host is leader,
            )
            self.feed_leader(leader, received)

        self.deliver(wire, host, call, up=True)

    def deliver(self, wire: Wire, host: Launcher, call: Callable[[], None], *, up: bool) -> None:
        """Let nothing through while either end is cut off."""
        leader, ends = self.ends[wire.number], host
        assert isinstance(ends, ElectedLauncher)

        def arrive() -> None:
            if not leader.is_alive or not wire.is_open:
                return
            until = max(leader.cut_until, leader.apart_until, ends.apart_until)
            if host is not leader and self.now < until:
                self.at(until + 0.001, arrive)
                return
            call()

        super().deliver(wire, host, arrive, up=up)

    def to_coordinator_leave(self, host: Launcher) -> None:
        """Let a launcher end; a coordinator goes on until all have heard it."""
        assert isinstance(host, ElectedLauncher)
        known = host.coordinator
        hands_over = (
            known is not None
            and known.phase == state.FORMING
            and host.departure is not None
            and known.config.may_change
        )
        if hands_over:
            host.state = host.state._replace(phase=member.ENDED)
            host.has_ended, host.ended_at = True, self.now
            self.stop_serving(host)
            host.election.leave(is_final=False)
            return
        if host.state.phase == member.ENDED:
            self.to_coordinator(host, Leave(None))
        host.say(Leave(host.departure))
        host.has_ended = True
        host.ended_at = self.now
        host.election.leave(is_final=True)

    def dial(self, host: Launcher) -> None:
        """Let a launcher call the coordinator that it knows of, until it gets through."""
        assert isinstance(host, ElectedLauncher)
        called = host.called
        if called is None:
            return
        (leader,) = (one for one in self.launchers if one.name == called.host)

        def ask() -> None:
            if not host.is_alive or host.has_ended or host.called != called or host.wire:
                return
            if host.coordinator is not None or host.puts_off(ask):
                return
            is_there = leader.is_alive and leader.coordinator is not None
            are_apart = self.now < max(host.apart_until, leader.apart_until)
            if host.is_cut() or leader.is_cut() or are_apart or not is_there:
                self.after(0.5, ask)
                is_unknown = is_there or host.is_cut() or leader.is_cut() or are_apart
                if host.has_hung_up and not is_unknown:
                    host.feed(member.Gone(host.clock()))
                return
            self.connect(host, leader)

        self.after(self.delay(), ask)

    def tell_of_break(self, wire: Wire) -> None:
        """Let the coordinator notice that a connection has broken."""
        leader = self.ends[wire.number]
        self.feed_leader(leader, state.Broken(wire.number, leader.clock()))

    def die(self, host: Launcher, *, is_silent: bool) -> None:
        """Kill a launcher or its host."""
        assert isinstance(host, ElectedLauncher)
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
            self.deliver(wire, host, lambda: self.break_wire(wire), up=True)

    def tell_loss(self, host: Launcher, *, has_ranks: bool) -> None:
        """Let the guard of HOST say that its launcher was killed to whom that last called."""
        assert isinstance(host, ElectedLauncher)
        called = host.called
        leaders = [one for one in self.launchers if called and one.name == called.host]
        if not leaders or host.is_cut() or leaders[0].is_cut() or leaders[0] is host:
            return
        leader, message = leaders[0], LauncherKilled(host.name, "", has_ranks)
        address = f"10.0.0.{host.index}"

        def arrive() -> None:
            at = leader.clock()
            self.feed_leader(leader, state.Received(next(self.count), message, at, address))

        self.after(self.delay(), arrive)

    def reset(self, host: Launcher) -> None:
        """Break a connection; a coordinator has none to itself."""
        if host.wire is not None and self.ends[host.wire.number] is not host:
            super().reset(host)

    def jump(self, host: Launcher, seconds: float) -> None:
        """Let a host's clock go forward, as after a pause of the machine."""
        assert isinstance(host, ElectedLauncher)
        host.skew += seconds
        host.was_cut_long = True
        # Timers that are due are late.
        self.after(0.0, host.election.check)
        host.set_timer()
        self.set_coordinator_timer(host)

    def begin(self, host: Launcher) -> None:
        """Let a launcher begin to look for the coordinator."""
        assert isinstance(host, ElectedLauncher)
        host.seek()

    def script(self) -> None:
        """Plan what goes wrong, with the way to etcd alone, too."""
        super().script()
        for host in self.launchers:
            if self.chance.random() < _ASTRAY:
                begin = self.chance.uniform(0.0, 40.0)
                until = begin + self.chance.uniform(0.0, 60.0)
                self.after(begin, partial(setattr, host, "astray_until", until))

    # What must hold.
    def check_roster(self, host: ElectedLauncher, roster: RosterMessage) -> None:
        """See that a generation of a job has one roster."""
        leader = host.election.leader
        if leader is None:
            # It has reached another term of the last one before etcd has told it so.
            return
        known = self.rosters.setdefault((leader.job, roster.generation), roster)
        assert known == roster, f"{host.name} has another roster of {roster.generation}"

    def check(self, until: float) -> None:
        """Play, and see that all ended, and that they agree where nobody was lost."""
        if self.chance.random() < _DOWN:
            self.etcd.down_until = self.chance.uniform(0.0, 30.0)
        self.play(until)
        live = [host for host in self.launchers if host.is_alive]
        for host in live:
            assert host.has_ended, f"{host.name} still waits: {host.state}"
        for job_generation, roster in self.rosters.items():
            placed = {one.launcher for one in roster.entries}
            ends = {
                host.name: host.verdicts[job_generation[1]].failure is None
                for host in live
                if host.name in placed
                and job_generation[1] in host.verdicts
                and not host.was_cut_long
            }
            assert len({*ends.values()}) < 2 or self.any_lost(), (job_generation, ends)

    def any_lost(self) -> bool:
        """Whether some host was lost, with whom a verdict may have gone."""
        return any(not host.is_alive or host.was_cut_long for host in self.launchers) or bool(
            self.etcd.down_until or any(host.astray_until for host in self.launchers)
        )


class ApartWorld(ElectedWorld):
    """The same, where hosts may be cut off from the others, and not from etcd."""

    def script(self) -> None:
        """Plan that, too."""
        super().script()
        for host in self.launchers:
            if self.chance.random() < _APART:
                self.after(self.chance.uniform(0.0, 40.0), partial(self.part, host))

    def part(self, host: ElectedLauncher) -> None:
        """Cut HOST off from the others."""
        host.apart_until = self.now + self.chance.uniform(0.0, 120.0)
        host.was_cut_long = True
