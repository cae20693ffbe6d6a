"""A command before those of some ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commandline import Command
from planning import a_request, a_roster, planned, some_facts

from fleetrun.cli import request
from fleetrun.cli.argv import split
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import scripts
from fleetrun.plan import planner
from fleetrun.plan.devices import Share

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.model import Request


def commands(made: Request, me: int = 0, fault: str | None = None) -> list[tuple[str, ...]]:
    """Return the commands on host ME of two, with two ranks on each."""
    roster = a_roster(("10.0.0.1", "10.0.0.2"), me=me)
    facts = some_facts(wrap_fault=fault)
    share = Share("gpu", roster.members[me].groups, "nccl")
    return [process.argv for process in planner.plan(made, facts, share, roster).processes]


def asked(text: str) -> Request:
    """Return the request of `--wrap=TEXT`."""
    return request.resolve(split((f"--wrap={text}", "train.py")), {}, None)


def test_the_ranks_that_are_named_get_the_command_wherever_they_run() -> None:
    plain = commands(a_request())[0]
    words = ("nsys", "profile", "-o", "my rank")
    made = a_request(wrap=asked("1,2: nsys profile -o 'my rank'").wrap)
    assert commands(made) == [plain, (*words, *plain)]
    assert commands(made, me=1) == [(*words, *plain), plain]
    everywhere = a_request(wrap=asked("all: strace").wrap)
    assert commands(everywhere) == [("strace", *plain)] * 2


def test_servers_are_no_ranks_that_get_the_command() -> None:
    wanted = a_request(run_mode="ps", server_num=1, trainer_num=1)
    for text in ("all: strace", "0: strace"):
        server, trainer = planned(wanted._replace(wrap=asked(text).wrap), some_facts()).processes
        assert trainer.argv == ("strace", *server.argv)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nsys profile", "give 'RANKS: COMMAND'"),
        ("0:", "give 'RANKS: COMMAND'"),
        ("0: 'open", "the command cannot be read"),
        ("first: nsys", "give all, or ranks"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        asked(text)


def test_a_program_that_is_missing_matters_only_where_its_ranks_are() -> None:
    made = a_request(wrap=asked("1: nsys").wrap)
    with pytest.raises(EnvironmentFault, match=r"--wrap=1: nsys: there is no nsys"):
        commands(made, fault="there is no nsys")
    assert commands(made, me=1, fault="there is no nsys") == commands(made, me=1)


def test_a_program_that_is_missing_is_a_sentence_before_anything_starts(tmp_path: Path) -> None:
    done = Command(tmp_path, "touch started", "--wrap=0: nsys-of-nobody").run()
    assert done.code == 3
    assert "--wrap=0: nsys-of-nobody: there is no program nsys-of-nobody in $PATH" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_program_is_looked_for_as_the_rank_will_look_for_it(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    here = str(tmp_path)
    path = {"PATH": "/bin:/usr/bin"}
    assert scripts.wrap_fault("0: env A=B nsys", here, path) is None
    assert "no program ./none" in (scripts.wrap_fault("0: ./none", here, path) or "")
    assert "not executable" in (scripts.wrap_fault("0: ./plain", here, path) or "")
    assert "in $PATH" in (scripts.wrap_fault("0: plain", here, path) or "")
    (tmp_path / "plain").chmod(0o755)
    assert scripts.wrap_fault("0: ./plain", here, path) is None


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no rank 4"):
        commands(a_request(wrap=asked("4: nsys").wrap))


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
