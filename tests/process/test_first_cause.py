"""Which rank failed first, and why: as text, and as JSON."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from commandline import Command
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended


def report(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "log" / "latest" / "report.json").read_text())
    return document


def test_s14_sigkill_comes_with_numbers(tmp_path: Path) -> None:
    done = Command(tmp_path, "[ $R = 1 ] && kill -KILL $$; sleep 60").run()
    assert done.code == 137
    assert "rank 1 was killed by SIGKILL (killed from outside, usually by the kernel" in done.stderr
    assert "Its peak memory use was " in done.stderr
    assert "this host has " in done.stderr
    assert report(tmp_path)["culprit"]["signal"] == "SIGKILL"
    assert report(tmp_path)["culprit"]["peak_bytes"] > 0


def test_s14_who_was_killed_did_not_fail_of_what_it_had_handled(tmp_path: Path) -> None:
    lines = "Traceback (most recent call last):\\nConnectionError: Connection reset by peer\\n"
    say = f"printf '{lines}ModuleNotFoundError: no apex\\n'; seq 99"
    job = Command(
        tmp_path,
        f"[ $R$PADDLE_RESTART_COUNT = 10 ] && {{ {say}; kill -KILL $$; }}; "
        "[ $PADDLE_RESTART_COUNT = 1 ] && exit 0; sleep 60",
        "--max_restart=1",
    )
    assert job.run().code == 0
    job.argv.remove("--max_restart=1")
    done = job.run()
    assert done.code == 137
    assert "99\n" in done.stderr
    for wrong in ("lost a peer", "import a module", "Traceback"):
        assert wrong not in done.stderr


def test_s15_a_bus_error_measures_shared_memory(tmp_path: Path) -> None:
    done = Command(tmp_path, "[ $R = 1 ] && kill -BUS $$; sleep 60").run()
    assert "/dev/shm has " in done.stderr


UNCAUGHT = (
    "terminate called after throwing an instance of E\\n  what():  TIMEOUT self_rank = 0\\n"
    "Fatal Python error: Aborted\\n"
)


def test_s16_a_peer_that_is_stopped_is_told_to_who_lost_it(tmp_path: Path) -> None:
    lose = "until [ -e gone ]; do sleep 0.02; done; echo Connection reset by peer; exit 1"
    job = Command(tmp_path, f"if [ $R = 1 ]; then kill -STOP $$; fi; {lose}", "--grace=0.1")
    launcher = job.start()
    until(lambda: any(e.get("what") == "stopped" for e in job.events()))
    (tmp_path / "gone").touch()
    done = job.finish(launcher)
    assert re.search(r"Rank 1 was stopped \(T\) \d+\.\d s before and did not go on\.", done.stderr)
    assert "This rank lost a peer that was stopped: " in done.stderr
    assert "other hosts" not in done.stderr


@pytest.mark.parametrize(
    ("loss", "end"),
    [
        ("echo Connection reset by peer; exit 1", "exited with 1"),
        # Paddle's reducer does this.
        (f"printf '{UNCAUGHT}'; kill -ABRT $$", "was killed by SIGABRT"),
    ],
)
@pytest.mark.parametrize("beats", [True, False])
def test_s16_a_peer_that_ended_too_early_is_told_to_who_lost_it(
    loss: str, end: str, beats: bool, tmp_path: Path
) -> None:
    beat = "echo '6 update' >$FLEETRUN_HEARTBEAT; " if beats else ""
    lose = f"until [ -e gone ]; do sleep 0.02; done; {loss}"
    job = Command(tmp_path, f"if [ $R = 1 ]; then {beat}exit 0; fi; {lose}")
    launcher = job.start()
    until(lambda: any(e["event"] == "exited" for e in job.events()))
    (tmp_path / "gone").touch()
    done = job.finish(launcher)
    assert done.stderr.startswith(f"fleetrun: rank 0 {end}")
    after = " after 6 updates," if beats else ""
    sentence = rf"Rank 1 had ended without an error{after} \d+\.\d s before; its log is "
    assert re.search(sentence, done.stderr), done.stderr
    assert "This rank lost a peer that had ended early" in done.stderr


def test_s16_a_thread_that_failed_is_told_to_who_lost_its_rank(tmp_path: Path) -> None:
    # Of Paddle's DataLoader without workers; its rank waits for ever.
    thread = (
        "Exception in thread Thread-1 (_thread_loop):\\nTraceback (most recent call last):\\n"
        '  File "data.py", line 6, in fetch\\nValueError: a broken sample\\n'
    )
    lose = "until [ -e gone ]; do sleep 0.02; done; echo Connection reset by peer; exit 1"
    job = Command(tmp_path, f"if [ $R = 1 ]; then printf '{thread}'; >gone; sleep 60; fi; {lose}")
    done = job.run()
    assert done.stderr.startswith("fleetrun: rank 0 exited with 1")
    told = "Rank 1 had lost a thread to ValueError: a broken sample; its log is "
    assert told in done.stderr, done.stderr
    assert "This rank lost a peer that waits for its failed thread" in done.stderr
    assert "other hosts" not in done.stderr


def test_s16_who_lost_a_peer_is_a_victim(tmp_path: Path) -> None:
    lost = "trap 'echo Connection reset by peer; exit 1' TERM; touch ready$R; "
    wait = "while :; do sleep 0.02; done"
    ready = "until [ -e ready0 ] && [ -e ready1 ] && [ -e ready3 ]; do sleep 0.02; done"
    script = f"if [ $R = 2 ]; then {ready}; echo alas; exit 7; fi; {lost}{wait}"
    done = Command(tmp_path, script, ranks=4).run()
    assert done.code == 7
    lines = done.stderr.splitlines()
    assert lines[0] == "fleetrun: rank 2 exited with 7."
    assert lines[1].startswith(f"It failed first, on {os.uname().nodename}, pid ")
    assert lines[3] == "    alas"
    assert lines[-1].startswith("After that ranks 0-1, 3 failed 0.")
    assert lines[-1].endswith(" s later: peer lost.")
    assert [victim["how"] for victim in report(tmp_path)["victims"]] == ["peer lost"] * 3


def test_s18_s20_the_exception_comes_from_the_records_if_the_log_lacks_it(
    tmp_path: Path,
) -> None:
    code = "sys.stderr = open(os.devnull, 'w')\nif rank == 1: raise ValueError('a\\nb \\udcff')"
    done = Command.python(tmp_path, f"{code}\ntime.sleep(60)").run()
    assert done.code == 1
    assert "/rank.1.jsonl ends with" in done.stderr
    assert "    Traceback (most recent call last):" in done.stderr
    culprit = report(tmp_path)["culprit"]
    assert (culprit["rank"], culprit["code"], culprit["attempt"]) == (1, 1, 0)
    assert (culprit["class"], culprit["host"]) == ("ValueError", os.uname().nodename)
    assert culprit["message"].startswith("a\nb ")
    assert "raise ValueError" in culprit["stack"]
    assert culprit["pid"] > 1
    assert culprit["time"] > 1e9
