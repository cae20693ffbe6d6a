"""However a job ends, the exit code is the culprit's and no process is left."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commandline import Command, Driven
from processes import assert_no_survivors, supervisor_of
from terminals import state
from waiting import LONG_S, until

from fleetrun.run import proc
from fleetrun.run.policy import REPEAT_S

IGNORE_TERM = "trap '' TERM INT HUP; touch ready{rank}; while :; do sleep 60; done"


def test_s13_the_culprits_code_comes_back_and_the_rest_die(tmp_path: Path) -> None:
    done = Driven(tmp_path, "sleep 60", "sleep 60", "exit 17", "sleep 60").run()
    assert done.code == 17
    assert "rank 2 exited with 17" in done.stderr
    assert "ranks 0-1, 3 were stopped" in done.stderr


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("SEGV", 139), ("ABRT", 134)])
def test_s14_s15_death_by_signal_is_128_and_the_signal(
    tmp_path: Path, name: str, code: int
) -> None:
    done = Driven(tmp_path, "sleep 60", f"ulimit -c 0; kill -{name} $$").run()
    assert done.code == code
    assert f"rank 1 was killed by SIG{name}" in done.stderr


def test_s16_who_dies_first_is_the_culprit_even_if_seen_late(tmp_path: Path) -> None:
    # The launcher sleeps while both die, so it learns of both deaths at once.
    job = Driven(
        tmp_path,
        "touch ready0; until [ -e go0 ]; do sleep 0.01; done; exit 5",
        "touch ready1; until [ -e go1 ]; do sleep 0.01; done; exit 6",
    )
    launcher = end_unseen(job, (1, 0))
    done = job.finish(launcher)
    assert done.code == 6
    assert re.search(r"rank 0 exited with 5 \d+\.\d s later", done.stderr)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_s16_who_was_killed_is_the_culprit_of_two_that_died_together(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    # The kernel may need longer to remove the killed one than its peer to abort without it.
    ends = ("ABRT", "KILL")
    job = Driven(
        tmp_path,
        *(
            f"ulimit -c 0; touch ready{rank}; until [ -e go{rank} ]; do sleep 0.01; done; "
            f"kill -{end} $$"
            for rank, end in enumerate(ends)
        ),
        "sleep 600",
    )
    done = job.finish(end_unseen(job, order, count=3))
    assert "rank 1 was killed by SIGKILL" in done.stderr.splitlines()[0]
    assert "After that rank 2 was stopped by fleetrun; rank 0 was killed by SIGABRT" in done.stderr


def end_unseen(job: Driven, ranks: tuple[int, int], count: int = 2) -> subprocess.Popen[bytes]:
    """Start JOB and let RANKS end in this order while the launcher sleeps; then return it."""
    launcher = job.start_until("ready0", "ready1")
    pids = {event["rank"]: event["pid"] for event in started(job, count)}
    supervisor = supervisor_of(launcher.pid)
    os.kill(supervisor, signal.SIGSTOP)
    for rank in ranks:
        (job.folder / f"go{rank}").touch()
        until(lambda rank=rank: state(pids[rank]) == "Z")  # type: ignore[misc]
    os.kill(supervisor, signal.SIGCONT)
    return launcher


def started(job: Driven, count: int) -> list[dict[str, object]]:
    def now() -> list[dict[str, object]]:
        try:
            return [event for event in job.events() if event["event"] == "started"]
        except FileNotFoundError:
            return []

    until(lambda: len(now()) == count)
    return now()


def test_s18_the_culprits_traceback_is_the_end_of_the_console(tmp_path: Path) -> None:
    script = "import time; print('x' * 50); raise ValueError('bad batch')"
    done = Driven(tmp_path, "sleep 60", ["python3", "-c", script]).run()
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "ValueError: bad batch" in done.stderr
    assert "workerlog.1" in done.stderr


@pytest.mark.parametrize(
    ("program", "code", "why"),
    [
        ("./missing", 127, "there is no program ./missing"),
        ("no-such-program-anywhere", 127, "there is no program no-such-program-anywhere"),
        ("./plain", 126, "may not be executed: try chmod +x"),
        ("./no-first-line", 126, "a script needs a first line such as #!/bin/sh"),
        ("./lost-interpreter", 127, "the interpreter named in the first line"),
    ],
)
def test_s19_what_cannot_be_started_says_why(
    tmp_path: Path, program: str, code: int, why: str
) -> None:
    for name, content, mode in (
        ("plain", "#!/bin/sh\n", 0o644),
        ("no-first-line", "echo hi\n", 0o755),
        ("lost-interpreter", "#!/no/such/sh\n", 0o755),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    done = Driven(tmp_path, "sleep 60", [program], "sleep 60", max_restarts=2).run()
    assert done.code == code
    assert why in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_s24_a_signal_stops_everybody_politely(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    save = "trap 'echo saved; exit 0' {0}; touch ready{1}; while :; do sleep 0.02; done"
    name = signum.name[3:]
    job = Driven(tmp_path, save.format(name, 0), save.format(name, 1), tee=[0, 1])
    launcher = job.start_until("ready0", "ready1")
    launcher.send_signal(signum)
    done = job.finish(launcher)
    assert done.code == code
    # Each message appears once; the shell also mentions its sleep.
    saved = sorted(line for line in done.out.splitlines() if b"saved" in line)
    assert saved == [b"[rank 0] saved", b"[rank 1] saved"]
    assert f"SIG{name}: asked ranks 0-1 to stop" in done.stderr


def test_s25_who_ignores_it_is_killed_after_the_grace(tmp_path: Path) -> None:
    job = Driven(tmp_path, IGNORE_TERM.format(rank=0), "touch ready1; sleep 60", grace_s=1.0)
    launcher = job.start_until("ready0", "ready1")
    launcher.terminate()
    done = job.finish(launcher)
    assert done.code == 143
    # Not before the grace is over; how long after depends on the machine.
    named = [event for event in job.events() if event["event"] in {"signalled", "timer"}]
    steps = [event.get("signal", "timer") for event in named]
    assert steps == ["SIGTERM", "timer", "SIGKILL"]
    assert "Rank 0 had to be killed" in done.stderr


def test_a_stop_that_comes_with_a_death_reaches_the_other_ranks(tmp_path: Path) -> None:
    # The signal comes between the deaths of ranks 1 and 2, which one turn of the loop reports.
    # Rank 2 leaves a process in its group, which is waited for.
    wait = "until [ -e go{} ]; do sleep 0.01; done"
    job = Driven(
        tmp_path,
        "until [ -e ready3 ]; do sleep 0.01; done",
        wait.format(1),
        "sleep 60 & " + wait.format(2),
        "trap 'touch saved; exit 0' TERM; touch ready3; while :; do sleep 0.02; done",
        grace_s=60,
        interrupt_between_deaths=True,
    )
    assert job.run().code == 143
    assert (tmp_path / "saved").exists()


def test_s26_the_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    job = Driven(tmp_path, IGNORE_TERM.format(rank=0), grace_s=60)
    launcher = job.start_until("ready0")
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    assert b"asked rank 0 to stop" in launcher.stderr.readline()
    began = time.monotonic()
    until(lambda: time.monotonic() > began + REPEAT_S)
    launcher.send_signal(signal.SIGINT)
    assert job.finish(launcher).code == 130


def test_s28_sigkill_of_the_launcher_leaves_nobody(tmp_path: Path) -> None:
    job = Driven(
        tmp_path,
        "setsid sleep 60 & touch ready0; sleep 60",
        # It has its own session, and no marker in its environment.
        "env -i setsid sleep 61.0625 & env -i sleep 61.0625 & touch ready1; sleep 60",
        IGNORE_TERM.format(rank=2),
        # Its parent has ended, too: nothing shows that it belongs to this job.
        "for i in 1 2 3 4 5 6; do (env -i setsid sleep 61.0625 &); done; touch ready3; sleep 60",
        # A rank that has ended leaves such processes.
        "(env -i setsid sleep 61.0625 &); touch ready4",
        grace_s=1,
    )
    launcher = job.start_until(
        "ready0", "ready1", "ready2", "ready3", "ready4", stdout=None, stderr=None
    )
    job.kill(launcher)
    until(lambda: b"61.0625" not in commands(), 40)


def test_a_supervisor_that_was_stopped_ends_the_ranks_when_the_keeper_is_killed(
    tmp_path: Path,
) -> None:
    job = Driven(tmp_path, "touch ready0; exec sleep 1000")
    launcher = job.start_until("ready0", stdout=None, stderr=None)
    supervisor = supervisor_of(launcher.pid)
    os.kill(supervisor, signal.SIGSTOP)
    until(lambda: state(supervisor) == "T")
    job.kill(launcher)


def test_the_keeper_ends_what_a_killed_supervisor_leaves(tmp_path: Path) -> None:
    save = "trap 'sleep 0.2; touch saved; exit' TERM; touch ready{0}; while :; do sleep 0.01; done"
    job = Driven(
        tmp_path,
        save.format(0),
        IGNORE_TERM.format(rank=1),
        "(env -i setsid sleep 61.125 &); touch ready2; sleep 60",
        grace_s=2,
        max_restarts=3,
    )
    launcher = job.start_until("ready0", "ready1", "ready2")
    supervisor = supervisor_of(launcher.pid)
    os.kill(supervisor, signal.SIGKILL)
    done = job.finish(launcher)
    assert done.code == 137
    assert "the supervisor was killed" in done.stderr
    assert (tmp_path / "saved").exists()
    assert b"61.125" not in commands()


def test_a_supervisor_that_fails_itself_leaves_nobody(tmp_path: Path) -> None:
    job = Driven(tmp_path, "touch ready0; until [ -e go ]; do sleep 0.05; done; exit 5", "sleep 60")
    launcher = job.start_until("ready0")
    resource.prlimit(supervisor_of(launcher.pid), resource.RLIMIT_NOFILE, (4, 4))
    (tmp_path / "go").touch()
    done = job.finish(launcher)
    assert done.code == 1
    assert "fleetrun: the supervisor has failed; its ranks were stopped." in done.stderr


def test_s21_a_damaged_record_of_a_rank_changes_nothing(tmp_path: Path) -> None:
    record = '{"schema":1,"kind":"exception","restart":0,"pid":4000000,"monotonic":"x"}'
    write = f"echo '{record}' >>$FLEETRUN_RECORDS; touch written; sleep 60"
    fail = "until [ -e written ]; do sleep 0.05; done; exit 5"
    done = Command(tmp_path, f"if [ $R = 0 ]; then {write}; fi; {fail}").run()
    assert done.code == 5
    assert done.stderr.startswith("fleetrun: rank 1 exited with 5.")


def test_stacks_are_written_for_a_launch_that_ignores_the_keyboard(tmp_path: Path) -> None:
    job = Command(tmp_path, "touch ready$R; until [ -e go ]; do sleep 0.05; done")
    launcher = job.start(("sh", "-c", "trap '' QUIT INT; exec \"$@\"", "sh"))
    job.wait_for("ready0", "ready1")
    os.kill(launcher.pid, signal.SIGQUIT)
    until(lambda: any(e["event"] == "stacks_requested" for e in job.events()))
    assert job.release(launcher).code == 0


@pytest.mark.parametrize("target", ["group", "name"])
def test_who_kills_the_launchers_group_or_name_leaves_nobody(tmp_path: Path, target: str) -> None:
    job = Driven(tmp_path, "setsid sleep 60 & touch ready0; sleep 60", grace_s=1)
    launcher = job.start_until("ready0", start_new_session=True, stdout=None, stderr=None)
    if target == "group":
        os.killpg(launcher.pid, signal.SIGKILL)
    else:
        subprocess.run(["pkill", "-KILL", "-f", job.argv[-1]], check=True)
    launcher.wait(LONG_S)
    assert_no_survivors(job.marker)


# It cannot be caught by its pid: it is another process every few milliseconds.
HOPPER = """
import os, time
if not os.fork():
    os.setsid()
    open("ready0", "w").close()
    while True:
        time.sleep(0.01)
        if os.fork():
            os._exit(0)
time.sleep(60)
"""


@pytest.mark.extended
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_s29_who_forks_away_all_the_time_is_caught_too(
    tmp_path: Path, signum: signal.Signals
) -> None:
    job = Driven(tmp_path, ["python3", "-c", HOPPER])
    launcher = job.start_until("ready0", stdout=None, stderr=None)
    launcher.send_signal(signum)
    launcher.wait(LONG_S)
    # A look between two hops sees none; after so many looks there is none.
    for _ in range(50):
        assert_no_survivors(job.marker)


def commands() -> bytes:
    lines = b""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    lines += file.read()
            except OSError:
                continue
    return lines


def test_s31_nohup_survives_the_terminal(tmp_path: Path) -> None:
    job = Driven(tmp_path, "touch ready0; until [ -e go ]; do sleep 0.01; done")
    launcher = job.start_until("ready0", prefix=["nohup"])
    launcher.send_signal(signal.SIGHUP)
    assert job.release(launcher).code == 0


def test_s32_users_signals_reach_every_rank(tmp_path: Path) -> None:
    code = "trap 'exit 0' USR1; touch ready{0}; while :; do sleep 0.02; done"
    job = Driven(tmp_path, code.format(0), code.format(1))
    launcher = job.start_until("ready0", "ready1")
    launcher.send_signal(signal.SIGUSR1)
    assert job.finish(launcher).code == 0


def test_s33_ctrl_z_stops_ranks_and_launcher_and_fg_goes_on(tmp_path: Path) -> None:
    # A shell that starts a program just then would be in state D, waiting for the stopped child.
    os.mkfifo(tmp_path / "go")
    job = Driven(tmp_path, "touch ready0; read line < go")
    launcher = job.start_until("ready0")
    (event,) = started(job, 1)
    launcher.send_signal(signal.SIGTSTP)
    for pid in (launcher.pid, event["pid"]):
        until(lambda pid=pid: state(pid) == "T")  # type: ignore[misc]
    launcher.send_signal(signal.SIGCONT)
    (tmp_path / "go").write_text("go\n")
    assert job.finish(launcher).code == 0


def test_orphans_that_end_are_reaped_while_the_job_runs(tmp_path: Path) -> None:
    orphans = "for i in 1 2 3; do (sh -c 'exit 0' &); done; touch ready0; "
    job = Driven(tmp_path, orphans + "until [ -e go ]; do sleep 0.01; done")
    launcher = job.start_until("ready0")
    (event,) = started(job, 1)

    supervisor = supervisor_of(launcher.pid)
    until(lambda: children(supervisor) == {event["pid"]})
    assert job.release(launcher).code == 0


def test_orphans_are_reaped_where_some_end_all_the_time(tmp_path: Path) -> None:
    storm = "n=0; until [ -e go ]; do (sleep 0.01 &); sleep 0.02; n=$((n + 1)); "
    job = Driven(tmp_path, storm + "[ $n != 100 ] || touch many; done")
    launcher = job.start_until("many")
    supervisor = supervisor_of(launcher.pid)
    until(lambda: len(children(supervisor)) < 50)
    assert job.release(launcher).code == 0


def ask_stopped_supervisor_to_stop(launcher: subprocess.Popen[bytes]) -> int:
    """Send LAUNCHER SIGTSTP, which its supervisor cannot hear yet; return the supervisor."""
    supervisor = supervisor_of(launcher.pid)
    os.kill(supervisor, signal.SIGSTOP)
    until(lambda: state(supervisor) == "T")
    launcher.send_signal(signal.SIGTSTP)
    # It has passed the signal on once it waits again.
    until(lambda: not pending(launcher.pid) and state(launcher.pid) == "S")
    return supervisor


def test_who_is_continued_before_it_has_stopped_goes_on(tmp_path: Path) -> None:
    job = Driven(tmp_path, "touch ready0; until [ -e go ]; do sleep 0.01; done")
    launcher = job.start_until("ready0")
    # The supervisor hears of both at once.
    ask_stopped_supervisor_to_stop(launcher)
    launcher.send_signal(signal.SIGCONT)
    assert job.release(launcher).code == 0


def test_who_is_continued_while_it_stops_goes_on(tmp_path: Path) -> None:
    # Not a loop of `sleep`: a shell that waits for a stopped vfork to execute is not "T" itself.
    os.mkfifo(tmp_path / "go")
    job = Driven(tmp_path, "touch ready0; read line < go")
    launcher = job.start_until("ready0")
    (event,) = started(job, 1)
    supervisor = ask_stopped_supervisor_to_stop(launcher)
    # The keeper hears of the supervisor's stop and of its own continuation at once.
    launcher.send_signal(signal.SIGSTOP)
    until(lambda: state(launcher.pid) == "T")
    os.kill(supervisor, signal.SIGCONT)
    until(lambda: state(event["pid"]) == "T" == state(supervisor))
    launcher.send_signal(signal.SIGCONT)
    (tmp_path / "go").write_text("go\n")
    assert job.finish(launcher).code == 0


def pending(pid: int) -> int:
    """Return the signals that PID has yet to take, as bits."""
    return int(proc.rows(pid, "status")["ShdPnd"], 16)


def children(pid: int) -> set[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return set(map(int, file.read().split()))


def test_s28_sigkill_while_starting_leaves_nobody(tmp_path: Path) -> None:
    job = Driven(tmp_path, *["touch born; sleep 60"] * 100, tee=[])
    launcher = job.start_until("born")
    launcher.kill()
    launcher.communicate(timeout=LONG_S)
    assert_no_survivors(job.marker)
