"""`strategy.json` in a plan: its content, and the variables that name it."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from plans import a_roster, some_facts

from fleetrun.cli import request
from fleetrun.cli.argv import split
from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec
from fleetrun.plan import planner, render
from fleetrun.plan.devices import Share
from fleetrun.strategy import document as strategy_document
from fleetrun.strategy import fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import LaunchPlan, Request

GOLDEN = Path(__file__).parents[1] / "golden"
HOSTS = ("10.0.0.1", "10.0.0.2")


def asked(*words: str, environ: Mapping[str, str] | None = None) -> Request:
    return request.resolve(split([*words, "train.py"]), environ or {})


def planned(
    wanted: Request, *, me: int = 0, environ: Mapping[str, str] | None = None
) -> LaunchPlan:
    roster = a_roster(HOSTS, ranks=2, me=me)
    facts = some_facts(8, environ=environ or {}, program="train.py")
    return planner.plan(wanted, facts, Share("gpu", roster.members[me].groups, "nccl"), roster)


def document(plan: LaunchPlan) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(plan.files[f"{plan.run_dir}/strategy.json"])
    return written


def test_the_document_is_as_it_was_agreed_on() -> None:
    words = ("--strategy=resnet50_32gpu", "--set", "nccl_comm_num=auto")
    plan = planned(asked(*words, "--strategy_strict", "--strategy_mode=override"))
    written = document(plan)
    # Their wording is that of `strategy explain`; see the next test.
    known = written.pop("verdicts")
    assert known.keys() == {
        *written["strategy"],
        *written["build_strategy"],
        *written["execution_strategy"],
    }
    assert json.dumps(written, indent=1) + "\n" == (GOLDEN / "strategy.json").read_text()


def test_the_training_process_is_told_what_explain_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, dict[str, object]] = {section: {} for section in fields.FIELD_SECTIONS}
    for field in fields.TABLE:
        asked[field.section][field.name] = True
    known = strategy_document.known(asked)
    assert json.loads(json.dumps(known)) == known
    proof = Evidence("", StrategySpec(asked["strategy"], {}, {}, verdicts=known))
    for paddle, graph, device in product(fields.PADDLES, fields.GRAPHS, fields.DEVICES):
        fake = SimpleNamespace(__version__=paddle, device=SimpleNamespace(get_device=device.lower))
        monkeypatch.setitem(sys.modules, "paddle", fake)
        proof.graph = graph
        for field in fields.TABLE:
            for is_off in (False, True)[: 1 + (field.kind == "bool")]:
                there = proof.known(field.name, not is_off)
                here = fields.outcome(
                    field, paddle=paddle, graph=graph, device=device, is_off=is_off
                )
                # A rank reports what it has counted, also on a GPU.
                told = there["status"].replace("effective", here.status)
                assert told.replace("_", " ") == here.status, field.name
                assert there["reason"] == here.reason, field.name


def test_variables_of_a_strategy_stand_below_what_is_exported() -> None:
    wanted = asked(
        *("--set=flags.FLAGS_a=1", "--set=flags.FLAGS_b=1", "--set=nccl.NCCL_DEBUG=INFO"),
        *("--set=env.MY_TOKEN=abc", "--env=FLAGS_b=2", "--env=NCCL_DEBUG=TRACE"),
    )
    plan = planned(wanted, environ={"FLAGS_a": "0", "MY_TOKEN": "xyz"})
    env = plan.processes[0].env
    assert "FLAGS_a" not in env
    assert (env["FLAGS_b"], env["NCCL_DEBUG"]) == ("2", "TRACE")
    assert document(plan)["environment"] == {
        "FLAGS_a": "0",
        "FLAGS_b": "2",
        "NCCL_DEBUG": "TRACE",
        "MY_TOKEN": "***",
    }


def test_a_dry_run_shows_what_is_asked_who_asked_and_why() -> None:
    wanted = asked("--strategy=recommended", "--set=amp_configs.custom_black_list=[a,b]")
    text = render.table([planned(wanted)], wanted)
    assert "Strategy  recommended, --set (the script's own settings win)" in text
    shown = [" ".join(line.split()) for line in text.splitlines()]
    assert "strategy.nccl_comm_num 2 (recommended:6; auto: 2 on 2 hosts)" in shown
    assert "strategy.amp_configs.custom_black_list [a, b] (--set)" in shown
    alone = asked("--check_ranks=1", "--strategy_mode=override")
    assert "Strategy  only the check of the ranks (it wins)" in render.table(
        [planned(alone)], alone
    )


def test_secrets_of_a_strategy_are_not_shown() -> None:
    wanted = asked("--set=env.MY_TOKEN=abcdef")
    for text in (
        render.table([planned(wanted)], wanted),
        render.as_json([planned(wanted)], wanted),
    ):
        assert "abcdef" not in text
