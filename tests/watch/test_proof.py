"""The proof of a strategy: ranks' evidence is read, compared, shown, and enforced if requested."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import plans
import pytest
from commandline import Command, Driven
from waiting import LONG_S

from fleetrun.model import ExitStatus, ProcessSpec
from fleetrun.run.events import (
    Exited,
    Finished,
    Gathered,
    Outcome,
    Started,
    StrategyRejected,
    StrategyReport,
)
from fleetrun.run.loop import Loop
from fleetrun.rundir import strategyfiles
from fleetrun.watch import strategy_table
from fleetrun.watch.proof import Proof

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fleetrun.run.events import Declared

ASKED = {
    "schema": 1,
    "mode": "defaults",
    "sources": ["comm_fusion"],
    "strategy": {
        "fuse_grad_size_in_MB": 16,
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 4, "avg": True},
    },
    "build_strategy": {"fuse_bn_act_ops": True},
    "reasons": {"fuse_grad_size_in_MB": "auto: a tenth of the gradients"},
    "environment": {"FLAGS_x": "1"},
}


def field(name: str, status: str, in_effect: object = None, **more: str) -> dict[str, object]:
    return {"name": name, "asked": 0, "in_effect": in_effect, "status": status, **more}


GOOD = [
    field("fuse_grad_size_in_MB", "effective", 16, evidence="161 gradients in 6 allreduces"),
    field("gradient_merge", "effective", "true", evidence="1 update for 4 micro-steps"),
    field("fuse_bn_act_ops", "effective", "true", evidence="16 fused ops"),
]


def evidence(fields: list[dict[str, object]], **more: object) -> dict[str, object]:
    return {
        "schema": 1,
        "kind": "strategy",
        "restart": 0,
        "rank": 0,
        "paddle": "3.3.1",
        "graph": "dygraph",
        "device": "cpu",
        "complete": True,
        "updates": 3,
        "fields": fields,
        "disagreements": [],
        "notes": [],
        "ranks_equal": None,
        **more,
    }


def env(folder: Path, rank: int, attempt: int = 0) -> dict[str, str]:
    records = str(folder / f"rank.{rank}.jsonl")
    return {"FLEETRUN_RECORDS": records, "PADDLE_RESTART_COUNT": f"{attempt}"}


class Room:
    """A proof over RANKS fake ranks, with its loop."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 2,
        asked: dict[str, Any] | None = None,
        *,
        is_quiet: bool = False,
        **proof: Any,
    ) -> None:
        self.folder = folder
        made = plans.plan(
            per_node=ranks,
            cwd=str(folder),
            run_dir=".",
            files={"./strategy.json": json.dumps(ASKED if asked is None else asked)},
        )
        trainers = [
            spec._replace(env=env(folder, rank)) for rank, spec in enumerate(made.processes)
        ]
        server = ProcessSpec("server.0", ("x",), {}, (), "serverlog.0")
        self.plan = made._replace(processes=(*trainers, server))
        self.remarks: list[str] = []
        self.declared: list[Declared] = []
        self.loop = Loop()
        self.job = plans.job(self.plan, log=self.remarks.append, quiet=is_quiet)
        self.proof = Proof(self.job, **{"period_s": 0.01, **proof})
        self.proof.declare = self.declared.append
        self.proof.open(self.loop)

    def leave(self, rank: int, what: object) -> None:
        """Let RANK leave its evidence."""
        with (self.folder / f"rank.{rank}.jsonl").open("a") as file:
            print(what if isinstance(what, str) else json.dumps(what), file=file)

    def until(self, condition: Callable[[], object]) -> None:
        """Turn the loop until CONDITION holds."""
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, self.remarks
            self.loop.turn()

    def exit(self, rank: int, code: int = 0) -> None:
        """Let RANK end."""
        self.proof.on_event(Exited(rank, f"rank {rank}", ExitStatus(code=code), 1.0))

    def finish(self, cause: Exited | None = None) -> None:
        """Let the job end."""
        self.proof.on_event(Finished(Outcome(cause), 2.0))
        self.proof.close()
        self.loop.close()

    def table(self, *evidences: object) -> str:
        """Let each rank leave its evidence and the job end; return the table that is shown."""
        for rank, what in enumerate(evidences):
            self.leave(rank, what)
        self.until(lambda: self.remarks)
        self.finish()
        return self.remarks[0]

    @property
    def refuted(self) -> StrategyRejected | None:
        """Return the refutation; there is one at most."""
        refutations = [event for event in self.declared if isinstance(event, StrategyRejected)]
        assert len(refutations) <= 1
        return refutations[0] if refutations else None


def strict(**more: object) -> dict[str, object]:
    return {**ASKED, "strict": True, **more}


def test_the_table_comes_once_when_all_ranks_have_made_an_update(tmp_path: Path) -> None:
    here = Room(tmp_path)
    here.leave(0, evidence(GOOD, ranks_equal=True))
    here.leave(1, evidence(GOOD, complete=False))
    here.until(lambda: here.proof._trainers[1].evidence)
    assert here.remarks == []
    here.leave(1, evidence(GOOD, ranks_equal=True))
    here.until(lambda: here.remarks)
    here.exit(0)
    here.exit(1)
    here.finish()
    assert here.remarks == [
        """\
Strategy comm_fusion (mode defaults; Paddle 3.3.1, dygraph on cpu)
  field                   asked               in effect           status     why
  fuse_grad_size_in_MB    auto                16                  effective  161 gradients in 6 allreduces
  gradient_merge          true                true                effective  1 update for 4 micro-steps
  gradient_merge_configs  k_steps=4 avg=true  k_steps=4 avg=true  effective  with gradient_merge
  fuse_bn_act_ops         true                true                effective  16 fused ops
  The parameters of all ranks are equal.
  fuse_grad_size_in_MB: auto: a tenth of the gradients
  Environment: FLAGS_x=1"""  # noqa: E501 - as wide as it is
    ]
    assert [type(report) for report in here.declared] == [StrategyReport]


def test_another_attempt_is_judged_by_its_own_evidence(tmp_path: Path) -> None:
    here = Room(tmp_path, ranks=1, asked=strict())
    here.leave(0, evidence(GOOD))
    here.until(lambda: here.remarks)
    here.exit(0, code=1)
    (process, *_) = here.plan.processes
    process = process._replace(env=env(tmp_path, 0, attempt=1))
    here.job.plan = here.plan._replace(processes=(process,))
    here.proof.on_event(Gathered(1, here.job.plan, 1.0))
    here.proof.on_event(Started(0, "rank 0", 11, 1.0, attempt=1))
    here.exit(0)
    assert here.refuted is not None
    assert "left no evidence" in here.refuted.faults[0]


def test_eighty_columns_hold_the_table() -> None:
    names = ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")
    asked = {"strategy": {**dict.fromkeys(names, 2), "gradient_merge_configs": {"k_steps": 4}}}
    fields = [
        field(names[0], "effective", 2, evidence="groups [0, 1], [2, 3]; 1 allreduces among them"),
        field(names[1], "effective", 2, evidence="groups [0, 1], [2, 3]; 1 allreduces among them"),
        field("gradient_merge", "no_effect", reason="so it is " * 12),
    ]
    left = evidence(fields, graph="static", device="gpu")
    document = strategyfiles.parse_document(json.dumps(asked))
    seen = {"rank 0": strategyfiles.parse_evidence(left)}
    judged = strategy_table.judge(document, seen, 1.0)
    lines = strategy_table.table(document, seen, judged, {}, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:9] == [
        "Strategy (mode defaults; Paddle 3.3.1, static on gpu)",
        "  field                                asked      in effect  status",
        "  use_hierarchical_allreduce           2          2          effective",
        "      groups [0, 1], [2, 3]; 1 allreduce among them",
        "  hierarchical_allreduce_inter_nranks  2          2          effective",
        "      as above",
        "  gradient_merge_configs               k_steps=4  -          NO EFFECT",
        "      with gradient_merge",
        "  gradient_merge                       0          -          NO EFFECT",
    ]


def test_ranks_with_other_values_are_told_with_both(tmp_path: Path) -> None:
    left = [
        evidence(
            [field("fuse_grad_size_in_MB", "effective", size, reason="auto: a tenth of it")],
            ranks_equal=False,
            notes=["after update 1 so it is"],
        )
        for size in (16, 8, 16)
    ]
    asked = {"strategy": {"fuse_grad_size_in_MB": "auto"}}
    assert Room(tmp_path, ranks=3, asked=asked).table(*left).splitlines()[3:] == [
        "  Rank 1 differs from ranks 0, 2: fuse_grad_size_in_MB is 8 there, not 16.",
        "  THE PARAMETERS OF THE RANKS DIFFER.",
        "  after update 1 so it is",
    ]


# ---------------------------------------------------------------------------------------- strict


@pytest.mark.parametrize(
    ("last", "fault"),
    [
        (
            field("fuse_bn_act_ops", "no_effect", reason="no such ops."),
            "has no effect: no such ops",
        ),
        (field("fuse_bn_act_ops", "refused", reason="not in 3.3"), "is refused: not in 3.3"),
        (
            field("fuse_bn_act_ops", "script", "false"),
            "is not in effect, because the script sets it itself",
        ),
        (field("fuse_bn_act_ops", "hm"), "is not mentioned by the evidence"),
    ],
)
def test_strict_refutes_as_soon_as_all_are_heard(
    tmp_path: Path, last: dict[str, object], fault: str
) -> None:
    here = Room(tmp_path, asked=strict())
    for rank in range(2):
        here.leave(rank, evidence([*GOOD[:2], last]))
    here.until(lambda: here.refuted)
    here.finish()
    assert here.refuted is not None
    assert here.refuted.faults == (f"ranks 0-1: fuse_bn_act_ops {fault}",)


def test_strict_is_content_with_what_is_in_effect_even_where_it_makes_no_difference(
    tmp_path: Path,
) -> None:
    here = Room(tmp_path, ranks=1, asked=strict())
    fields = [{**field, "status": "no_difference"} for field in GOOD]
    # Fields that were not requested may have any status.
    here.leave(0, evidence([*fields, field("amp", "no_effect")]))
    here.exit(0)
    here.finish()
    assert here.refuted is None
    assert "amp" in here.remarks[0]
    assert here.remarks[0].count("  no difference here  ") == 4


# ---------------------------------------------------------------------------------- real processes

RANK = """
import json, os, sys, time
rank = os.environ["PADDLE_TRAINER_ID"]
print(sys.argv[1], file=open("log/latest/rank.%s.jsonl" % rank, "a"))
time.sleep(float(sys.argv[2]))
"""


def rank(what: object, seconds: float = 0.0) -> list[str]:
    """Return the command of a rank that writes WHAT as evidence, and runs for SECONDS."""
    text = "until [ -e log/latest ]; do sleep 0.02; done; exec "
    words = [sys.executable, "-S", "-c", RANK, json.dumps(what), str(seconds)]
    return ["sh", "-c", text + shlex.join(words)]


IMPORTED = evidence([], complete=False)
UNABLE = {**IMPORTED, "unapplied": ["the strategy cannot be applied: ImportError('no')"]}


def test_ranks_of_which_some_cannot_apply_the_strategy_are_not_left_waiting(
    tmp_path: Path,
) -> None:
    ranks = [rank(content, 60.0) for content in (IMPORTED, UNABLE, IMPORTED)]
    job = Driven(tmp_path, *ranks, strategy=ASKED, max_restarts=2)
    ended = job.run()
    assert ended.code == 5
    shown = ended.stderr
    assert (
        "Some ranks apply the strategy and others cannot: they would wait for each other." in shown
    )
    assert "    Rank 1: the strategy cannot be applied: ImportError('no').\n" in shown
    assert job.events()[-1]["attempts"] == 1


# A rank that writes real evidence to the usual file.
LEAVE = """
import json
print(json.dumps({
    "schema": 1, "kind": "strategy", "restart": 0, "complete": True, "updates": 1, "fields": [
        {"name": "fuse_grad_size_in_MB", "status": "no_effect", "reason": "so it is"}]}),
    file=open(os.environ["FLEETRUN_RECORDS"], "a"))
"""


@pytest.mark.parametrize(("option", "code"), [("--strategy_strict", 5), ("--tee=0", 0)])
def test_the_command_line_proves_and_enforces(tmp_path: Path, option: str, code: int) -> None:
    job = Command.python(tmp_path, LEAVE, "--set=fuse_grad_size_in_MB=16", option)
    ended = job.run()
    assert ended.code == code
    assert "fuse_grad_size_in_MB  16     -          NO EFFECT  so it is" in ended.stderr
    fault = "    Ranks 0-1: fuse_grad_size_in_MB has no effect: so it is.\n"
    assert (fault in ended.stderr) == (code == 5)
