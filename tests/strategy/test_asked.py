"""Where a strategy is requested: the command line, a variable or the config file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.cli import configfile, request
from fleetrun.cli.argv import split
from fleetrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fleetrun.model import Request, Strategy


def asked(
    *words: str, environ: Mapping[str, str] | None = None, config: Path | None = None
) -> Request:
    read = None if config is None else configfile.read(str(config))
    return request.resolve(split([*words, "train.py"]), environ or {}, read)


def strategy(requested: Request) -> Strategy:
    assert requested.strategy is not None
    return requested.strategy


def settings(requested: Request, name: str) -> list[tuple[str, str, str]]:
    return [(n, v, s) for n, v, s in requested.settings if n == name or n.startswith(f"{name}.")]


def test_several_are_put_over_each_other() -> None:
    request = asked("--strategy=amp", "--strategy", "comm_fusion,overlap")
    assert strategy(request).sources == ("amp", "comm_fusion", "overlap")
    assert settings(request, "strategy")[0][1:] == ("amp,comm_fusion,overlap", "command line")


@pytest.mark.parametrize("separator", [",", ":"])
def test_a_variable_names_them_when_the_command_line_does_not(separator: str) -> None:
    environ = {"FLEETRUN_STRATEGY": f"amp{separator}overlap"}
    assert strategy(asked(environ=environ)).sources == ("amp", "overlap")
    assert strategy(asked("--strategy=comm_fusion", environ=environ)).sources == ("comm_fusion",)


def test_the_config_file_names_them_last_and_its_fields_stand_below(tmp_path: Path) -> None:
    config = tmp_path / "fleetrun.yaml"
    config.write_text("strategy: [amp, overlap]\nset:\n  nccl_comm_num: 3\n  lamb: true\n")
    request = asked("--set=nccl_comm_num=4", config=config)
    assert strategy(request).sources == ("amp", "overlap", "--set")
    last = {setting.name: (setting.value, setting.source) for setting in strategy(request).settings}
    assert last["nccl_comm_num"] == (4, "--set")
    assert last["lamb"] == (True, f"{config}:4")


def test_how_to_deal_with_it_is_kept_with_it() -> None:
    words = "--strategy=amp --strategy_mode=override --strategy_strict"
    settled = strategy(asked(*words.split(), "--check_ranks=7"))
    assert (settled.mode, settled.is_strict, settled.check_ranks) == (
        "override",
        True,
        7,
    )
    assert strategy(asked("--strategy=amp", "--check_ranks=-1")).check_ranks == -1
    assert strategy(asked("--strategy=amp", "--check_ranks=0")).check_ranks == 0
    assert strategy(asked("--strategy=amp")).check_ranks == "auto"


def test_one_field_is_enough() -> None:
    request = asked("--set=env.MY_TOKEN=abc")
    assert strategy(request).sources == ("--set",)
    assert settings(request, "set") == [("set.env.MY_TOKEN", "***", "command line")]


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        ("--strategy=amq", {}, "--strategy=amq: there is no file amq, nor a preset"),
        ("", {"FLEETRUN_STRATEGY": "amq"}, "--strategy=amq (from $FLEETRUN_STRATEGY): there is"),
        ("--set=amq=1", {}, "--set amq: no such field: amq; did you mean amp?"),
        ("--strategy=amp --check_ranks=-2", {}, "give a whole number, -1 or more"),
        ("--strategy_mode=both", {}, "give one of defaults, override."),
        ("--set asp=1", {}, "--set asp=true is refused"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    words: str, environ: Mapping[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        asked(*words.split(), environ=environ)
    assert message in str(error.value)
