"""Simulated launchers whose coordinator is elected by a simulated etcd, see simulation.py.

Everything that can happen to a host happens to the coordinator's, too.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation import Chances, Launcher, World

from fleetrun.session import member, messages, state
from fleetrun.session.election import Election
from fleetrun.session.jobstore import StoreAnswer
from fleetrun.session.messages import Missing, RosterMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from fleetrun.session.config import RendezvousConfig
    from fleetrun.session.jobrecord import JobRecord, LeaderRecord
    from fleetrun.session.messages import FromCoordinator

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
        asker = Asker(self)
        self.election = Election(self.asked, name, asker, asker, self, clock=self.clock)  # type: ignore[arg-type]
        self.leader: LeaderRecord | None = None
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
        self.set_coordinator_timer()

    def follow(self) -> None:
        """Call another one, when it is time."""
        self.world.hang_up(self)
        self.leader = None
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

    def begin(self) -> None:
        """Begin to look for the coordinator."""
        self.seek()

    def called(self) -> Launcher | None:
        """Return whom it knows as the coordinator."""
        name = None if self.leader is None else self.leader.host
        return next((one for one in self.world.launchers if one.name == name), None)

    def coordinate(self, event: state.Event) -> None:
        """Let the launcher, if it still is the coordinator, take EVENT."""
        self.election.check()
        super().coordinate(event)
        if self.coordinator is not None and state.is_below_minimum(self.coordinator):
            self.election.give_way("it reaches too few")

    def send(self, number: int, message: FromCoordinator) -> None:
        """Send MESSAGE when etcd has the roster, as ElectedSession does."""
        is_roster = isinstance(message, RosterMessage)
        if (
            isinstance(message, RosterMessage)
            and self.unkept is None
            and message.generation != self.kept_generation
        ):
            self.unkept = message
            assert self.coordinator is not None
            record = state.record(self.coordinator, message, self.name)
            self.election.keep(record, self.has_kept)
        held = {one for one, _ in self.held}
        is_held = self.unkept is not None and (is_roster or number in held)
        if is_held and not isinstance(message, messages.Acknowledged):
            self.held.append((number, message))
        else:
            self.world.to_member(number, message)

    def has_kept(self) -> None:
        """Send what had to wait."""
        if self.unkept is None:
            return
        self.kept_generation, self.unkept = self.unkept.generation, None
        if not self.state.config.starts_again:
            self.election.fix()
        held, self.held = self.held, []
        for number, message in held:
            self.send(number, message)

    def seek(self) -> None:
        """Look for a coordinator, or call it."""
        is_connected = self.coordinator is not None or self.wire is not None
        if not self.is_alive or self.has_ended or is_connected or self.state.phase == member.ENDED:
            return
        self.election.seek()
        leader = self.election.leader
        if leader == self.leader or self.state.phase not in {member.IDLE, member.JOINING}:
            return
        self.leader = leader
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
        self.rosters: dict[tuple[str, int], RosterMessage] = {}

    def made(self) -> Sequence[ElectedLauncher]:
        """Return the launchers."""
        return [ElectedLauncher(self, i, name=f"host {i}") for i in range(len(self.asked))]

    def connect(self, host: Launcher, leader: Launcher) -> None:
        """Connect HOST to LEADER."""
        assert isinstance(host, ElectedLauncher)
        if host is not leader:
            host.election.connected()
        super().connect(host, leader)

    def stop_serving(self, leader: Launcher) -> None:
        """Let all connections to LEADER break, and forget what waits for etcd."""
        assert isinstance(leader, ElectedLauncher)
        leader.unkept = None
        leader.held.clear()
        super().stop_serving(leader)

    def apart_until(self, host: Launcher, leader: Launcher) -> float:
        """Return until when nothing gets through between HOST and LEADER, which may reach etcd."""
        assert isinstance(host, ElectedLauncher)
        assert isinstance(leader, ElectedLauncher)
        until = super().apart_until(host, leader)
        return until if host is leader else max(until, host.apart_until, leader.apart_until)

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
        super().to_coordinator_leave(host)
        host.election.leave(is_final=True)

    def jump(self, host: Launcher, seconds: float) -> None:
        """Let a host's clock go forward, as after a pause of the machine."""
        assert isinstance(host, ElectedLauncher)
        super().jump(host, seconds)
        # Timers that are due are late.
        self.after(0.0, host.election.check)

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
