"""Processes that wait for others before they start: the decision, and the asking."""

from __future__ import annotations

import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import generation
from waiting import LONG_S

from fleetrun.model import Endpoint, ExitStatus, Rules
from fleetrun.run import policy
from fleetrun.run.events import (
    Action,
    Await,
    Event,
    Examine,
    Exited,
    Finish,
    Gather,
    Gathered,
    Interrupted,
    Ready,
    RootCauses,
    SignalAll,
    Spawn,
    Started,
    TimerExpired,
)
from fleetrun.run.loop import Loop
from fleetrun.run.readiness import Readiness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

TERM = 15
# A server, and two trainers that wait for it.
ESSENTIAL = [False, True, True]
WAITING = [1, 2]


def begin(attempt: int = 0, state: policy.PolicyState | None = None) -> policy.Step:
    """Return where a generation begins."""
    state = policy.begin(0.0, 1.0)[0] if state is None else state
    return policy.step(state, Gathered(attempt, generation(ESSENTIAL, WAITING), 0.0), Rules())


def play(*events: Event, rules: Rules = Rules()) -> tuple[policy.PolicyState, list[Action]]:  # noqa: B008 - a value
    """Return where EVENTS lead, and every action on the way."""
    state, actions = begin()
    done = list(actions)
    for event in events:
        state, actions = policy.step(state, event, rules)
        done += actions
        for answer in answers(actions):
            state, actions = policy.step(state, answer, rules)
            done += actions
    return state, done


def answers(actions: Sequence[Action]) -> list[RootCauses]:
    return [RootCauses(action.exits, 2.0) for action in actions if isinstance(action, Examine)]


def named(actions: Sequence[Action]) -> list[str]:
    """Write ACTIONS down: as tuples, a Spawn and an Await would be equal."""
    return [
        f"{type(action).__name__} {action.process}"
        for action in actions
        if isinstance(action, Spawn | Await)
    ]


def started(process: int, attempt: int = 0) -> Started:
    return Started(process, f"process {process}", 100 + process, 1.0, attempt)


def exited(process: int, code: int = 0) -> Exited:
    return Exited(process, f"process {process}", ExitStatus(code), 2.0, 100 + process)


def test_who_waits_starts_when_it_may() -> None:
    _, done = play(started(0))
    assert named(done) == ["Spawn 0", "Await 1"]
    _, done = play(started(0), Ready(1, 1.5), started(1), Ready(2, 1.6))
    assert named(done) == ["Spawn 0", "Await 1", "Spawn 1", "Await 2", "Spawn 2"]


def test_nobody_starts_twice() -> None:
    _, done = play(started(0), Ready(1, 1.5), started(1), Ready(1, 1.6))
    assert named(done).count("Spawn 1") == 1


@pytest.mark.parametrize("event", [Interrupted(TERM, 1.2), exited(0, 5)], ids=["signal", "death"])
def test_what_ends_the_job_ends_the_wait(event: Event) -> None:
    state, done = play(started(0), event, Ready(1, 1.5))
    assert "Spawn 1" not in named(done)
    assert state.cause == event
    assert not policy.is_current(state, Await(1, 0))


def test_a_server_that_ends_well_does_not_end_the_wait() -> None:
    state, done = play(started(0), exited(0), Ready(1, 1.5))
    assert named(done)[-1] == "Spawn 1"
    assert state.phase == policy.RUNNING


def test_another_attempt_waits_again_and_hears_no_earlier_answer() -> None:
    rules = Rules(max_restarts=1)
    state, _ = play(started(0), exited(0, 5), rules=rules)
    assert state.deadline is not None
    state, actions = policy.step(state, TimerExpired(state.deadline), rules)
    assert actions == (Gather(1),)
    state, actions = begin(1, state)
    assert named(actions) == ["Spawn 0"]
    state, actions = policy.step(state, started(0, 1), rules)
    assert named(actions) == ["Await 1"]
    assert policy.step(state, Ready(1, 9.0, attempt=0), rules) == (state, ())
    assert named(policy.step(state, Ready(1, 9.0, attempt=1), rules)[1]) == ["Spawn 1"]


@given(st.lists(st.integers(0, 4), max_size=30))
@settings(deadline=None)
def test_no_trainer_ever_starts_before_it_may(dice: list[int]) -> None:
    state, actions = begin()
    todo, done, allowed = list(actions), list(actions), set[int]()
    alive: set[int] = set()

    def feed(event: Event) -> None:
        nonlocal state
        state, more = policy.step(state, event, Rules())
        todo.extend(more)
        done.extend(more)
        for answer in answers(more):
            feed(answer)

    for roll in dice:
        waiting = [action.process for action in todo if isinstance(action, Await)]
        spawns = [action for action in todo if isinstance(action, Spawn)]
        todo.clear()
        for spawn in spawns:
            if policy.is_current(state, spawn):
                assert spawn.process == 0 or spawn.process in allowed
                alive.add(spawn.process)
                feed(started(spawn.process))
        todo += [Await(process, 0) for process in waiting]
        if roll in {0, 1} and waiting:
            todo.remove(Await(waiting[0], 0))
            allowed.add(waiting[0])
            feed(Ready(waiting[0], 1.0))
        elif roll in {2, 3} and alive:
            feed(exited(alive.pop(), code=roll - 2))
        elif roll == 4:
            feed(Interrupted(TERM, 1.0))
    if not alive and any(isinstance(action, SignalAll) for action in done):
        assert any(isinstance(action, Finish) for action in done)


# -- asking --------------------------------------------------------------------------------------


@pytest.fixture
def server() -> socket.socket:
    """Make a port that refuses until somebody listens on it."""
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    return one


def endpoint(one: socket.socket) -> Endpoint:
    return Endpoint("127.0.0.1", one.getsockname()[1])


def ask(
    groups: Sequence[tuple[Endpoint, ...]],
    gone: Sequence[Endpoint] = (),
    seconds: float = 0.3,
    attempts: int = 1,
    after: Callable[[], object] = lambda: None,
) -> list[str]:
    """Ask GROUPS for SECONDS at most, in each of ATTEMPTS, do AFTER; return what was heard last."""
    loop, heard = Loop(), list[str]()
    plan = generation([True], [0])
    process = plan.processes[0]._replace(awaits=tuple(groups))
    asking = Readiness(
        loop, heard.append, print, is_alive=bool, gone=gone, ready=lambda *_: heard.append("done")
    )
    for attempt in range(attempts):
        heard.clear()
        asking.begin(plan._replace(processes=(process,)), 0, attempt)
        deadline = time.monotonic() + seconds
        while not heard and time.monotonic() < deadline:
            loop.turn()
        after()
    asking.stop()
    loop.close()
    return heard or [str(group[0]) for group in asking._silent]


def test_one_of_each_group_is_enough(server: socket.socket) -> None:
    with server, socket.create_server(("127.0.0.1", 0)) as other:
        group = (endpoint(server), endpoint(other))
        assert ask([group], seconds=LONG_S) == ["done"]
        assert ask([group, group[:1]]) == [str(endpoint(server))]
        server.listen()
        assert ask([group, group[:1]], seconds=LONG_S) == ["done"]


def test_who_has_listened_before_is_asked_again_in_another_attempt(server: socket.socket) -> None:
    server.listen()
    awaited = endpoint(server)
    # Long enough for the first attempt, which is answered at once.
    assert ask([(awaited,)], seconds=2.0, attempts=2, after=server.close) == [str(awaited)]


def test_who_is_gone_is_not_waited_for(server: socket.socket) -> None:
    with server:
        assert ask([(endpoint(server),)], [endpoint(server)], LONG_S) == ["done"]


def test_a_name_that_nobody_knows_is_one_that_does_not_listen() -> None:
    nowhere = Endpoint("nowhere.invalid", 1)
    assert ask([(nowhere,)]) == [str(nowhere)]


def test_who_does_not_answer_at_all_blocks_nobody() -> None:
    # 192.0.2.0/24 is for documentation: nobody is there.
    far = Endpoint("192.0.2.1", 1)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("the connect has blocked")

    before = signal.signal(signal.SIGALRM, interrupt)
    # One that blocks gives up after two minutes.
    signal.alarm(60)
    try:
        assert ask([(far,)]) == [str(far)]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
