"""The output of ranks reaches the console complete, and never blocks a rank."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commandline import Driven
from mounts import mounted
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

# Everything that ever confused a console.
NASTY = b"".join(
    (
        b"plain\n",
        b"\r 10%|#\r 20%|##\r100%|####\n",
        b"\xff\xfe invalid \x80\xc3\n",
        "日本語 🚀 ".encode() * 9000 + b"\n",
        b"x" * 65536 + b"\n",
        b"\n\n\t\x1b[31mred\x1b[0m\x00null\n",
        b"no end of line",
    )
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_one_rank_is_shown_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "nasty").write_bytes(NASTY)
    done = Driven(tmp_path, "cat nasty", "echo hidden").run()
    assert done.out == NASTY


def test_s65_lines_of_several_ranks_never_mix(tmp_path: Path) -> None:
    write = """
import os, sys
rank = os.environ["PADDLE_TRAINER_ID"].encode()
for number in range(300):
    line = b"%s %d " % (rank, number) + "é🚀".encode() * (number % 7 * 50) + b"\\xff\\n"
    for start in range(0, len(line), 7):
        os.write(1, line[start:start + 7])
os.write(1, rank + b" end")
"""
    done = Driven(tmp_path, *[python(write)] * 3, tee=[0, 1, 2]).run()
    for rank in range(3):
        prefix = b"[rank %d] " % rank
        mine = [line for line in done.out.splitlines(keepends=True) if line.startswith(prefix)]
        shown = b"".join(line.removeprefix(prefix) for line in mine)
        assert shown == (tmp_path / "log" / f"workerlog.{rank}").read_bytes() + b"\n"
    assert len(done.out.splitlines()) == 3 * 301


def test_output_is_live(tmp_path: Path) -> None:
    job = Driven(
        tmp_path, "for i in 1 2 3; do echo $i; until [ -e go$i ]; do sleep 0.01; done; done"
    )
    launcher = job.start()
    assert launcher.stdout is not None
    for number in (b"1", b"2", b"3"):
        assert launcher.stdout.readline() == number + b"\n"
        (tmp_path / f"go{number.decode()}").touch()
    assert job.finish(launcher).code == 0


def test_s37_a_reader_that_leaves_ends_nothing(tmp_path: Path) -> None:
    job = Driven(
        tmp_path, "echo first; until [ -e go ]; do echo more; sleep 0.01; done; touch done0; exit 4"
    )
    launcher = job.start()
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"first\n"
    launcher.stdout.close()
    launcher.stdout = None
    assert launcher.stderr is not None
    warning = launcher.stderr.readline()
    done = job.release(launcher)
    assert b"standard output was closed" in warning
    assert b"workerlog.0" in warning
    assert done.code == 4
    assert (tmp_path / "done0").exists()


def test_closed_standard_files_never_become_somebody_elses(tmp_path: Path) -> None:
    job = Driven(tmp_path, "cat; echo fine")
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert job.finish(job.start(prefix=closed)).code == 0
    assert job.log(0).read_bytes() == b"fine\n"


def test_a_terminal_gets_everything_and_stays_as_it_was(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    job = Driven(tmp_path, python("for i in range(5000): print(i)"))
    launcher = job.start(stdout=follower)
    before = os.get_blocking(follower)
    got = b""
    # Until nothing more comes: a lost line is to fail this test, not to hang it.
    while not got.endswith(b"4999\r\n") and select.select([leader], [], [], 20.0)[0]:
        got += os.read(leader, 65536)
    assert job.finish(launcher).code == 0
    assert os.get_blocking(follower) == before
    os.close(follower)
    os.close(leader)
    assert got == b"".join(b"%d\r\n" % i for i in range(5000))


def test_a_reader_that_stops_reading_holds_nobody_up(tmp_path: Path) -> None:
    write = (
        "import sys; sys.stdout.write('y' * 999 + '\\n') ; [print('x' * 99) for _ in range(9999)]"
    )
    job = Driven(
        tmp_path,
        python(f"{write}; open('wrote', 'w')"),
        "until [ -e go ]; do sleep 0.01; done; exit 6",
    )
    launcher = job.start()
    # The pipe is full long before that; the rank does not notice, and the launcher is not stuck.
    job.wait_for("wrote")
    (tmp_path / "go").touch()
    assert launcher.stderr is not None
    events = tmp_path / "log" / "latest" / "events.jsonl"
    until(lambda: events.exists() and b'"finished"' in events.read_bytes())
    done = job.finish(launcher)
    assert done.code == 6
    assert len(done.out) == 1000 + 100 * 9999


def test_rank_0_alone_reads_what_is_piped_in(tmp_path: Path) -> None:
    job = Driven(tmp_path, "cat", "cat; echo nothing", tee=[0, 1])
    launcher = job.start(stdin=subprocess.PIPE)
    assert launcher.stdin is not None
    launcher.stdin.write(b"typed\n")
    launcher.stdin.close()
    launcher.stdin = None
    done = job.finish(launcher)
    assert sorted(done.out.splitlines()) == [b"[rank 0] typed", b"[rank 1] nothing"]


def test_ranks_find_signals_limits_and_variables_as_the_user_left_them(tmp_path: Path) -> None:
    look = "grep -E 'Sig(Blk|Ign)' /proc/self/status; ulimit -n; echo \"${DROP_ME-gone} $KEEP\""
    job = Driven(tmp_path, look, *["true"] * 40)
    limited = ["sh", "-c", 'ulimit -Sn 60; exec "$@"', "sh"]
    env = {"DROP_ME": "1", "KEEP": "a b=c\n'\"$x"}
    done = job.finish(job.start(prefix=limited, env=env))
    assert done.code == 0, done.stderr
    lines = done.out.decode().splitlines()
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in lines if ":\t" in line}
    assert masks["SigBlk"] == 0
    for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGCHLD):
        assert not masks["SigIgn"] >> (signum - 1) & 1
    assert "60" in lines
    assert lines[-2:] == ["gone a b=c", "'\"$x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("options", ["size=64k", "size=64k,ro"])
def test_s37_a_full_or_read_only_log_folder_is_said_before_anything_starts(
    tmp_path: Path, options: str
) -> None:
    with mounted(tmp_path / "log", "tmpfs", "size=64k") as small:
        (small / "filler").write_bytes(b"x" * 60_000)
        with (small / "filler").open("ab") as filler:
            while filler_takes(filler.fileno()):
                pass
        if "ro" in options.split(","):
            subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        done = Driven(tmp_path, f"touch {tmp_path}/born").run()
    assert done.code == 3
    assert re.search(r"cannot be written .* \(.*\): make room or choose", done.stderr)
    assert not (tmp_path / "born").exists()


def filler_takes(fd: int) -> bool:
    try:
        return os.write(fd, b"x" * 512) > 0
    except OSError:
        return False
