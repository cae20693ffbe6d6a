"""A command before those of some ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commandline import Command
from plans import a_request, a_roster, some_facts

from fleetrun.cli import request
from fleetrun.cli.argv import split
from fleetrun.errors import UsageError
from fleetrun.plan import planner
from fleetrun.plan.devices import Share

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.model import Request


def commands(made: Request, me: int = 0) -> list[tuple[str, ...]]:
    """Return the commands on host ME of two, with two ranks on each."""
    roster = a_roster(("10.0.0.1", "10.0.0.2"), me=me)
    facts = some_facts()
    share = Share("gpu", roster.members[me].groups, "nccl")
    return [process.argv for process in planner.plan(made, facts, share, roster).processes]


def asked(text: str) -> Request:
    """Return the request of `--wrap=TEXT`."""
    return request.resolve(split((f"--wrap={text}", "train.py")), {})


def test_the_ranks_that_are_named_get_the_command_wherever_they_run() -> None:
    plain = commands(a_request())[0]
    words = ("nsys", "profile", "-o", "my rank")
    made = a_request(wrap=asked("1,2: nsys profile -o 'my rank'").wrap)
    assert commands(made) == [plain, (*words, *plain)]
    assert commands(made, me=1) == [(*words, *plain), plain]
    everywhere = a_request(wrap=asked("all: strace").wrap)
    assert commands(everywhere) == [("strace", *plain)] * 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nsys profile", "give 'RANKS: COMMAND'"),
        ("0:", "give 'RANKS: COMMAND'"),
        ("0: 'open", "give 'RANKS: COMMAND'"),
        ("first: nsys", "give 'RANKS: COMMAND'"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        asked(text)


def test_the_rank_is_what_the_command_starts(tmp_path: Path) -> None:
    # The failing rank ends the other, so it waits until that has printed.
    code = """
print(os.environ.get("MARK"), flush=True)
open(f"said{rank}", "w").close()
while not os.path.exists("said0"): time.sleep(0.01)
sys.exit(7 if rank == 1 else 0)
"""
    job = Command.python(tmp_path, code, "--wrap=1: env MARK=yes")
    assert job.run().code == 7
    assert [job.log(rank).read_text() for rank in range(2)] == ["None\n", "yes\n"]
