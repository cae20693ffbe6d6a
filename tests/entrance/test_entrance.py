"""Commands under `fleetrun exec` start fleetrun instead of Paddle's launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import venv
from typing import TYPE_CHECKING, Any

import pytest
from checkout import ROOT
from commandline import FLEETRUN
from processes import MARKER, assert_no_survivors
from waiting import LONG_S, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

ENTRANCE = ROOT / "fleetrun" / "entrance" / "_fleetrun_entrance.py"
PADDLES = """
import sys
from paddle.distributed.launch.context import Context

def launch():
    Context()
    print('Paddle launches', sys.argv[1:])
"""
CALLED = "\n\nif __name__ == '__main__':\n    launch()\n"
SEE = "import os, json; print(json.dumps(dict(os.environ)))\n"


def entrance() -> Any:
    """Return the module that other Pythons load."""
    spec = importlib.util.spec_from_file_location("_fleetrun_entrance", ENTRANCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("-m paddle.distributed.launch --devices 0 train.py", "--devices 0 train.py"),
        ("-um paddle.distributed.launch train.py -m x", "train.py -m x"),
        ("-mpaddle.distributed.fleet.launch train.py", "train.py"),
        ("-W ignore -X dev -u -m paddle.distributed.launch.main t.py", "t.py"),
        ("-Wignore -m paddle.distributed.launch t.py", "t.py"),
        ("--check-hash-based-pycs always -m paddle.distributed.launch t.py", "t.py"),
        ("/env/lib/paddle/distributed/launch/main.py t.py", "t.py"),
        ("-m paddle.distributed.launch", ""),
        ("-m paddle.distributed.launcher t.py", None),
        ("-c pass -m paddle.distributed.launch", None),
        ("train.py -m paddle.distributed.launch", None),
        ("-", None),
        ("-m", None),
        ("", None),
    ],
)
def test_paddles_launcher_is_known_by_the_command_line_of_python(
    words: str, arguments: str | None
) -> None:
    taken = entrance().launcher_arguments(["python", *words.split()])
    assert taken == (None if arguments is None else arguments.split())


def test_only_paddles_own_fleetrun_is_replaced(tmp_path: Path) -> None:
    script = tmp_path / "fleetrun"
    script.write_text("from paddle.distributed.launch.main import launch\n")
    assert entrance().launcher_arguments(["python", str(script), "t.py"]) == ["t.py"]
    script.write_text("from fleetrun.__main__ import run\n")
    assert entrance().launcher_arguments(["python", str(script), "t.py"]) is None


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a folder with a `paddle` that has launchers, and scripts that show their environment."""
    launchers = tmp_path / "lib" / "paddle" / "distributed" / "launch"
    launchers.mkdir(parents=True)
    (launchers.parents[1] / "__init__.py").touch()
    (launchers.parent / "__init__.py").touch()
    (launchers.parent / "fleet").mkdir()
    (launchers.parent / "fleet" / "__init__.py").touch()
    (launchers.parent / "fleet" / "launch.py").write_text(PADDLES + CALLED)
    (launchers / "__init__.py").touch()
    (launchers / "context.py").write_text("class Context:\n    pass\n")
    (launchers / "main.py").write_text(PADDLES + CALLED)
    (launchers / "__main__.py").write_text("from .main import launch\n\nlaunch()\n")
    (tmp_path / "see.py").write_text(SEE)
    (tmp_path / "seven.py").write_text("raise SystemExit(7)\n")
    return tmp_path


def run(
    project: Path, *words: str, python: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run PYTHON with WORDS in PROJECT, whose `paddle` it finds."""
    path = f"{project / 'lib'}:{ROOT}"
    done = subprocess.run(
        [python, *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": path, MARKER: str(project), **variables},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert_no_survivors(str(project))
    return done


def below(project: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `fleetrun exec WORDS` in PROJECT."""
    return run(project, *FLEETRUN[1:], "exec", *words, **variables)


RUNPY = "import runpy, sys; sys.argv[1:] = [{!r}]; runpy.run_module({!r}, run_name='__main__')"
RUN_PATH = RUNPY.replace("run_module", "run_path")
CALL = (
    "import sys; sys.argv[1:] = ['seven.py']\n"
    "from {} import launch\n"
    "try:\n    launch()\nexcept SystemExit as end:\n    print('ended with', end.code)\n"
)


@pytest.mark.parametrize(
    "words",
    [
        (sys.executable, "-m", "paddle.distributed.launch", "seven.py"),
        ("sh", "-c", f"{sys.executable} -um paddle.distributed.fleet.launch seven.py"),
        (sys.executable, "-c", RUNPY.format("seven.py", "paddle.distributed.launch")),
        (sys.executable, "-c", RUNPY.format("seven.py", "paddle.distributed.fleet.launch")),
        (
            sys.executable,
            "-c",
            RUN_PATH.format("seven.py", "lib/paddle/distributed/launch/main.py"),
        ),
    ],
)
def test_a_launch_by_paddles_launcher_is_ours(project: Path, words: tuple[str, ...]) -> None:
    done = below(project, *words)
    assert done.returncode == 7, done.stderr
    assert "fleetrun: rank 0 exited with 7." in done.stderr
    assert "Paddle launches" not in done.stdout
    assert "Paddle launches" in run(project, *words[1:], python=words[0]).stdout


@pytest.mark.parametrize("name", ["launch.main", "fleet.launch"])
def test_a_call_of_launch_ends_as_paddles_does(project: Path, name: str) -> None:
    done = below(project, sys.executable, "-c", CALL.format(f"paddle.distributed.{name}"))
    assert (done.returncode, done.stdout) == (0, "ended with 7\n"), done.stderr


def test_options_before_the_command_are_defaults_that_no_rank_gets(project: Path) -> None:
    launch = (sys.executable, "-m", "paddle.distributed.launch")
    asked = ("--job_id=mine", "--nproc_per_node=2", "--quiet", "--env=A=1")
    done = below(project, *asked, *launch, "--nproc_per_node=1", "see.py")
    assert done.returncode == 0, done.stderr
    (seen,) = map(json.loads, done.stdout.splitlines())
    # The command's own option takes precedence.
    assert (seen["PADDLE_JOB_ID"], seen["PADDLE_TRAINERS_NUM"], seen["A"]) == ("mine", "1", "1")
    assert not {"FLEETRUN_EXEC_OPTIONS", "FLEETRUN_PYTHON"} & seen.keys()


def test_files_are_those_of_the_folder_where_exec_was_typed(project: Path) -> None:
    (project / "elsewhere").mkdir()
    line = f"cd elsewhere && exec {sys.executable} -m paddle.distributed.launch ../see.py"
    done = below(project, "--log_dir=kept", "sh", "-c", line)
    assert done.returncode == 0, done.stderr
    assert (project / "kept" / "workerlog.0").exists()


def test_ranks_run_in_the_python_that_was_to_launch(project: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True, with_pip=False)
    other = str(tmp_path / "other" / "bin" / "python")
    code = (
        f"import subprocess; subprocess.run([{other!r}, '-m', 'paddle.distributed.launch', 'w.py'])"
    )
    (project / "w.py").write_text("import sys; print(sys.executable)\n")
    done = below(project, "--quiet", sys.executable, "-c", code)
    assert done.stdout == f"{other}\n", done.stderr


def test_where_it_is_off_paddles_launcher_is_paddles(project: Path) -> None:
    line = f"FLEETRUN_EXEC=off {sys.executable} -m paddle.distributed.launch see.py"
    assert below(project, "sh", "-c", line).stdout == "Paddle launches ['see.py']\n"


def test_a_signal_for_the_caller_reaches_the_launch(project: Path) -> None:
    (project / "wait.py").write_text("open('started', 'w').close()\nimport time\ntime.sleep(600)\n")
    code = CALL.format("paddle.distributed.launch.main").replace("seven.py", "wait.py")
    command = subprocess.Popen(
        [*FLEETRUN, "exec", "--quiet", sys.executable, "-c", code],
        cwd=project,
        env={**os.environ, "PYTHONPATH": f"{project / 'lib'}:{ROOT}", MARKER: str(project)},
        stdout=subprocess.PIPE,
        text=True,
    )
    until((project / "started").exists)
    command.send_signal(signal.SIGTERM)
    assert command.communicate(timeout=LONG_S)[0] == "ended with 143\n"
    assert_no_survivors(str(project))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "give the command to run"),
        (("nowhere-at-all",), "nowhere-at-all is not a program"),
        (("--dry-run", "true"), "--dry-run cannot be the default of launches"),
        (("--gpus=x,,y,", "--max_restart=many", "true"), "--max_restart=many"),
    ],
)
def test_mistakes_are_one_sentence(project: Path, words: tuple[str, ...], problem: str) -> None:
    done = below(project, *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
