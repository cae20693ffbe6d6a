"""The log lines that explain a failure, and the words of the verdict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.model import ExitStatus
from fleetrun.postmortem import causes, lastlines, report
from fleetrun.postmortem.investigation import Investigation, Victim
from fleetrun.run.events import Exited, Failure, Hung, Outcome
from fleetrun.rundir.reportfile import ProcessEnd

CHAIN = """\
Traceback (most recent call last):
  File "a.py", line 3, in <module>
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 4, in <module>
ValueError: bad
batch"""

# Paddle's words for an exception in the DataLoader, whose thread prints it before.
LOADER = """\
Traceback (most recent call last):
  File "data.py", line 6, in __getitem__
ValueError: a broken sample

Traceback (most recent call last):
  File "a.py", line 11, in <module>
SystemError: (Fatal) Blocking queue is killed because the data reader raises an exception."""

CRASH = """\
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "c.py", line 5 in <module>

Extension modules: numpy.core, paddle (total: 2)


--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   phi::Kernel
----------------------
Error Message Summary:
----------------------
FatalError: `Segmentation fault` is detected by the operating system."""


def test_only_a_failure_of_its_own_is_the_first() -> None:
    lost = Failure("node1", "fleetrun was cut off from the coordinator (node0)", 1, is_victim=True)
    failed = Failure("node1", "rank 1 exited with 7", 7, "alas")
    told = {
        failure: report.verdict(Outcome(failure), Investigation(), ["rank 0"], frozenset())
        for failure in (lost, failed)
    }
    assert told == {
        lost: "Fleetrun was cut off from the coordinator (node0) on node1.",
        failed: "Rank 1 exited with 7 on node1: the job failed there first. Its log ends with\n"
        "    alas",
    }


@pytest.mark.parametrize("traceback", [CHAIN, LOADER])
def test_a_traceback_is_whole_with_what_led_to_it(traceback: str) -> None:
    assert lastlines.last_lines(f"step 1\n{traceback}\n") == traceback.split("\n")


def test_a_crash_is_told_once_without_unrelated() -> None:
    lines = lastlines.last_lines(f"step 1\n{CRASH}\n\n{CRASH}\n")
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert '  File "c.py", line 5 in <module>' in lines
    assert sum(line.startswith("C++ Traceback") for line in lines) == 1
    assert not any("threading.py" in line or "Extension" in line for line in lines)
    assert lines[-1].startswith("FatalError: `Segmentation fault`")


@given(st.text(st.sampled_from("abT \r\n-\x0b\u2028"), max_size=200) | st.text())
def test_no_log_is_too_odd(text: str) -> None:
    assert len(lastlines.last_lines(text)) <= 100


def exited(process: int, at: float, signum: int | None = None) -> Exited:
    return Exited(process, f"rank {process}", ExitStatus(1, signum), at, 40 + process)


FULL = causes.recognise("[Errno 28]")
LABELS = [f"rank {n}" for n in range(9)]


def findings(*victims: Victim) -> Investigation:
    assert FULL is not None
    culprit = ProcessEnd(
        host="h",
        devices="GPU 2",
        time=1e9,
        after_s=3.04,
        log="/log/workerlog.2",
        last_words=("Traceback (most recent call last):", "OSError: [Errno 28] x"),
        remedy=FULL.sentence,
    )
    return Investigation(culprit, source=culprit.log, victims=victims)


def lines_of(reported: Investigation, *, shown: frozenset[int] = frozenset()) -> list[str]:
    return report.verdict(Outcome(exited(2, 5.0)), reported, LABELS, shown).split("\n")


def test_s16_culprit_before_victims() -> None:
    lost = [Victim(exited(n, 0.0), after, "peer lost") for n, after in ((0, 0.2), (3, 1.0))]
    stopped = Victim(exited(1, 0.0, signum=15), 0.1, "stopped")
    first, where, log, *words, known, others = lines_of(findings(*lost, stopped))
    assert first == "rank 2 exited with 1."
    assert where.startswith("It failed first, on h (GPU 2), pid 42, at 2001-09-0")
    assert where.endswith(", 3.0 s after the start.")
    assert log == "Its log is /log/workerlog.2, which ends with"
    assert words == ["    Traceback (most recent call last):", "    OSError: [Errno 28] x"]
    assert known.startswith("The disk is full")
    assert others == (
        "After that rank 1 was stopped by fleetrun; "
        "ranks 0, 3 failed 0.2 to 1.0 s later: peer lost."
    )


def test_many_failures_are_folded() -> None:
    victims = [Victim(exited(n, 0.0), 0.0, "") for n in range(7)]
    assert lines_of(findings(*victims))[-1].endswith("; 4 more failed after that.")


def test_what_is_on_the_screen_is_not_said_again() -> None:
    lines = lines_of(findings(), shown=frozenset({2}))
    assert "Its log is /log/workerlog.2." in lines
    assert not any("Traceback" in line for line in lines)


def test_a_hung_job_whose_ranks_run_no_python_code_says_so() -> None:
    hung = Hung(8.0, 1.0, stacks="/stacks")
    lines = report.verdict(Outcome(hung), Investigation(), [], frozenset()).splitlines()
    assert lines[1].startswith("    No rank is in Python code: ")


def test_ranks_of_a_hung_job_that_read_as_in_one_place_are_in_one_line() -> None:
    where = "broadcast (broadcast.py:43), called from step (train.py:9)"
    places = ((("rank 10",), where), (("rank 0", "rank 2"), where), (("rank 1",), where))
    hung = Hung(8.0, 1.0, places, ("rank 1",), "/stacks")
    verdict = report.verdict(Outcome(hung), Investigation(), [], frozenset())
    assert f"Ranks 0, 2, 10 stand in {where}.\n    Rank 1 stands in {where}, unlike" in verdict


def test_in_a_circle_all_are_at_fault() -> None:
    circle = Hung(8.0, 1.0, ((("rank 1",), "wait (net.py:7)"),), ("rank 1",), "/stacks")
    assert "unlike" not in report.verdict(Outcome(circle), Investigation(), [], frozenset())
