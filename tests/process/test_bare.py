"""A system that lacks what a launch needs gets one sentence, and nothing is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import Command, fleetrun

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.extended


def shell(before: str) -> tuple[str, ...]:
    """Return the prefix of a command that runs after the shell text BEFORE."""
    return ("bash", "-c", f'{before}; exec "$@"', "bash")


def refused(job: Command, prefix: Sequence[str]) -> str:
    """Run JOB after PREFIX; return the single line of the refusal."""
    done = job.finish(job.start(prefix))
    assert done.code == 3, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (job.folder / "started").exists()
    return done.stderr.removeprefix("fleetrun: ")


@pytest.mark.parametrize("limit", [5, 10, 20])
def test_too_few_open_files_are_a_sentence(tmp_path: Path, limit: int) -> None:
    refusal = refused(Command(tmp_path, "touch started"), shell(f"ulimit -n {limit}"))
    assert refusal.startswith("2 processes on this host need ")
    assert f"open files, and {limit} are allowed: run `ulimit -n " in refusal


def test_a_low_limit_of_open_files_is_raised_for_the_launcher_alone(tmp_path: Path) -> None:
    job = Command(tmp_path, "ulimit -Sn >limit")
    done = job.finish(job.start(shell("ulimit -Sn 20")))
    assert done.code == 0, done.stderr
    assert (tmp_path / "limit").read_text() == "20\n"


def can(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )


# The limit does not apply to root; and only root may be able to read the interpreter.
NOBODY = (
    "setpriv",
    "--reuid=65534",
    "--clear-groups",
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_no_more_processes_are_a_sentence(tmp_path: Path) -> None:
    if not can(*NOBODY, "true"):
        pytest.skip("setpriv does not know ambient capabilities")
    job = Command(tmp_path, "")
    # The check whether a script may be executed ignores capabilities.
    job.argv[-1:] = ["/usr/bin/touch", str(tmp_path / "started")]
    refusal = refused(job, (*NOBODY, *shell("ulimit -u 1")))
    assert refusal.startswith("No process can be started (Resource temporarily unavailable): ")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("away", ["umount -l /proc", "mount -t tmpfs none /proc"])
def test_no_proc_is_a_sentence(tmp_path: Path, away: str) -> None:
    if not can("unshare", "--mount", "true"):
        pytest.skip("no namespaces here")
    refusal = refused(Command(tmp_path, "touch started"), ("unshare", "--mount", *shell(away)))
    assert refusal.startswith("/proc is not mounted")


def test_a_folder_that_was_removed_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    refusal = refused(Command(tmp_path, "touch started"), shell("cd gone; rmdir ../gone"))
    assert refusal.startswith("The current folder cannot be found (No such file or directory)")


PRINTING = (
    ["--help"],
    ["--version"],
    ["--dry-run", "true"],
    ["strategy", "list"],
    ["completion", "bash"],
    ["tune", "--help"],
)


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (">&-", b"fleetrun: Standard output is closed, and the requested output goes there.\n"),
        (
            ">/dev/full",
            b"fleetrun: Standard output cannot be written (No space left on device).\n",
        ),
    ],
)
def test_what_cannot_be_printed_is_a_sentence(
    tmp_path: Path, words: list[str], where: str, expected: bytes
) -> None:
    done = run_in_shell(tmp_path, where, *words)
    assert (done.returncode, done.stderr) == (3, expected)


def run_in_shell(folder: Path, where: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {where}', "sh", sys.executable, "-m", "fleetrun", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        check=False,
    )


# Presses Ctrl-C just when the code of FILE begins, whether it is imported or from the one file.
IMPATIENT = """
import signal, sys
def look(event, arguments):
    if event == "exec" and arguments[0].co_filename.endswith("/fleetrun/FILE"):
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(look)
"""


@pytest.mark.parametrize("file", ["cli/app.py", "cli/request.py", "run/job.py"])
def test_ctrl_c_while_the_launcher_itself_is_loaded_is_no_traceback(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT.replace("FILE", file))
    path = f"{tmp_path}:{ROOT}"
    done = fleetrun("true", folder=tmp_path, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (130, "")
