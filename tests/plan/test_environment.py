"""The environment of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plans import a_request, a_roster, some_facts

import fleetrun
from fleetrun.errors import UsageError
from fleetrun.model import (
    Facts,
    FieldSetting,
    Request,
    Roster,
    Strategy,
)
from fleetrun.plan.devices import Share
from fleetrun.plan.environment import Environment, variables
from fleetrun.plan.modes import collective

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_DIR = "/work/log/runs/now"
ISLAND = str(Path(fleetrun.__file__).parent / "inject" / "site")
TWO_HOSTS = ("10.0.0.1", "10.0.0.2")


def made(
    roster: Roster | None = None,
    request: Request | None = None,
    facts: Facts | None = None,
    strategy: Strategy | None = None,
    **share: Any,
) -> Environment:
    """Make the environment of ROSTER's ranks on GPUs, or on SHARE."""
    roster = roster or a_roster()
    kind = Share("gpu", roster.members[roster.me].groups, "nccl")._replace(**share)
    request, facts = request or a_request(), facts or some_facts(8)
    layout = collective.layout(request, facts, kind, roster)
    return variables(
        request, facts, kind, roster, layout=layout, run_dir=RUN_DIR, strategy=strategy
    )


def first(**arguments: Any) -> Mapping[str, str]:
    """Return the environment of this host's first rank."""
    return made(**arguments).ranks[0]


def test_a_rank_gets_what_every_paddle_reads() -> None:
    assert made(a_roster(TWO_HOSTS, me=1)).ranks[1] == {
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6071",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6070,10.0.0.1:6071,10.0.0.2:6070,10.0.0.2:6071",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_GLOBAL_RANK": "3",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_GLOBAL_SIZE": "4",
        "PADDLE_LOCAL_SIZE": "2",
        "PADDLE_NNODES": "2",
        "PADDLE_MASTER": "10.0.0.1:7777",
        "FLAGS_selected_gpus": "1",
        "FLAGS_selected_accelerators": "1",
        "PADDLE_LOCAL_DEVICE_IDS": "1",
        "PADDLE_WORLD_DEVICE_IDS": "0,1,0,1",
        "PADDLE_DISTRI_BACKEND": "nccl",
        "PADDLE_WITH_GLOO": "0",
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_FS_PATH": f"{RUN_DIR}/gloo",
        "PADDLE_LOG_DIR": "/work/log",
        "PADDLE_AUTO_CLUSTER": "0",
        "PADDLE_JOB_ID": "default",
        "POD_NAME": "default-1",
        "FLEETRUN_RUN_DIR": RUN_DIR,
        "FLEETRUN_JOB": "now",
        "FLEETRUN_RECORDS": f"{RUN_DIR}/rank.3.jsonl",
        "FLEETRUN_HEARTBEAT": f"{RUN_DIR}/heartbeat.3",
        "FLEETRUN_STACK_SIGNAL": "60",
        "PADDLE_RESTART_COUNT": "0",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": ISLAND,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_DISABLE": "1",
    }


@pytest.mark.parametrize(
    ("inherited", "chosen", "expected"),
    [
        ({}, (), ISLAND),
        ({"PYTHONPATH": "a:b"}, (), f"{ISLAND}:a:b"),
        ({"PYTHONPATH": ""}, (), ISLAND),
        ({"PYTHONPATH": f"{ISLAND}:a"}, (), f"{ISLAND}:a"),
        ({"PYTHONPATH": "a"}, (("PYTHONPATH", "c:"),), f"{ISLAND}:c:"),
    ],
)
def test_the_island_comes_first_on_the_users_python_path(
    inherited: Mapping[str, str], chosen: tuple[tuple[str, str], ...], expected: str
) -> None:
    rank = first(request=a_request(env=chosen), facts=some_facts(8)._replace(environ=inherited))
    assert rank["PYTHONPATH"] == expected


def test_what_the_user_exported_wins_over_our_defaults() -> None:
    exported = {"PADDLE_WITH_GLOO": "1", "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "0"}
    rank = first(facts=some_facts(8, environ=exported))
    assert not exported.keys() & rank.keys()


def of_strategy(**variables: str) -> Strategy:
    """Make a strategy that sets VARIABLES."""
    settings = (FieldSetting("env", *pair, "my.yaml:2") for pair in variables.items())
    return Strategy(("my.yaml",), tuple(settings))


def test_a_variable_of_the_strategy_that_is_not_used_is_named() -> None:
    planned = made(
        strategy=of_strategy(A="1", B="1", C="1", D="1", PADDLE_TRAINER_ID="7", PYTHONPATH="/x"),
        request=a_request(env=(("A", "2"),)),
        facts=some_facts(8, environ={"B": "2", "C": "1"}),
    )
    assert planned.notes == (
        "A of the strategy (my.yaml:2): that of --env wins.",
        "B of the strategy (my.yaml:2): its exported value wins.",
        "PADDLE_TRAINER_ID of the strategy (my.yaml:2): fleetrun's own wins.",
    )
    with pytest.raises(UsageError, match="A contains a NUL character"):
        made(strategy=of_strategy(A="a\0b"))


def test_no_rank_gets_the_token_of_the_launchers() -> None:
    planned = made(facts=some_facts(8, environ={"FLEETRUN_TOKEN": "hush"}))
    assert set(planned.unset) == {("FLEETRUN_TOKEN",)}
    assert not any("FLEETRUN_TOKEN" in rank for rank in planned.ranks)
    assert planned.notes == ()
    with pytest.raises(UsageError, match="for the launchers alone"):
        made(request=a_request(env=(("FLEETRUN_TOKEN", "hush"),)))


def test_identity_that_we_do_not_set_is_removed() -> None:
    environ = {"MASTER_ADDR": "10.0.0.9", "TRAINING_ROLE": "PSERVER", "FLAGS_selected_npus": "3"}
    planned = made(facts=some_facts(8, environ=environ))
    assert set(planned.unset) == {("FLAGS_selected_npus", "MASTER_ADDR", "TRAINING_ROLE")}
    (note,) = planned.notes
    assert note.startswith("FLAGS_selected_npus, MASTER_ADDR, TRAINING_ROLE say who a process is")
    assert (
        made(facts=some_facts(8, environ={"MASTER_PORT": "1"}))
        .notes[0]
        .startswith("MASTER_PORT says who")
    )


def test_options_win_over_everything() -> None:
    request = a_request(
        env=(("NCCL_DEBUG", "INFO"), ("PADDLE_TRAINER_ID", "9"), ("EMPTY", "")),
    )
    rank = first(request=request, facts=some_facts(8, environ={"NCCL_DEBUG": "WARN"}))
    assert rank["NCCL_DEBUG"] == "INFO"
    assert rank["PADDLE_TRAINER_ID"] == "9"
    assert rank["EMPTY"] == ""


def test_plugins_are_hidden_from_ranks_on_gpus_and_the_cpu() -> None:
    facts = some_facts(2, has_plugins=True, paddle_counts={"mlu": 2})
    assert first(facts=facts)["CUSTOM_DEVICE_ROOT"] == ""
    assert first(facts=facts, kind="cpu", backend="gloo")["CUSTOM_DEVICE_ROOT"] == ""
    assert "CUSTOM_DEVICE_ROOT" not in first(facts=facts, kind="mlu", backend="xccl")
    assert "CUSTOM_DEVICE_ROOT" not in first(facts=some_facts(2))
    request = a_request(env=(("CUSTOM_DEVICE_ROOT", "/plug-ins"),))
    assert first(facts=facts, request=request)["CUSTOM_DEVICE_ROOT"] == "/plug-ins"
