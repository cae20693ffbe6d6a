"""Slips of the keyboard, the editor and the shell, through the real command line."""

# ruff: noqa: RUF001 - such characters are what is tested

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from commandline import fleetrun

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.extended

TRAIN = "import sys\nprint('trained with', sys.argv[1:])\n"
SIX_ERRORS = """\
strategy:
  fuse_grad_size_in_MB: lots
  nope: 1
  amp: maybe
  nccl_comm_num: -3
  gradient_merge_configs:
    k_stepz: 4
wrong:
  a: 1
"""


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "t.py").write_text(TRAIN)
    return folder


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    home = str(folder.parent / "home")
    return fleetrun(*words, folder=folder, HOME=home, **variables)


def refused(folder: Path, *words: str, code: int = 2, **variables: str) -> str:
    """Return the one line of a launch that starts nothing."""
    done = run(folder, *words, **variables)
    assert done.returncode == code, done.stderr
    assert not (folder / "log").exists()
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nproc_per_node=２",), "--nproc_per_node=２: give a whole number, 1 or more"),
        (("--ips=10.0.0.1，10.0.0.2",), "is neither an IPv4 address nor a host name"),
        (("--nnodes=2", "--master=10.0.0.1：6170"), "give HOST:PORT, the address of the job's"),
        (("--hosts=a：8，b：8",), "a：8，b：8 is not a host name or address."),
        (("--hang_timeout", "3０m"), "--hang_timeout=3０m: give a number of seconds"),
        (("--tee＝all",), "did you mean --tee?"),
        (("－－gpus", "0"), "two plain hyphens"),
        (("—gpus", "0"), "two plain hyphens"),
        (("--strategy=recommended，amp",), "write recommended,amp."),
        (("--set", "fuse_grad_size_in_MB＝16"), "write fuse_grad_size_in_MB=16."),
        (("--env", "NCCL_DEBUG＝INFO"), "give KEY=VALUE"),
    ],
)
def test_full_width_characters_are_refused(folder: Path, words: tuple[str, ...], says: str) -> None:
    assert says in refused(folder, *words, "t.py")


def test_a_secret_after_a_full_width_sign_is_not_shown(folder: Path) -> None:
    assert "hush" not in refused(folder, "--env", "TOKEN＝hush", "t.py")


def test_a_shell_script_with_lines_of_windows_says_so(folder: Path) -> None:
    script = folder / "run.sh"
    script.write_bytes(b"#!/bin/sh\r\necho up\r\n")
    script.chmod(0o755)
    for name in ("run.sh", "./run.sh"):
        done = run(folder, "--quiet", name)
        assert done.returncode == 127
        assert "in the first line of ./run.sh does not exist, or that line ends" in done.stderr


def test_a_folder_is_no_script(folder: Path) -> None:
    (folder / "single").mkdir()
    assert "single is a folder, not a script" in refused(folder, "single", code=3)


def test_a_notebook_is_converted_first(folder: Path) -> None:
    (folder / "nb.ipynb").write_text("{}")
    line = refused(folder, "nb.ipynb", code=3)
    assert "run `jupyter nbconvert --to script nb.ipynb`, then `fleetrun nb.py`." in line


def test_a_launch_shows_the_errors_of_a_strategy_as_validate_does(folder: Path) -> None:
    (folder / "six.yaml").write_text(SIX_ERRORS)
    validated = run(folder, "strategy", "validate", "six.yaml")
    launched = run(folder, "--strategy=six.yaml", "t.py")
    assert (launched.returncode, launched.stderr) == (validated.returncode, validated.stderr)
    assert len(launched.stderr.splitlines()) == 6
    assert not (folder / "log").exists()


def test_a_tilde_is_the_home_folder_in_every_path(folder: Path) -> None:
    home = folder.parent / "home"
    assert run(folder, "--log_dir=~/a", "t.py").returncode == 0
    assert run(folder, "t.py", PADDLE_LOG_DIR="~/b").returncode == 0
    (home / "c.yaml").write_text("log_dir: ~/c\nstrategy: ~/s.yaml\n")
    (home / "s.yaml").write_text("env:\n  FROM_STRATEGY: 'yes'\n")
    assert run(folder, "--config", "~/c.yaml", "t.py").returncode == 0
    assert all((home / name / "workerlog.0").exists() for name in "abc")
    (home / "ck").mkdir()
    words = ("--strategy=recommended,~/s.yaml", "--dry-run=json")
    done = run(folder, *words, "--resume_from=~/ck", "t.py", "{checkpoint}")
    assert done.returncode == 0, done.stderr
    assert "FROM_STRATEGY" in done.stdout
    logs = run(folder, "logs", "--log_dir=~/a")
    assert "trained with" in logs.stdout
    assert sorted(os.listdir(folder)) == ["t.py"]
