"""From inside an allocation of Slurm a launcher is started on each host, and ended with us."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from clusters import BATCH
from commandline import Command
from waiting import until

from fleetrun.cli import app

pytestmark = pytest.mark.extended

# Fakes of Slurm's commands: srun runs one launcher here, as on a host of a step.
SRUN = """
echo "$@" > srun
while [ "${1#--}" != "$1" ]; do shift; done
unset SLURM_JOB_ID
trap 'kill -INT $!' INT
"$@" &
wait $!; wait $!
"""


def in_allocation(folder: Path, script: str) -> tuple[Command, dict[str, str]]:
    path = folder / "bin" / "srun"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{SRUN}\n")
    path.chmod(0o755)
    # What ignores INT, as all that a shell starts in the background, is killed after that.
    command = Command(folder, script, "--grace=1", ranks=1)
    return command, {**BATCH, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def test_the_code_of_the_step_is_that_of_the_launch(tmp_path: Path) -> None:
    command, env = in_allocation(tmp_path, "exit 7")
    command.argv[-1:-1] = ["--env=A=b c"]
    ended = command.finish(command.start(env=env))
    assert ended.code == 7, ended.stderr
    output = (tmp_path / "srun").read_text()
    assert output.startswith("--nodes=4 --ntasks=4 --ntasks-per-node=1 ")
    assert output.endswith(f"--env=A=b c {command.argv[-1]}\n")


def test_the_launchers_of_a_step_share_a_token_that_ranks_do_not_get(tmp_path: Path) -> None:
    command, env = in_allocation(tmp_path, 'echo "${FLEETRUN_TOKEN-none}" > rank')
    srun = tmp_path / "bin" / "srun"
    srun.write_text(f'{srun.read_text().splitlines()[0]}\necho "$FLEETRUN_TOKEN" > token{SRUN}')
    tokens = []
    for given in ({}, {}, {"FLEETRUN_TOKEN": "one of the user's own"}):
        ended = command.finish(command.start(env={**env, **given}))
        assert ended.code == 0, ended.stderr
        tokens.append((tmp_path / "token").read_text().strip())
        assert tokens[-1] not in (tmp_path / "srun").read_text()
        assert (tmp_path / "rank").read_text() == "none\n"
    assert [len(token) for token in tokens] == [64, 64, len("one of the user's own")]
    assert tokens[0] != tokens[1]


def test_asked_to_stop_it_has_srun_forward_it(tmp_path: Path) -> None:
    command, env = in_allocation(
        tmp_path, "trap 'touch asked; exit 0' INT; touch up; sleep 99 & wait"
    )
    process = command.start(env=env)
    command.wait_for("up")
    process.send_signal(signal.SIGINT)
    ended = command.finish(process)
    assert ended.code == 130, ended.stderr
    assert "--disable-status" in (tmp_path / "srun").read_text()
    assert (tmp_path / "asked").exists()


def test_slurm_itself_asks_the_launchers_to_stop(tmp_path: Path) -> None:
    command, env = in_allocation(tmp_path, "touch up; exec sleep 60")
    srun = tmp_path / "bin" / "srun"
    asked = "trap 'touch told; kill $!' TERM; trap 'touch asked' INT"
    srun.write_text(srun.read_text().replace("trap 'kill -INT $!' INT", asked))
    process = command.start_until("up", env=env)
    daemon = tmp_path / "slurmstepd"
    ends = "kill $1; kill -CONT $1; touch ends; until [ -e told ]; do sleep 0.01; done"
    daemon.write_text(f"#!/bin/sh\n{ends}\n")
    daemon.chmod(0o755)
    with subprocess.Popen([daemon, str(process.pid)], cwd=tmp_path):
        command.wait_for("ends")
        status = Path(f"/proc/{process.pid}/status")
        until(lambda: "\nShdPnd:\t0000000000000000\n" in status.read_text())
        # A second request, after which a first one would have come.
        process.send_signal(signal.SIGHUP)
        ended = command.finish(process)
    assert ended.code == 143, ended.stderr
    assert not (tmp_path / "asked").exists()


def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert app.main(["--detach", "t.py"], environ=BATCH) == 2
    assert "--detach cannot be used in an allocation of several" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert app.main(["t.py"], environ=BATCH) == 3
    assert "Slurm gives this job 4 hosts (SLURM_JOB_NUM_NODES=4), and" in capsys.readouterr().err
