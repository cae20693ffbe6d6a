"""`fleetrun submit slurm` writes a script that bash and sbatch read as intended."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli import app
from fleetrun.commands.submit import slurm

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """\
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --account=vision
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --qos=high

module load cuda/12.4 nccl || exit
source env.sh
cd '/work/my job' || exit
# One launcher per host starts the ranks there and ends with the job. The exit code is that of
# the rank that failed first: these options keep Slurm from ending the other launchers
# itself, which would hide that code.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --cpus-per-task=64 \\
    /usr/bin/python3 -m fleetrun --strategy=comm_fusion train.py --name 'a b'
code=$?
# A preempted job that ends within the partition's GraceTime has failed for Slurm, and would
# not be requeued.
case "$code $(scontrol show job "$SLURM_JOB_ID")" in
143*PreemptTime=[0-9]*) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
"""


def script(*words: str, folder: str = "/tmp", **options: Any) -> str:
    own = ["--name=train", "--nodes=4", "--python=/usr/bin/python3", "--", "x.py"]
    context = slurm.command.make_context("slurm", own)
    return slurm.script({**context.params, **options}, words or ("train.py",), folder)


def test_the_script_says_all_that_was_asked_for() -> None:
    text = script(
        *("--strategy=comm_fusion", "train.py", "--name", "a b"),
        folder="/work/my job",
        gpus=8,
        cpus=64,
        memory="0",
        time="12:00:00",
        partition="gpu",
        account="vision",
        module=("cuda/12.4", "nccl"),
        setup=("source env.sh",),
        sbatch=("--qos=high",),
        signal="TERM@120",
        requeue=True,
    )
    assert text.split("\n", 2)[2] == SCRIPT


def fake(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("code", "preempted", "is_again"),
    [
        (143, "2026-11-22T20:32:16", True),
        # The ends by scancel and by the time limit, of a failed rank, and success.
        (143, "None", False),
        (7, "2026-11-22T20:32:16", False),
        (0, "2026-11-22T20:32:16", False),
    ],
)
def test_only_what_preemption_has_ended_begins_again(
    tmp_path: Path, code: int, preempted: str, *, is_again: bool
) -> None:
    fake(tmp_path, "srun", f"exit {code}")
    shown = f"Restarts=0 ExitCode=0:0\n PreemptEligibleTime=2026-11-22 PreemptTime={preempted} x"
    fake(tmp_path, "scontrol", f"echo $1 $2 >>{tmp_path}/asked; echo '{shown}'")
    done = subprocess.run(
        ["/bin/bash"],
        input=script(requeue=True),
        env={"PATH": str(tmp_path), "SLURM_JOB_ID": "77"},
        text=True,
        check=False,
    )
    assert done.returncode == code
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["show job", *(["requeue 77"] if is_again else [])]


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20), max_size=4
    )
)
def test_words_and_folder_are_what_they_were_for_the_shell(args: list[str]) -> None:
    text = script("train.py", *args)
    heard = text.replace("exec srun", "printf '%s\\0'")
    done = subprocess.run(["bash", "-c", heard], capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    assert words[words.index("fleetrun") + 1 :] == ["train.py", *args]


def test_a_dry_run_prints_and_a_submission_hands_in_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = ["submit", "slurm", "--nodes=2", "--gpus=4", "--", "train.py"]
    assert app.main([*words[:4], "--dry-run", *words[4:]], environ={}) == 0
    printed = capsys.readouterr().out
    keep = f"/bin/cat >{tmp_path}/script; echo $FLEETRUN_TOKEN >{tmp_path}/token"
    fake(tmp_path, "sbatch", f'{keep}; echo "Submitted batch job 7"; exit 6')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert app.main(words, environ={}) == 6
    # Its hosts authenticate by a token that is in neither the script nor the arguments.
    assert len((tmp_path / "token").read_text().strip()) == 64
    assert (tmp_path / "script").read_text() == printed
    assert f"cd {tmp_path} || exit\n" in printed
    assert "#SBATCH --no-requeue\n" in printed
    assert (
        subprocess.run(["/bin/bash", "-n"], input=printed, text=True, check=False).returncode == 0
    )


def test_a_script_that_is_not_here_is_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    fake(tmp_path, "sbatch", f"/bin/touch {tmp_path}/submitted")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert app.main(["submit", "slurm", "--", "trsin.py"], environ={}) == 3
    assert "There is no script trsin.py in" in capsys.readouterr().err
    assert not (tmp_path / "submitted").exists()
    # A program may be on the cluster's hosts only, and a setup line may make the script.
    assert app.main(["submit", "slurm", "--", "trainer", "--", "x"], environ={}) == 0
    assert app.main(["submit", "slurm", "--setup=make", "--", "made.py"], environ={}) == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--nodes=2",), "nothing to run"),
        (("--nodes=0", "--", "t.py"), "--nodes=0: give a whole number, 1 or more"),
        (("--partition=a b", "--", "t.py"), "give one word without blanks"),
        (("--setup=a\nb", "--", "t.py"), "give one line of shell"),
        (("--time", "10", "hours", "--", "t.py"), "before --, hours belongs to no option"),
        (("--nodes=2", "t.py", "--", "--tee"), "before --, t.py belongs to no option"),
        (("--", "my train.py"), "--name=my train: give one word without blanks"),
        (
            ("--nodes=3", "--", "--nnodes=2:4", "t.py"),
            "--nnodes=2:4: the job has --nodes=3",
        ),
        (("--", "--rank=2", "t.py"), "--rank comes from the queue; leave it out"),
        (("--", "--dry-run", "t.py"), "--dry-run after -- starts nothing there: write it before"),
        (("--gpus-per-node=4", "--", "t.py"), "--gpus-per-node; did you mean --gpus?"),
        (("--nproc_per_node=4", "--", "t.py"), "no such option: --nproc_per_node; see `fleetrun"),
        (("--", "--gpus=x", "--help"), "is not a script; name one"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["submit", "slurm", "--dry-run", *words], environ={}) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert problem in err


def test_secrets_are_handed_in_but_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "slurm", "--dry-run", "--", "t.py", "--password=hunter2"]
    assert app.main(words, environ={}) == 0
    out, err = capsys.readouterr()
    assert "hunter2" not in out + err
    assert "secret values are shown as ***" in err
