"""The guard in situations that are rare in a whole launch."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

from waiting import LONG_S, until

from fleetrun.run import children, guard, libc, proc
from fleetrun.run.children import Order
from fleetrun.run.descriptors import FileLimit

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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
    try:
        made._be_watcher(gone)
    finally:
        made.dismiss()
    assert killed == ["marker"]


def test_ranks_die_at_the_moment_that_was_named_even_if_nobody_asks_again(tmp_path: Path) -> None:
    """Their launcher may be stopped, and the other hosts go on without all that they have begun."""
    made = guard.Guard("marker", FileLimit(1))
    try:
        with (tmp_path / "log").open("wb") as log:
            started = made.start(
                Order(
                    argv=("sh", "-c", "setsid sleep 1000 & echo $!; wait"),
                    env={b"PATH": os.environb[b"PATH"]},
                    output=log.fileno(),
                    errors=log.fileno(),
                    takes_our_stdin=False,
                    default_signals=(),
                    cpus=(),
                )
            )
        until((tmp_path / "log").read_text)
        elsewhere = int((tmp_path / "log").read_text())
        pidfds = [os.pidfd_open(pid) for pid in (started.pid, elsewhere)]
        made.kill_at(time.monotonic() + 3600.0)
        made.kill_at(time.monotonic())
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], LONG_S)[0]
            os.close(pidfd)
        assert made.end([started.pid])[0].status == (os.CLD_KILLED, signal.SIGKILL)
    finally:
        made.dismiss()


def _started(made: guard.Guard, script: str, log: int) -> int:
    order = Order(
        argv=("sh", "-c", script),
        env={b"PATH": os.environb[b"PATH"]},
        output=log,
        errors=log,
        takes_our_stdin=False,
        default_signals=(),
        cpus=(),
    )
    return made.start(order).pid


def test_ranks_that_have_succeeded_are_reaped_at_once_up_to_the_first_that_failed() -> None:
    made = guard.Guard("marker", FileLimit(1))
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        # The rank ends when the process that it leaves has become `sleep`.
        leaves = 'sleep 1000 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'
        scripts = (leaves, "exit 0", "exit 3", "exit 0")
        pids = [_started(made, script, null) for script in scripts]
        for pid in pids:
            pidfd = os.pidfd_open(pid)
            assert select.select([pidfd], [], [], LONG_S)[0]
            os.close(pidfd)
        ended = made.end(pids, LONG_S)
        statuses = [(os.CLD_EXITED, 0), (os.CLD_EXITED, 0), (os.CLD_EXITED, 3)]
        assert [how.status for how in ended] == statuses
        assert [process.argv for process in ended[0].left] == [("sleep", "1000")]
        assert [how.status for how in made.end(pids[3:])] == [(os.CLD_EXITED, 0)]
        made.retire()
        made.retire()
    finally:
        os.close(null)
        made.dismiss()


def test_after_the_last_success_the_guard_sweeps_and_ends() -> None:
    made = guard.Guard("marker", FileLimit(1))
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        escapes = 'setsid sleep 1000 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'
        pids = [_started(made, script, null) for script in (escapes, "exit 0")]
        assert [how.left for how in made.end(pids[:1], LONG_S)] == [()]
        # One is left, which is the other rank's.
        assert made.sweep({pids[1]}, LONG_S).ended[0].argv == ("sleep", "1000")
        again = _started(made, escapes, null)
        assert len(made.end([pids[1], again], LONG_S)) == 2
        # Nothing is left for the guard to do.
        os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
        # Another request in between.
        assert made.left_in(again) is None
        assert made.sweep(frozenset(), LONG_S).ended[0].argv == ("sleep", "1000")
        assert made.sweep(frozenset(), LONG_S) == ((), ())
    finally:
        os.close(null)
        made.dismiss()


def test_the_guard_has_loaded_what_reaping_needs_before_the_first_rank_ends() -> None:
    made = guard.Guard("marker", FileLimit(1))
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        _started(made, "sleep 1000", null)
        # The extension module of `os.wait4`.
        until(lambda: b"/resource." in proc.content(f"/proc/{made.pid}/maps"))
    finally:
        os.close(null)
        made.sweep(frozenset(), LONG_S)
        made.dismiss()


def test_a_guard_that_ends_leaves_its_processor_to_the_launcher() -> None:
    ours = os.sched_getaffinity(0)
    made = guard.Guard("marker", FileLimit(1))
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        made.end([_started(made, "exit 0", null)], LONG_S)
        os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
        assert len(ours - os.sched_getaffinity(made.pid)) == (len(ours) > 1)
    finally:
        os.close(null)
        made.dismiss()


def test_ranks_that_leave_nobody_in_their_group_are_reaped_at_once() -> None:
    children.become_subreaper()
    made = guard.Guard("marker", FileLimit(1))
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        leaves = 'sleep 1000 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'
        pids = [_started(made, script, null) for script in ("exit 3", leaves, "kill $$", "exit 0")]
        for pid in pids:
            os.close(_end_of(pid))
        ended = made.end_alone(pids[:2] + pids[3:])
        statuses = {pids[0]: (os.CLD_EXITED, 3), pids[3]: (os.CLD_EXITED, 0)}
        assert {pid: how.status for pid, how in ended.items()} == statuses
        assert made.end_alone(pids[1:2]) == {}
        assert made.left_in(pids[1]) is not None
        assert made.end(pids[1:2])[0].left[0].argv == ("sleep", "1000")
        os.kill(made.pid, signal.SIGKILL)
        ended = made.end_alone(pids[2:3])
        assert ended[pids[2]].status == (os.CLD_KILLED, signal.SIGTERM)
    finally:
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 0)
        os.close(null)
        made.dismiss()


def _end_of(pid: int) -> int:
    """Return a pidfd of PID, which has ended then."""
    pidfd = os.pidfd_open(pid)
    assert select.select([pidfd], [], [], LONG_S)[0]
    return pidfd


def test_after_a_failure_the_guard_sweeps_when_it_is_asked() -> None:
    made = guard.Guard("marker", FileLimit(1))
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        escapes = 'setsid sleep 1000 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'
        made.end([_started(made, f"{escapes}; exit 3", null)], LONG_S)
        assert made.sweep(frozenset(), LONG_S).ended[0].argv == ("sleep", "1000")
        # It goes on.
        made.end([_started(made, "exit 3", null)], LONG_S)
    finally:
        os.close(null)
        made.dismiss()


def test_each_process_has_its_own_environment(tmp_path: Path) -> None:
    children.become_subreaper()
    made = guard.Guard("marker", FileLimit(1))
    path = (b"PATH", os.environb[b"PATH"])
    envs = [
        dict([path, (b"A", b"1"), (b"B", b"2")]),
        # Those after the first one are sent only the differences.
        dict([path, (b"B", b"2"), (b"C", b"3")]),
        dict([path, (b"A", b"4")]),
        dict([path, (b"A", b"1"), (b"B", b"2")]),
    ]
    try:
        for number, env in enumerate(envs):
            if number == len(envs) - 1:
                os.kill(made.pid, signal.SIGKILL)
                os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
            log = os.open(tmp_path / f"{number}", os.O_WRONLY | os.O_CREAT)
            order = Order(
                argv=("cat", "/proc/self/environ"),
                env=env,
                output=log,
                errors=log,
                takes_our_stdin=False,
                default_signals=(),
                cpus=(),
            )
            made.end([made.start(order).pid])
            os.close(log)
            entries = (tmp_path / f"{number}").read_bytes().rstrip(b"\0").split(b"\0")
            assert dict(entry.split(b"=", 1) for entry in entries) == env
    finally:
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 0)
        made.dismiss()


def test_ranks_whose_guard_was_killed_are_reaped_one_by_one() -> None:
    children.become_subreaper()
    made = guard.Guard("marker", FileLimit(1))
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        pid = _started(made, "exit 0", null)
        pidfd = os.pidfd_open(pid)
        assert select.select([pidfd], [], [], LONG_S)[0]
        os.close(pidfd)
        os.kill(made.pid, signal.SIGKILL)
        assert made.end([pid], LONG_S)[0].status == (os.CLD_EXITED, 0)
        assert made.sweep(frozenset(), LONG_S) == ((), ())
    finally:
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 0)
        os.close(null)
        made.dismiss()
