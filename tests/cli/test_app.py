"""The command as people meet it: words in, one line and an exit code out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import LONG_S

from fleetrun.cli import app
from fleetrun.errors import EnvironmentFault, FleetrunError, RendezvousError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import Request

pytestmark = pytest.mark.usefixtures("elsewhere")
ROOT = Path(__file__).parents[2]


class Launch:
    """A launch that keeps what it is given, and ends as it is told."""

    def __init__(self, ending: int | BaseException = 0) -> None:
        self.ending = ending
        self.requests: list[Request] = []

    def __call__(self, request: Request, _environ: Mapping[str, str]) -> int:
        """Take the place of `launch.launch`."""
        self.requests.append(request)
        if isinstance(self.ending, BaseException):
            raise self.ending
        return self.ending


def test_words_become_a_request_and_the_launchs_code_the_exit_code() -> None:
    launch = Launch(17)
    assert app.main(["--gpus=0,1", "train.py", "--lr"], environ={}, launch=launch) == 17
    (request,) = launch.requests
    assert request.devices == "0,1"
    assert request.script.args == ("--lr",)


@pytest.mark.parametrize(
    ("error", "code"),
    [(FleetrunError, 1), (UsageError, 2), (EnvironmentFault, 3), (RendezvousError, 4)],
)
def test_what_goes_wrong_is_one_line_and_its_own_exit_code(
    error: type[FleetrunError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["train.py"], environ={}, launch=Launch(error("it is so."))) == code
    assert capsys.readouterr() == ("", "fleetrun: it is so.\n")


@pytest.mark.parametrize(
    "word", ["log", "list", "ls", "status", "run", "help", "watch", "kill", "halt", "pkill", "test"]
)
def test_a_word_that_is_nearly_a_command_asks_back_though_a_file_has_its_name(
    word: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / word).touch(0o755)
    launch = Launch()
    assert app.main([word], environ={}, launch=launch) == 2
    assert f"`fleetrun -- {word}` runs a program" in capsys.readouterr().err
    assert app.main(["--", word], environ={}, launch=launch) == 0
    assert app.main([f"./{word}"], environ={}, launch=launch) == 0
    assert [request.script.target for request in launch.requests] == [word, f"./{word}"]


def test_the_config_file_of_the_folder_is_read_unless_another_is_named(elsewhere: Path) -> None:
    (elsewhere / "fleetrun.yaml").write_text("job_id: here\n")
    (elsewhere / "other.yaml").write_text("job_id: other\n")
    launch = Launch()
    app.main(["train.py"], environ={}, launch=launch)
    app.main(["--config", "other.yaml", "train.py"], environ={}, launch=launch)
    app.main(["--config=/dev/null", "train.py"], environ={}, launch=launch)
    assert [request.job_id for request in launch.requests] == ["here", "other", "default"]


def test_an_optional_value_never_eats_the_script() -> None:
    launch = Launch()
    assert app.main(["--tee", "train.py"], environ={}, launch=launch) == 0
    assert app.main(["--tee", "1", "train.py"], environ={}, launch=launch) == 0
    assert [request.tee for request in launch.requests] == ["all", "1"]
    assert {request.script.target for request in launch.requests} == {"train.py"}


def test_s37_a_reader_that_has_seen_enough_of_the_help_hears_no_complaint() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fleetrun", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        timeout=LONG_S,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
