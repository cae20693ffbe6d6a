"""Measures what a session costs its coordinator, with thousands of simulated hosts.

Protocol, codec and authentication are fleetrun's own; launchers, network and clock are simulated.
The coordinator is one processor, and so is each member: what they compute takes as long as it took
here, and what comes meanwhile waits. A message that all hear is decoded once, and takes each of
them that long. Planning and starting ranks, and the system, cost nothing.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import deque
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from fleetrun.model import Device
from fleetrun.run.events import Failure, TimerExpired
from fleetrun.session import coordinator, member, messages, state
from fleetrun.session.authentication import Handshake, Key, Seal
from fleetrun.session.codec import Codec
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.connection import LONGEST_FROM_LISTENER
from fleetrun.session.messages import JoinRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.session.messages import FromCoordinator, FromMember

PAGE = Path(__file__).parents[1] / "docs" / "several-machines.md"
BEGIN, END = "<!-- from scripts/simulate -->", "<!-- end -->"
# One way through a switch or two, and what a network card sends.
_LATENCY_S, _BYTES_PER_S = 0.00025, 10e9 / 8
# So many launchers are started each second.
_STARTED_PER_S = 1000
# Longer messages share the network; short ones pass between them.
_SHORT_BYTES = 1 << 16
# Ranks that are asked to end do so after this.
_STOP_S = 0.1
# To know how long that takes, which is a call of the system.
_ASKED = 1000
_KEY = Key("simulated", "a token of nobody")
_SEAL = Seal(b"of nobody", "listener")


class Result(NamedTuple):
    """What one number of hosts costs."""

    hosts: int
    # Joins that a processor takes in a second, until the roster is made.
    joins_per_s: float
    # From the last launcher's start until the last one may start its ranks.
    start_s: float
    # Of that, what each member takes to decode the roster.
    decoding_s: float
    roster_bytes: int
    state_bytes: int
    # Of a whole job: a rendezvous, and a failure.
    received: int
    sent: int
    sent_bytes: int
    # Of a processor, while ranks train.
    idle_share: float
    # From a failure until the last launcher knows, and until all have the verdict.
    stop_s: float
    verdict_s: float


class Processor:
    """The time that this thread has computed, without what it takes to ask for that."""

    def __init__(self) -> None:
        begin = time.thread_time()
        for _ in range(_ASKED):
            time.thread_time()
        self._each_s = (time.thread_time() - begin) / (_ASKED + 1)
        self._asked = 0

    def now(self) -> float:
        """Return the seconds so far."""
        self._asked += 1
        return time.thread_time() - self._asked * self._each_s


class Peer:
    """A launcher of the job."""

    def __init__(self, job: Simulation, number: int) -> None:
        self.job = job
        self.number = number
        self.is_local = number == 0
        self.state = member.begin(
            job.config,
            f"{job.chance.getrandbits(64):016x}",
            "host",
            job.now,
            is_local=self.is_local,
        )
        self.due = 0
        # When all that was sent to it has come through, and until when it computes.
        self.heard_at = self.free_at = 0.0
        self.seals: tuple[Seal, Seal] | None = None

    def offer(self) -> JoinRequest:
        """Return what the host brings: a rank for each of its devices."""
        devices = range(self.job.devices)
        return JoinRequest(
            host="" if self.number else "10.0.0.1",
            hostname=f"node-{self.number:05}",
            pid=4711,
            ports=tuple(self.job.chance.sample(range(20000, 32000), len(devices))),
            groups=tuple((Device("gpu", str(device), device),) for device in devices),
            settings=tuple(("--nnodes", str(self.job.count)) for _ in range(8)),
        )

    def feed(self, event: member.Event) -> None:
        """Take EVENT, and perform what follows."""
        self.state, actions = member.step(self.state, event)
        for action in actions:
            self.perform(action)
        self.set_timer()

    def say(self, message: messages.HostReady | messages.Failed | messages.Stopped) -> None:
        """Say what becomes of its ranks."""
        self.feed(member.Said(message, self.job.now))

    def perform(self, action: member.Action) -> None:
        """Do what the protocol says."""
        job = self.job
        match action:
            case member.SendToCoordinator(message=message):
                job.to_coordinator(self, message)
            case member.Deliver(message=messages.RosterMessage()):
                job.at(job.now, lambda: self.say(messages.HostReady(0)))
            case member.Deliver(message=messages.Start()):
                job.running += 1
                job.last = job.now
            case member.Deliver(message=messages.Stop()):
                job.stopping += 1
                job.last = job.now
                job.at(job.now + _STOP_S, lambda: self.say(messages.Stopped(0, None)))
            case member.Redial():
                raise AssertionError("the coordinator was too busy to answer")
            case member.Deliver(message=messages.Verdict()):
                job.ended += 1
                job.last = job.now
            case _:
                pass

    def set_timer(self) -> None:
        """Come again when the protocol wants to."""
        self.due += 1
        due = self.due

        def elapse() -> None:
            if due == self.due and self.state.phase != member.ENDED:
                self.feed(TimerExpired(self.job.now))

        self.job.at(max(self.job.now, self.state.wake_at), elapse)


class Simulation:
    """One job of COUNT hosts with DEVICES ranks each."""

    def __init__(self, hosts: int, devices: int) -> None:
        self.count = hosts
        self.devices = devices
        self.config = RendezvousConfig(hosts, hosts)
        self.now = 0.0
        self.chance = random.Random(hosts)  # chance, not a secret
        self.state = state.begin(self.config, 0.0)
        kinds = get_args(messages.FromMember | messages.FromCoordinator)
        self.codec, self.member_codec = Codec(*kinds), Codec(*kinds)
        # The last payload that was decoded, and how long that took.
        self.decoded = (b"", 0.0)
        self.processor = Processor()
        self.calls: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.due = 0
        self.waiting: deque[Callable[[], None]] = deque()
        # Until when the coordinator computes, and its network sends.
        self.free_at = self.sent_at = 0.0
        self.used_s = self.began = 0.0
        self.received = self.sent = self.sent_bytes = self.longest = 0
        self.longest_s = 0.0
        self.running = self.stopping = self.ended = 0
        self.last = 0.0
        self.peers = [Peer(self, number) for number in range(hosts)]

    # Time ---------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Do CALL at the moment WHEN."""
        heapq.heappush(self.calls, (when, next(self.order), call))

    def play(self, until: Callable[[], bool]) -> None:
        """Let time pass until UNTIL says so."""
        while not until():
            self.now, _, call = heapq.heappop(self.calls)
            call()

    # The coordinator's processor ----------------------------------------------------------------

    def compute(self, work: Callable[[], None]) -> None:
        """Do WORK when the coordinator has time for it; it then has none for so long."""
        self.waiting.append(work)
        if len(self.waiting) == 1:
            self.at(max(self.now, self.free_at), self._compute)

    def _compute(self) -> None:
        self.began, before_s = self.processor.now(), self.used_s
        self.waiting[0]()
        self.used_s += self.processor.now() - self.began
        self.free_at = self.now + self.used_s - before_s
        self.waiting.popleft()
        if self.waiting:
            self.at(self.free_at, self._compute)

    def call(self, peer: Peer) -> None:
        """Let PEER connect: a handshake, then its first words."""
        if peer.is_local:
            self.join(peer)
            return
        caller, listener = Handshake(_KEY, is_caller=True), Handshake(_KEY, is_caller=False)
        first = caller.begin()
        assert first is not None

        def answer() -> None:
            reply = listener.feed(first)
            assert reply is not None
            self.at(self.now + 2 * _LATENCY_S, partial(self.compute, partial(prove, reply)))

        def prove(reply: bytes) -> None:
            began = self.processor.now()
            proof = caller.feed(reply)
            # The caller's own work is not the coordinator's.
            self.began += self.processor.now() - began
            assert proof is not None
            listener.feed(proof)
            peer.seals = listener.seals
            self.at(self.now + 2 * _LATENCY_S, partial(self.join, peer))

        self.at(self.now + 3 * _LATENCY_S, partial(self.compute, answer))

    def join(self, peer: Peer) -> None:
        """Let PEER join."""
        peer.feed(member.JoinRequested(peer.offer(), self.now))
        peer.feed(member.Connected(self.now))

    def to_coordinator(self, peer: Peer, message: FromMember) -> None:
        """Let MESSAGE arrive at the coordinator."""
        payload = self.codec.write(message)
        self.received += 1

        def read() -> None:
            if peer.is_local:
                read_message = message
            else:
                assert peer.seals is not None
                # What it costs to check what came is what it costs to seal it.
                peer.seals[1].mac(payload)
                read_message = self.codec.read(payload)
            self.feed(
                state.Received(
                    peer.number,
                    read_message,
                    self.now,
                    f"10.{peer.number >> 16}.{peer.number >> 8 & 255}.{peer.number & 255}",
                    "10.0.0.1",
                    is_local=peer.is_local,
                )
            )

        delay_s = 0.0 if peer.is_local else _LATENCY_S
        self.at(self.now + delay_s, partial(self.compute, read))

    def feed(self, event: state.Event) -> None:
        """Let the coordinator take EVENT, and send what follows."""
        self.state, actions = coordinator.step(self.state, event)
        for action in actions:
            if isinstance(action, state.Send):
                for number in action.connections:
                    self.send(self.peers[number], action.message)
        self.due += 1
        due = self.due

        def elapse() -> None:
            if due == self.due:
                self.feed(TimerExpired(self.now))

        self.at(self.state.wake_at, partial(self.compute, elapse))

    def send(self, peer: Peer, message: FromCoordinator) -> None:
        """Send MESSAGE to PEER, behind all that was sent before."""
        self.sent += 1
        if not peer.is_local:
            assert peer.seals is not None
            payload = self.codec.write_packed(message)
            length = len(peer.seals[0].mac(payload)) + len(payload)
            self.sent_bytes += length
            # It leaves when it is computed, behind what the network card has still to send.
            leaves = self.now + self.processor.now() - self.began
            if length >= _SHORT_BYTES:
                self.sent_at = max(self.sent_at, leaves) + length / _BYTES_PER_S
                peer.heard_at = self.sent_at
            else:
                peer.heard_at = max(peer.heard_at, leaves)
            arrives = max(peer.heard_at + _LATENCY_S, peer.free_at)
            peer.free_at = arrives + self.decoding_s(payload)
            if length > self.longest:
                self.longest, self.longest_s = length, peer.free_at - arrives
        heard_at = self.now if peer.is_local else peer.free_at
        self.at(heard_at, lambda: peer.feed(member.Heard(message, self.now)))

    def decoding_s(self, payload: bytes) -> float:
        """Return how long a member takes to check and to read PAYLOAD."""
        if self.decoded[0] is not payload:
            began = self.processor.now()
            _SEAL.mac(payload)
            self.member_codec.read(payload, LONGEST_FROM_LISTENER)
            took_s = self.processor.now() - began
            # It is not the coordinator's work.
            self.began += took_s
            self.decoded = (payload, took_s)
        return self.decoded[1]


def size_of(value: object, seen: set[int] | None = None) -> int:
    """Return the bytes that VALUE takes with all that it refers to."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    parts: list[object] = []
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, tuple | list | set | frozenset):
        parts = list(value)
    else:
        parts = [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
    return sys.getsizeof(value) + sum(size_of(part, seen) for part in parts)


def simulate(hosts: int, devices: int) -> Result:
    """Play a job of HOSTS hosts with DEVICES ranks each."""
    job = Simulation(hosts, devices)
    within_s = max(1.0, hosts / _STARTED_PER_S)
    starts = [0.0, *(job.chance.uniform(0.0, within_s) for _ in job.peers[1:])]
    for peer, at in zip(job.peers, starts, strict=True):
        job.at(at, partial(job.call, peer))
    job.play(lambda: job.state.roster is not None)
    joined_s = job.used_s
    job.play(lambda: job.running == hosts)
    start_s = job.last - max(starts)
    state_bytes = size_of(job.state)
    # Some heartbeats of everybody.
    begin, used_s = job.now, job.used_s
    received, sent, sent_bytes = job.received, job.sent, job.sent_bytes
    job.play(lambda: job.now >= begin + 3 * job.config.heartbeat_s)
    idle_share = (job.used_s - used_s) / (job.now - begin)
    # Heartbeats go on as long as ranks train; what is counted are the other messages.
    job.received, job.sent, job.sent_bytes = received, sent, sent_bytes
    failed_at = job.now
    failure = Failure("host", "rank 1 exited with 1", 1, "a last line")
    job.peers[-1].say(messages.Failed(0, failure))
    job.at(job.now + _STOP_S, lambda: job.peers[-1].say(messages.Stopped(0, failure)))
    job.play(lambda: job.stopping == hosts - 1)
    stop_s = job.last - failed_at
    job.play(lambda: job.ended == hosts)
    return Result(
        hosts,
        hosts / joined_s,
        start_s,
        job.longest_s,
        job.longest,
        state_bytes,
        job.received,
        job.sent,
        job.sent_bytes,
        idle_share,
        stop_s,
        job.last - failed_at - _STOP_S,
    )


def table(results: list[Result], devices: int) -> str:
    """Return RESULTS as the table of the page."""
    heads = (
        "hosts",
        f"ranks ({devices} a host)",
        "joins/s",
        "last launcher → all may start",
        "of that: a member reads the roster",
        "roster",
        "state",
        "messages in, out",
        "sent",
        "idle: of a processor",
        "failure → all stop",
        "all stopped → all have the verdict",
    )
    rows = [
        (
            f"{result.hosts:,}",
            f"{result.hosts * devices:,}",
            f"{result.joins_per_s:,.0f}",
            _seconds(result.start_s),
            _seconds(result.decoding_s),
            _bytes(result.roster_bytes),
            _bytes(result.state_bytes),
            f"{result.received:,}, {result.sent:,}",
            _bytes(result.sent_bytes),
            f"{100 * result.idle_share:.1f} %",
            _seconds(result.stop_s),
            _seconds(result.verdict_s),
        )
        for result in results
    ]
    lines = [heads, tuple("---:" for _ in heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * max(seconds, 0.0):.0f} ms"


def _bytes(number: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000  # type: ignore[assignment]
    raise AssertionError


def main() -> int:
    """Simulate, and print the table."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[64, 500, 1000, 2000, 3000, 4000], metavar="N"
    )
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="ranks of each host")
    parser.add_argument(
        "--write", action="store_true", help=f"write the table into docs/{PAGE.name}"
    )
    asked = parser.parse_args()
    results = []
    for hosts in asked.hosts:
        results.append(simulate(hosts, asked.devices))
        print(results[-1], flush=True)
    text = table(results, asked.devices)
    print(text, end="")
    if asked.write:
        import pages  # beside this file; tests read it from elsewhere

        for page in pages.in_both_languages(PAGE):
            page.write_text(pages.with_section(page, BEGIN, END, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
