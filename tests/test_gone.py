"""What is gone is answered with one sentence that says what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetrun import cli, gone, options
from fleetrun.commands import COMMANDS

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize("name", gone.OPTIONS)
def test_an_option_that_is_gone_says_what_to_use(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not options.is_option(name)
    says = f"--{name} is gone: {gone.OPTIONS[name]}\n"
    assert says.endswith(".\n")
    assert cli.main([f"--{name}=1", "train.py"], environ={}) == 2
    assert capsys.readouterr().err == f"fleetrun: {says}"
    assert cli.main(["top", f"--{name}=1"], environ={}) == 2
    assert capsys.readouterr().err == f"fleetrun: top: {says}"


@pytest.mark.parametrize("name", gone.OPTIONS)
def test_a_line_of_a_config_file_that_is_gone_says_what_to_use(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fleetrun.yaml").write_text(f"quiet: true\n{name}: 1\n")
    assert cli.main(["train.py"], environ={}) == 2
    says = f"fleetrun: fleetrun.yaml:2: {name} is gone: {gone.OPTIONS[name]}\n"
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("name", gone.COMMANDS)
def test_a_command_that_is_gone_says_what_to_use(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name not in COMMANDS
    assert cli.main([name, "--hosts=a,b", "--", "ls"], environ={}) == 2
    assert capsys.readouterr().err == f"fleetrun: fleetrun {name} is gone: {gone.COMMANDS[name]}\n"
