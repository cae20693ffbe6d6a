"""The guard in situations that are rare in a whole launch."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

import pytest
from waiting import LONG_S, until

from fleetrun.run import children, guard, libc, proc
from fleetrun.run.children import Order
from fleetrun.run.descriptors import FileLimit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Its rank ends when the process that it leaves, in its group or in none of ours, is `sleep`.
LEAVES = 'sleep 1000 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'
ESCAPES = f"setsid {LEAVES}"


@pytest.fixture
def made() -> Iterator[guard.Guard]:
    made = guard.Guard("marker", FileLimit(1))
    yield made
    made.dismiss()


@pytest.fixture
def subreaper() -> Iterator[None]:
    children.become_subreaper()
    yield
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 0)


def order(log: int, *argv: str, **env: str) -> Order:
    return Order(
        argv=argv,
        env={b"PATH": os.environb[b"PATH"], **{name.encode(): env[name].encode() for name in env}},
        output=log,
        errors=log,
        takes_our_stdin=False,
        default_signals=(),
        cpus=(),
    )


def started(made: guard.Guard, script: str) -> int:
    with open(os.devnull, "wb") as null:
        return made.start(order(null.fileno(), "sh", "-c", script))


def await_end(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    assert select.select([pidfd], [], [], LONG_S)[0]
    os.close(pidfd)


def test_a_launcher_that_was_gone_before_it_could_be_watched_is_cleaned_up_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    killed: list[str] = []
    monkeypatch.setattr(guard, "_detach", lambda *_, **__: None)
    monkeypatch.setattr(
        guard.Guard, "_kill_by_marker", lambda self: killed.append(self._marker.decode())
    )
    made = guard.Guard("marker", FileLimit(1))
    made._be_watcher(gone)
    made.dismiss()
    assert killed == ["marker"]


def test_ranks_die_at_the_moment_that_was_named_even_if_nobody_asks_again(
    made: guard.Guard, tmp_path: Path
) -> None:
    """Their launcher may be stopped, and the other hosts go on without all that they have begun."""
    with (tmp_path / "log").open("wb") as log:
        script = "setsid sleep 1000 & echo $!; wait"
        leader = made.start(order(log.fileno(), "sh", "-c", script))
    until((tmp_path / "log").read_text)
    elsewhere = int((tmp_path / "log").read_text())
    pidfds = [os.pidfd_open(pid) for pid in (leader, elsewhere)]
    made.kill_at(time.monotonic() + 3600.0)
    made.kill_at(time.monotonic())
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], LONG_S)[0]
        os.close(pidfd)
    assert made.end([leader])[0].status == (os.CLD_KILLED, signal.SIGKILL)


def test_ranks_that_have_succeeded_are_reaped_at_once_up_to_the_first_that_failed(
    made: guard.Guard,
) -> None:
    scripts = (LEAVES, "exit 0", "exit 3", "exit 0")
    pids = [started(made, script) for script in scripts]
    for pid in pids:
        await_end(pid)
    ended = made.end(pids, LONG_S)
    statuses = [(os.CLD_EXITED, 0), (os.CLD_EXITED, 0), (os.CLD_EXITED, 3)]
    assert [how.status for how in ended] == statuses
    assert [process.argv for process in ended[0].left] == [("sleep", "1000")]
    assert [how.status for how in made.end(pids[3:])] == [(os.CLD_EXITED, 0)]
    made.retire()
    made.retire()


def test_after_the_last_success_the_guard_sweeps_and_ends(made: guard.Guard) -> None:
    pids = [started(made, script) for script in (ESCAPES, "exit 0")]
    assert [how.left for how in made.end(pids[:1], LONG_S)] == [()]
    # One is left, which is the other rank's.
    assert made.sweep({pids[1]}, LONG_S).ended[0].argv == ("sleep", "1000")
    again = started(made, ESCAPES)
    assert len(made.end([pids[1], again], LONG_S)) == 2
    # Nothing is left for the guard to do.
    os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
    # Another request in between.
    assert made.left_in(again) is None
    assert made.sweep(frozenset(), LONG_S).ended[0].argv == ("sleep", "1000")
    assert made.sweep(frozenset(), LONG_S) == ((), ())


def test_the_guard_has_loaded_what_reaping_needs_before_the_first_rank_ends(
    made: guard.Guard,
) -> None:
    started(made, "sleep 1000")
    # The extension module of `os.wait4`.
    until(lambda: b"/resource." in proc.content(f"/proc/{made.pid}/maps"))
    made.sweep(frozenset(), LONG_S)


def test_a_guard_that_ends_leaves_its_processor_to_the_launcher(made: guard.Guard) -> None:
    ours = os.sched_getaffinity(0)
    made.end([started(made, "exit 0")], LONG_S)
    os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
    assert len(ours - os.sched_getaffinity(made.pid)) == (len(ours) > 1)


@pytest.mark.usefixtures("subreaper")
def test_ranks_that_leave_nobody_in_their_group_are_reaped_at_once(made: guard.Guard) -> None:
    pids = [started(made, script) for script in ("exit 3", LEAVES, "kill $$", "exit 0")]
    for pid in pids:
        await_end(pid)
    ended = made.end_alone(pids[:2] + pids[3:])
    statuses = {pids[0]: (os.CLD_EXITED, 3), pids[3]: (os.CLD_EXITED, 0)}
    assert {pid: how.status for pid, how in ended.items()} == statuses
    assert made.end_alone(pids[1:2]) == {}
    assert made.left_in(pids[1]) is not None
    assert made.end(pids[1:2])[0].left[0].argv == ("sleep", "1000")
    os.kill(made.pid, signal.SIGKILL)
    ended = made.end_alone(pids[2:3])
    assert ended[pids[2]].status == (os.CLD_KILLED, signal.SIGTERM)


def test_after_a_failure_the_guard_sweeps_when_it_is_asked(made: guard.Guard) -> None:
    made.end([started(made, f"{ESCAPES}; exit 3")], LONG_S)
    assert made.sweep(frozenset(), LONG_S).ended[0].argv == ("sleep", "1000")
    # It goes on.
    made.end([started(made, "exit 3")], LONG_S)


@pytest.mark.usefixtures("subreaper")
def test_each_process_has_its_own_environment(made: guard.Guard, tmp_path: Path) -> None:
    # Those after the first one are sent only the differences.
    envs = [{"A": "1", "B": "2"}, {"B": "2", "C": "3"}, {"A": "4"}, {"A": "1", "B": "2"}]
    for number, env in enumerate(envs):
        if number == len(envs) - 1:
            os.kill(made.pid, signal.SIGKILL)
            os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
        with (tmp_path / f"{number}").open("wb") as log:
            sent = order(log.fileno(), "cat", "/proc/self/environ", **env)
            made.end([made.start(sent)])
        entries = (tmp_path / f"{number}").read_bytes().rstrip(b"\0").split(b"\0")
        assert dict(entry.split(b"=", 1) for entry in entries) == sent.env


@pytest.mark.usefixtures("subreaper")
def test_ranks_whose_guard_was_killed_are_reaped_one_by_one(made: guard.Guard) -> None:
    pid = started(made, "exit 0")
    await_end(pid)
    os.kill(made.pid, signal.SIGKILL)
    assert made.end([pid], LONG_S)[0].status == (os.CLD_EXITED, 0)
    assert made.sweep(frozenset(), LONG_S) == ((), ())
