"""Attacks on a job's coordinator, which listens on a real socket: none of them succeeds.

Each test is an attack that the page on access control names (docs/several-machines.md). The
attacker reaches the port, knows --job_id, and runs a modified fleetrun that sends whatever it
likes.
"""

from __future__ import annotations

import json
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from launchers import HERE, Launched, Launchers
from wire import turn_until

from fleetrun.run.events import Failure
from fleetrun.session.connecting import Dialer
from fleetrun.session.driver import CODEC
from fleetrun.session.messages import (
    FAILED,
    STOPPED,
    Join,
    JoinRequest,
    RendezvousConfig,
    Report,
    Verdict,
)
from fleetrun.session.wire import Connection, Wire, job_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleetrun.run.loop import Loop

SCRIPT = "0f" * 6
TOKEN = "a token"  # noqa: S105 - of tests
SETTINGS = (
    ("--run_mode", "collective"),
    ("the strategy", "5f3c5f3c"),
    ("the script's digest", SCRIPT),
)


class Stranger:
    """A caller of the coordinator with KEY, and the answers that it gets."""

    def __init__(self, loop: Loop, port: int, key: bytes) -> None:
        self.loop = loop
        self.heard: list[tuple[object, ...]] = []
        self.lost: list[Connection] = []
        self.links: list[Connection] = []
        self._dialer = Dialer(HERE, port, Wire(key, CODEC, loop), opened=self._opened)
        self._dialer.begin()

    def _opened(self, link: Connection) -> None:
        link.heard = self.heard.append
        link.lost = partial(self.lost.append, link)
        self.links.append(link)

    def say(self, *messages: tuple[object, ...]) -> Stranger:
        """Send a message as soon as there is a connection."""
        turn_until(self.loop, lambda: self.links or self.trouble)
        assert self.links, self.trouble
        for message in messages:
            self.links[0].send(message)
        return self

    def say_raw(self, payload: bytes) -> None:
        """Send PAYLOAD, sealed as a message of the connection."""
        turn_until(self.loop, lambda: self.links)
        (link,) = self.links
        assert link._seals is not None
        link._push(link._seals[0].put(payload))

    @property
    def trouble(self) -> str:
        """Return why there is no connection."""
        return self._dialer.trouble

    def answer(self) -> tuple[object, ...]:
        """Return the first answer."""
        turn_until(self.loop, lambda: self.heard or self.lost)
        return self.heard[0] if self.heard else ()

    def refusal(self) -> str:
        """Return why it was refused, the only answer that it gets."""
        answer = self.answer()
        assert isinstance(answer, Verdict), (answer, self.lost)
        assert answer.failure is not None
        turn_until(self.loop, lambda: self.lost)
        assert len(self.heard) == 1
        return answer.failure.what

    def close(self) -> None:
        """End it."""
        self._dialer.close()
        for link in self.links:
            link.close()


class Job(Launchers):
    """A job of two hosts at a port, with all its callers."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers: list[Stranger] = []
        self.token: str | None = None
        self.config = RendezvousConfig(2, 2, rdzv_timeout_s=60.0, max_restarts=9)

    def launch(self, number: int | None = None, **endpoint: object) -> Launched:
        """Let a launcher of the user's own begin; the first one coordinates."""
        number = len(self.launched) if number is None else number
        return self.start(
            f"launcher-{number}",
            serves=not number,
            config=self.config,
            answers=True,
            **{"token": self.token, **endpoint},
        )

    def join(self, number: int, settings: tuple[tuple[str, str], ...] = SETTINGS) -> None:
        """Let launcher NUMBER join."""
        self.launched[number].session.join(offer(number, settings))

    def enter(self, **endpoint: object) -> Launched:
        """Let one more launcher of the user's own begin and join."""
        launched = self.launch(None, **endpoint)
        self.join(len(self.launched) - 1)
        return launched

    def begin(self, **endpoint: object) -> None:
        """Let both launchers join, and the job begin."""
        for _ in range(2):
            self.enter(**endpoint)
        turn_until(self.loop, lambda: all(launched.handler.runs for launched in self.launched))

    def stranger(self, token: str | None = None) -> Stranger:
        """Let a stranger call who knows the name of the job."""
        made = Stranger(self.loop, self.port, job_key("default", token))
        self.strangers.append(made)
        return made

    def console(self) -> str:
        """Return the console output of the coordinator."""
        return "\n".join(self.launched[0].remarks)

    def is_well(self) -> bool:
        """Whether the second host is still heard, and its job runs."""
        fence = self.launched[1].session._fence
        fence.beat()
        turn_until(self.loop, lambda: not fence._unanswered)
        return not any(launched.handler.verdicts for launched in self.launched)


@pytest.fixture
def job() -> Iterator[Job]:
    """Return a job whose launchers and strangers are gone after the test."""
    made = Job()
    yield made
    for stranger in made.strangers:
        stranger.close()
    made.close()


def offer(
    number: int = 1, settings: tuple[tuple[str, str], ...] = SETTINGS, **more: object
) -> JoinRequest:
    """Return the request with which a host joins."""
    request = JoinRequest("", f"node-{number}", 7, (7000 + number,), ((),), settings=settings)
    return request._replace(**more)  # type: ignore[arg-type]


def a_join(brings: JoinRequest | None = None, launcher: str = "stranger") -> Join:
    """Return the message with which a launcher joins."""
    return Join((brings or offer())._replace(launcher=launcher))


# Attackers that want to learn what a job expects -------------------------------------------------


def test_a_host_that_comes_before_the_coordinators_own_must_be_alike_too(job: Job) -> None:
    job.launch()
    early = job.stranger()
    job.join(0)
    early.say(a_join(offer(settings=(("--run_mode", "ps"),))))
    turn_until(job.loop, lambda: job.launched[0].handler.verdicts)
    (verdict,) = job.launched[0].handler.verdicts
    assert verdict.failure is not None
    assert "--run_mode differs from that of node-0: ps, not collective" in verdict.failure.what
    assert not job.launched[0].handler.rosters


# Attackers that come to a running job ------------------------------------------------------------


def test_a_stranger_gets_no_place_in_a_job_that_has_begun_and_cannot_end_it(job: Job) -> None:
    job.config = RendezvousConfig(2, 3, elastic_timeout_s=0.0, rdzv_timeout_s=60.0)
    job.begin()
    # It has the script and all options.
    failure = Failure("node-1", "rank 1 exited with 1", 1)
    reports = Report(0, FAILED, failure), Report(0, STOPPED, failure)
    why = job.stranger().say(a_join(), *reports).refusal()
    assert "FLEETRUN_TOKEN" in why
    assert "node-" not in why
    assert job.is_well()


def test_a_listed_host_comes_back_to_a_job_that_has_begun(job: Job) -> None:
    job.config = RendezvousConfig(
        1,
        2,
        elastic_timeout_s=60.0,
        rdzv_timeout_s=60.0,
        heartbeat_timeout_s=1.0,
    )
    job.begin(allowed=frozenset({HERE}))
    job.launched[1].session.close()
    turn_until(job.loop, lambda: job.launched[0].handler.verdicts)
    again = job.enter()
    turn_until(job.loop, lambda: again.session._missing is not None or again.handler.rosters)
    assert not again.handler.verdicts


def test_a_stranger_does_not_hear_how_a_job_has_ended(job: Job) -> None:
    job.config = job.config._replace(max_restarts=0)
    job.begin()
    words = "KeyError: 'the last words of a rank'"
    job.launched[1].session.failed(Failure("node-1", "rank 1 exited with 1", 1, words))
    job.launched[1].session.stopped(None)
    turn_until(job.loop, lambda: job.launched[0].handler.verdicts)
    stranger = job.stranger().say(a_join())
    assert not stranger.answer()


# Messages that no launcher sends -----------------------------------------------------------------

BAD_FIELDS = [
    ("host", "10.88.0.1,10.88.0.7"),
    ("host", "-oProxyCommand=sh"),
    ("hostname", "node-1\r\nPADDLE_TRAINER_ID=0"),
    ("hostname", "\x1b[2Jnode-1"),
    ("launcher", "../../etc/passwd"),
    ("launcher", "a" * 300),
    ("run", ".."),
    ("run", "\u202enode"),
    ("ports", [0]),
    ("ports", [1, 2]),
    ("rank", -1),
    ("master_port", 0),
    ("groups", [[["gpu,0=x", "0", 0]]]),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_what_no_host_says_reaches_nobody(job: Job, field: str, value: object) -> None:
    job.enter()
    stranger = job.stranger()
    values = json.loads(CODEC.write(a_join()))
    values[1][0][JoinRequest._fields.index(field)] = value
    stranger.say_raw(json.dumps(values).encode())
    turn_until(job.loop, lambda: stranger.lost)
    assert not stranger.heard
    # The job has a place for somebody else, and begins without a trace of it.
    job.enter()
    turn_until(job.loop, lambda: job.launched[0].handler.runs)
    (roster,) = job.launched[0].handler.rosters
    assert {entry.host for entry in roster.entries} == {HERE}
    assert all(line.isprintable() for line in job.launched[0].remarks)


# Replayed connections ----------------------------------------------------------------------------


class RecordedSocket(socket.socket):
    """A socket that keeps what is sent."""

    sent = b""

    def send(self, piece: Any, /, *flags: int) -> int:
        """Send PIECE."""
        number = super().send(piece, *flags)
        self.sent += bytes(piece[:number])
        return number


def test_a_connection_that_is_played_again_is_none(job: Job) -> None:
    job.token = TOKEN
    job.enter()
    wire = Wire(job_key("default", TOKEN), CODEC, job.loop)
    heard: list[object] = []
    with RecordedSocket() as link, socket.create_connection((HERE, job.port)) as again:
        link.connect((HERE, job.port))

        def ready(caller: Connection) -> None:
            caller.heard = heard.append
            caller.send(a_join())

        caller = Connection(link, HERE, wire, is_caller=True, ready=ready, lost=lambda: None)
        turn_until(job.loop, lambda: heard)
        caller.close()
        assert "another token" not in job.console()
        again.sendall(link.sent)
        turn_until(job.loop, lambda: "another token" in job.console())
        # It got a nonce and a proof at most.
        assert again.recv(1 << 16).count(b"\n") < 3


# Floods, and silent callers ----------------------------------------------------------------------


def test_an_address_that_is_not_of_the_job_is_hung_up_on(job: Job) -> None:
    printed = job.enter(allowed=frozenset({"127.0.0.2"})).remarks
    stranger = job.stranger()
    turn_until(job.loop, lambda: printed)
    assert "not an address of this job" in printed[0]
    assert not stranger.links
