"""A rank that fails first but ends slowly is the culprit, whichever rank ends before it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from commandline import Command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

# Rank 1 fails and closes its connection; its end takes long. Rank 0 loses it and ends at once.
JOB = """
import atexit, signal, socket, threading
def meet():
    if rank == 0:
        server = socket.create_server(("127.0.0.1", 0))
        with open("port.new", "w") as file: print(server.getsockname()[1], os.getpid(), file=file)
        os.rename("port.new", "port")
        return server.accept()[0]
    while not os.path.exists("port"): time.sleep(0.01)
    global victim
    port, victim = open("port").read().split()
    return socket.create_connection(("127.0.0.1", int(port)))
link = meet() if rank < 2 else None
def culprit():
    {fail}
def teardown():
    link.close()
    # Gone when the launcher has seen its end.
    while os.path.exists(f"/proc/{{victim}}"): time.sleep(0.01)
    time.sleep({teardown})
if rank == 1:
    atexit.register(teardown)
    culprit()
elif rank == 0:
    link.recv(1)
    {lose}
time.sleep(60)
"""
VICTIMS = {
    "words of a victim": 'raise OSError("Connection reset by peer")',
    "exception": 'raise RuntimeError("all_reduce failed")',
    "plain exit": "os._exit(9)",
    "sys.exit": "sys.exit(9)",
    "signal": "os.kill(os.getpid(), signal.SIGABRT)",
}
FAILURES = {
    "raise": ('raise ValueError("no such column: label")', 1),
    "sys.exit": ("try: {}['label']\n    except KeyError: sys.exit(7)", 7),
}


def report(job: Command) -> dict[str, Any]:
    text = (job.folder / "log" / "latest" / "report.json").read_text()
    document: dict[str, Any] = json.loads(text)
    return document


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_s16_teardowns_of_all_lengths_in_all_orders(tmp_path: Path, every: int) -> None:
    # The ranks sleep, so that all cases can run at once. A third of them covers all pairs.
    cases = [
        (failure, victim, teardown)
        for first, failure in enumerate(FAILURES)
        for second, victim in enumerate(("exception", "plain exit", "signal"))
        for third, teardown in enumerate((0, 0.5, 2, 5))
        if (first + second + third) % every == 0
    ]
    for first in range(0, len(cases), 12):
        running = []
        for failure, victim, teardown in cases[first : first + 12]:
            fail, code = FAILURES[failure]
            folder = tmp_path / f"{failure}-{victim}-{teardown}"
            folder.mkdir()
            script = JOB.format(fail=fail, teardown=teardown, lose=VICTIMS[victim])
            job = Command.python(folder, script, "--grace=60", ranks=3)
            running.append((job, job.start(), code))
        for job, launcher, code in running:
            ended = job.finish(launcher)
            assert (ended.code, job.folder.name) == (code, job.folder.name)
            # A line about the wait for a slow rank may precede this.
            assert f"fleetrun: rank 1 exited with {code}.\nIt failed first" in ended.stderr
            document = report(job)
            assert (document["culprit"]["rank"], document["culprit"]["code"]) == (1, code)
            assert [victim["rank"] for victim in document["victims"]] == [0, 2]


@pytest.mark.parametrize("failure", ["raise", "sys.exit"])
def test_s16_who_does_not_end_in_time_is_judged_by_its_exception(
    tmp_path: Path, failure: str
) -> None:
    fail, code = FAILURES[failure]
    script = JOB.format(fail=fail, teardown=60, lose=VICTIMS["plain exit"])
    job = Command.python(tmp_path, script, "--grace=1")
    ended = job.run()
    assert ended.code == code
    assert f"rank 1 exited with {code}." in ended.stderr
    assert "it still had not ended and was stopped" in ended.stderr
    (end,) = [e for e in job.events() if e["event"] == "exited" and e["rank"] == 1]
    assert end["signal"] == "SIGTERM"


# Rank 1 raises and stays; the other waits for it, as in a collective.
STAYS = """
import atexit, signal, threading
def forever(*_): threading.Event().wait()
{stay}
if rank == 1:
    {fail}
forever()
"""
STAYS_IN = {
    "exit handler": "if rank == 1: atexit.register(forever)",
    "thread": "if rank == 1: threading.Thread(target=forever).start()",
    # Like a destructor of Paddle that waits for its device.
    "deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\natexit.register(forever)",
    # Like a rank that waits for a GPU.
    "spinning": "def spin():\n    while True: pass\nif rank == 1: atexit.register(spin)",
}


@pytest.mark.parametrize(
    "stay",
    [
        "exit handler",
        *(pytest.param(place, marks=pytest.mark.extended) for place in list(STAYS_IN)[1:]),
    ],
)
def test_who_has_raised_and_does_not_end_has_failed_after_the_grace(
    tmp_path: Path, stay: str
) -> None:
    script = STAYS.format(stay=STAYS_IN[stay], fail='raise ValueError("no such column")')
    job = Command.python(tmp_path, script, "--grace=2", ranks=3)
    ended = job.run()
    assert ended.code == 1, ended.stderr
    assert "Rank 1 raised ValueError" in ended.stderr
    assert " s ago and has not ended; the job ends." in ended.stderr
    assert "fleetrun: rank 1 exited with 1." in ended.stderr
    assert "ValueError: no such column" in ended.stderr
    failure = report(job)
    assert (failure["culprit"]["rank"], failure["culprit"]["code"]) == (1, 1)
    assert sorted(victim["rank"] for victim in failure["victims"]) == [0, 2]
    (overdue,) = [event for event in job.events() if event["event"] == "overdue"]
    assert (overdue["rank"], overdue["failed"]) == (1, ["trainer.1"])


@pytest.mark.parametrize("failure", FAILURES)
def test_who_has_raised_and_hangs_is_not_a_hang_but_its_failure(
    tmp_path: Path, failure: str
) -> None:
    fail, code = FAILURES[failure]
    script = STAYS.format(stay=STAYS_IN["exit handler"], fail=fail)
    job = Command.python(tmp_path, script, "--grace=60", "--hang_timeout=0.8")
    ended = job.run()
    assert ended.code == code, ended.stderr
    assert f"fleetrun: rank 1 exited with {code}." in ended.stderr
    assert "hung" not in {event["event"] for event in job.events()}
