"""What `fleetrun logs` cannot select by --rank, --attempt and --grep."""

from __future__ import annotations

import pytest

from fleetrun.commands.logs import choose
from fleetrun.errors import UsageError
from fleetrun.rundir.runs import LogRecord, Run


def a_log(process: str, attempt: int = 0, *, failed: bool = False) -> LogRecord:
    rank = int(process.partition(".")[2])
    return LogRecord(f"/run/{process}", process, rank, attempt, 1, 0.0, has_failed=failed)


def a_run(*logs: LogRecord) -> Run:
    return Run("/log/runs/a", None, logs, "job", 0, len(logs), 0.0, None, None, "", 0)


JOB = a_run(
    a_log("server.0"),
    a_log("trainer.1", failed=True),
    a_log("trainer.0"),
    a_log("trainer.1", 1),
    a_log("trainer.0", 1),
)


def chosen(rank: str | None = None, attempt: int | None = None, *, failed: bool = False) -> str:
    logs = choose.find_logs([JOB], rank=rank, attempt=attempt, failed=failed)
    return " ".join(f"{log.process}/{log.attempt}" for log in logs)


@pytest.mark.parametrize(
    ("rank", "problem"),
    [
        ("2", "--rank=2: there is no rank 2; the job has ranks 0-1 and server 0."),
        ("server.1", "there is no server 1"),
        ("x", "--rank=x: give ranks as 0,3-5"),
        ("3-1", "--rank=3-1: give ranks"),
        (",", "--rank needs a value"),
    ],
)
def test_what_is_not_there_is_a_sentence(rank: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(rank)
    assert problem in str(caught.value)
