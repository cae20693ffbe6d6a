"""Simulated launchers whose coordinator is elected by a simulated etcd, see simulation.py.

Everything that can happen to a host happens to the coordinator's, too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from simulation import PORT, Chances, Launcher, World

from fleetrun.session import member
from fleetrun.session.driver import RendezvousEndpoint
from fleetrun.session.elected import ElectedSession
from fleetrun.session.jobstore import JobStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.run.loop import Waiting
    from fleetrun.session.config import RendezvousConfig
    from fleetrun.session.jobrecord import StoreAddress

# How long etcd's answer is awaited, and how late etcd may end a lease.
_TIMEOUT_S, _LATE_S = 2.0, 0.6
# The probability that a host is cut off from the others, but not from etcd.
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
        # Until then nobody gets an answer.
        self.down_until = 0.0

    def do(self, what: str, values: tuple[Any, ...]) -> Any:  # noqa: PLR0911 - one for each
        """Serve a launcher's request."""
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


class Store(JobStore):
    """A launcher's client of the simulated etcd, with one request at a time."""

    def __init__(self, host: ElectedLauncher, address: StoreAddress, waiting: Waiting) -> None:
        super().__init__(address, waiting)
        self._host = host

    def _go_on(self) -> None:
        if not self._requests or self._asked_at is not None:
            return
        host, world = self._host, self._host.world
        what, values, _ = self._requests[0]
        asked_at = self._asked_at = host.clock()

        def answer(value: object, trouble: str = "") -> None:
            if self._asked_at == asked_at:
                self._end(value, trouble)

        def arrive() -> None:
            if not world.reaches_etcd(host):
                host.after(_TIMEOUT_S, lambda: answer(None, "no answer"))
                return
            if not host.is_alive:
                return
            value = world.etcd.do(what, values)

            def back() -> None:
                if not world.reaches_etcd(host):
                    host.after(_TIMEOUT_S, lambda: answer(None, "no answer"))
                else:
                    host.do(lambda: answer(value))

            world.after(world.delay(), back)

        world.after(world.delay(), arrive)


class ElectedLauncher(Launcher):
    """A launcher that may become the coordinator."""

    world: ElectedWorld
    session: ElectedSession

    def __init__(self, world: ElectedWorld, index: int, *, name: str) -> None:
        super().__init__(world, index, name=name)
        self.is_local = False

    def made(self) -> ElectedSession:
        """Return its session, which finds the coordinator in etcd."""
        return ElectedSession(
            RendezvousEndpoint(self.asked, self.name, (PORT,), "job", "known to all"),
            self.name,
            host=self.name,
            log=lambda _: None,
            endpoints=(("etcd", 2379),),
            transport=self.transport,
            store=partial(Store, self),
        )


class ElectedWorld(World):
    """All hosts, the network, the time, and etcd."""

    kind = ElectedLauncher

    def __init__(self, seed: int, *, asked: Sequence[RendezvousConfig], chances: Chances) -> None:
        super().__init__(seed, asked=asked, chances=chances)
        self.etcd = Etcd(self)

    def apart_until(self, host: Launcher, other: Launcher) -> float:
        """Return until when nothing gets through between HOST and OTHER, which may reach etcd."""
        until = super().apart_until(host, other)
        return max(until, host.apart_until, other.apart_until)

    def reaches_etcd(self, host: Launcher) -> bool:
        """Whether HOST gets through to etcd now."""
        return self.now >= max(self.etcd.down_until, host.astray_until, host.cut_until)

    def tell_loss(self, host: Launcher, *, has_ranks: bool) -> None:
        """Let the guard of a coordinator free its place in etcd instead."""
        place, lease = host.told or ("", 0)
        if not place.startswith("place "):
            super().tell_loss(host, has_ranks=has_ranks)
        elif not has_ranks and self.reaches_etcd(host):
            values = int(place.rpartition(" ")[2]), lease, False
            self.after(self.delay(), lambda: self.etcd.do("leave", values))

    def script(self) -> None:
        """Plan what goes wrong, with the way to etcd alone, too."""
        super().script()
        for moment in range(60):
            self.at(float(moment), self.check_calls)
        for host in self.launchers:
            if self.chance.random() < self.chances.astray:
                begin = self.chance.uniform(0.0, 40.0)
                until = begin + self.chance.uniform(0.0, 60.0)
                self.after(begin, partial(setattr, host, "astray_until", until))

    # What must hold.
    def check_calls(self) -> None:
        """Check that no host that waits calls a coordinator that etcd does not know any more."""
        for host in self.launchers:
            session: Any = host.session
            waits = host.is_alive and session._member is not None and not session.is_connected
            if waits and host.state.phase in {member.IDLE, member.JOINING}:
                is_calling = session._dialer is not None
                assert session._election.leader is not None or not is_calling, host.name

    def check(self, until: float) -> None:
        """Play, and check that all ended, and that they agree unless a host was lost."""
        if self.chance.random() < self.chances.down:
            self.etcd.down_until = self.chance.uniform(0.0, 30.0)
        self.play(until)
        live = [host for host in self.launchers if host.is_alive]
        for host in live:
            assert host.has_ended, f"{host.name} still waits: {host.state}"
        for job_generation, roster in self.rosters.items():
            placed = {entry.launcher for entry in roster.entries}
            ends = {
                host.name: host.verdicts[job_generation[1]].failure is None
                for host in live
                if host.name in placed
                and job_generation[1] in host.verdicts
                and not host.was_cut_long
            }
            assert len({*ends.values()}) < 2 or self.any_lost(), (job_generation, ends)

    def any_lost(self) -> bool:
        """Whether a host was lost, and possibly a verdict with it."""
        return any(not host.is_alive or host.was_cut_long for host in self.launchers) or bool(
            self.etcd.down_until or any(host.astray_until for host in self.launchers)
        )


class KilledWorld(ElectedWorld):
    """The same, where whoever coordinates after a while is killed."""

    def script(self) -> None:
        """Plan that, too."""
        super().script()
        self.at(20.0, self.kill)

    def kill(self) -> None:
        """Kill the coordinator."""
        for host in self.launchers:
            if host.session.serves:
                self.die(host, is_silent=False)


class ApartWorld(ElectedWorld):
    """The same, where hosts may be cut off from the others, and not from etcd."""

    def script(self) -> None:
        """Plan that, too."""
        super().script()
        for host in self.launchers:
            if self.chance.random() < _APART:
                self.after(self.chance.uniform(0.0, 40.0), partial(self.part, host))

    def part(self, host: Launcher) -> None:
        """Cut HOST off from the others."""
        host.apart_until = self.now + self.chance.uniform(0.0, 120.0)
        host.was_cut_long = True
