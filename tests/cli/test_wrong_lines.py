"""Wrong command lines, each with its one sentence: what is wrong, and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fleetrun.cli import app

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_OPTION, NO_COMMAND = "no such option: ", "there is no command "
AS_LIST = HYPHENS = (
    "is taken as the script: write options with two plain hyphens, lists with commas"
)
NO_MODULE = "a module's name has no slash, blank or .py; leave -m out for a file."
# Words, and what the sentence has, from its beginning or after dots.
# fmt: off
WRONG: list[tuple[str | Sequence[str], str]] = [
    # No script.
    ("--gpus=0", "no script to run: write `fleetrun [options] train.py [its arguments]`"),
    ("--", "no script to run: write"),
    ("--nproc_per_node train.py",
     ("no script to run: --nproc_per_node has taken train.py; write "
     "--nproc_per_node=VALUE train.py.")),
    (["--gpus", "0 train.py"], "no script to run: --gpus has taken 0 train.py; "),
    (["--", ""], "the name of the script or module is empty; is a variable unset?"),
    ("-m", "-m needs a module: write `fleetrun [options] -m package.module`."),
    (["-m", ""], "the name of the script or module is empty; is a variable unset?"),
    ("-m train.py", f"-m train.py: {NO_MODULE}"),
    ("-m ./train", f"-m ./train: {NO_MODULE}"),
    (["-m", "pkg.train --x"], f"-m pkg.train --x: {NO_MODULE}"),
    # Options that there are not.
    ("--gpu=0 train.py", f"{NO_OPTION}--gpu; did you mean --gpus?"),
    ("--nporc_per_node=4 train.py", f"{NO_OPTION}--nporc_per_node; did you mean --nproc_per_node?"),
    ("--cluter_node_ips=1 train.py", f"{NO_OPTION}--cluter_node_ips; did you mean --cluster_node"),
    ("--back-end=x train.py", f"{NO_OPTION}--back-end; did you mean --backend?"),
    ("--log=x train.py", f"{NO_OPTION}--log; did you mean --log_dir, --log_level, --log_"),
    ("--mlu=0 train.py", f"{NO_OPTION}--mlu; did you mean --mlus?"),
    ("--foo=1 train.py", f"{NO_OPTION}--foo; `fleetrun --help=all` lists them all."),
    ("--foos=x train.py", f"{NO_OPTION}--foos; `fleetrun --help=all` lists them all."),
    ("-gpus=0 train.py", f"{NO_OPTION}-gpus; did you mean --gpus?"),
    ("-u train.py", f"{NO_OPTION}-u; for Python's own options write `fleetrun [options] python -u"),
    ("- train.py", f"{NO_OPTION}-; for Python's own options"),
    ("--port_range=1-2 train.py", "--port_range is not in this version: write --start_port for "),
    # Words of other launchers.
    ("-np 2 train.py", f"{NO_OPTION}-np; use --nproc_per_node: the number of processes on this"),
    ("-n4 train.py", f"{NO_OPTION}-n4; use --nproc_per_node: the number of processes on this"),
    ("--num-processes 8 train.py", f"{NO_OPTION}--num-processes; use --nproc_per_node: the num"),
    ("--ngpus=4 train.py", f"{NO_OPTION}--ngpus; use --nproc_per_node: the"),
    ("--node_rank=1 train.py", f"{NO_OPTION}--node_rank; use --rank: this host's position in "),
    ("-H a:4,b:4 train.py", f"{NO_OPTION}-H; use --hosts: as a:8,b:8; they are reached by ssh."),
    ("-x API_TOKEN=hunter2 train.py", f"{NO_OPTION}-x; write --env NAME=VALUE; every rank gets "),
    ("--standalone train.py", f"{NO_OPTION}--standalone; leave it out: a job is on this"),
    ("--rdzv-backend=c10d train.py", f"{NO_OPTION}--rdzv-backend; write --master=HOST:PORT "),
    ("--master_port=29500 train.py", f"{NO_OPTION}--master_port; use --start_port: one host "),
    ("--max_restarts=3 train.py", f"{NO_OPTION}--max_restarts; use --max_restart."),
    ("--redirects=3 train.py", "--redirects=3: give true or false."),
    ("--tee=0:3 train.py", "--tee=0:3: give all, or ranks such as 0,3 or 0-3."),
    ("--np=2 train.py", "--np=2: it is the number of hosts (--nproc_per_node: of processes); name"),
    # Values.
    ("--gpus", "--gpus needs a value: give LIST."),
    ("--gpus --ips=a train.py", "--gpus needs a value, and --ips=a looks like an option: write "),
    ("--nproc_per_node=abc train.py", "--nproc_per_node=abc: give a whole number, 1 or more, or"),
    ("--start_port=0 train.py", "--start_port=0: give a whole number from 1 to 65535."),
    ("--backend=foo train.py", "--backend=foo: give one of auto, nccl, gloo, bkcl, heter, xccl, "),
    ("--set = train.py", "--set =: give KEY=VALUE"),
    ("--nccl=DEBUG=INFO train.py", "--nccl is not in this version: write --env NCCL_NAME=VALUE."),
    ("--preflight train.py", "--preflight is not in this version: run `fleetrun doctor` with the"),
    ("--auto_tuner_json=a train.py", "--auto_tuner_json is not in this version: for Paddle's own"),
    ("--grace=soon train.py", "--grace=soon: give a number of seconds, 0 or more, or a time such"),
    ("--metrics_period=1e-9 train.py",
     "--metrics_period=1e-9: give 0 or a number of seconds, 0.1 or more, or a time such as 90s,"),
    ("--nproc_per_node=1_0 train.py", "--nproc_per_node=1_0: give a whole number, 1 or more, or"),
    ("--quiet=maybe train.py", "--quiet=maybe: give true or false."),
    ("--env=A train.py", "--env=A: give KEY=VALUE, where KEY is letters, digits and underscores."),
    ("--tee=3-1 train.py", "--tee=3-1: give all, or ranks such as 0,3 or 0-3."),
    ("submit k8s --env=A -- train.py", "--env=A: give KEY=VALUE, where KEY is letters"),
    ("--help=gpus", "--help=gpus: give one of screen, all, common"),
    ("--config=nowhere.yaml train.py", "nowhere.yaml: No such file"),
    ("--strategy=recommendid train.py", "--strategy=recommendid: "),
    # Fields of strategies, in full.
    ("--set k_stps=2 train.py",
     "--set k_stps: no such field: k_stps; did you mean gradient_merge_configs.k_steps"),
    ("--set fuse_grad_size=16 train.py",
     "--set fuse_grad_size: no such field: fuse_grad_size; did you mean fuse_grad_size_in_MB?"),
    ("--set asp=1 train.py", "--set asp=true is refused"),
    ("--strategy=amp --check_ranks=-2 train.py", "... give a whole number, -1 or more"),
    ("--strategy_mode=both train.py", "... give one of defaults, override."),
    # Blanks and quotation marks.
    ("--gpus 0 1 2 train.py", f'"1" {AS_LIST}'),
    ("--ips 10.0.0.1 10.0.0.2 train.py", f'"10.0.0.2" {AS_LIST}'),
    ("--gpus = 0,1 train.py", f'"0,1" {AS_LIST}'),
    ("nproc-per-node=2 train.py",
     '"nproc-per-node=2" is taken as the script: write --nproc-per-node=2.'),
    ("'--gpus=0' train.py", f"... {HYPHENS}"),
    ("\u2013gpus=0 train.py", f"... {HYPHENS}"),
    ("--gpus\uff1d0 train.py", f"{NO_OPTION}--gpus\uff1d0; did you mean --gpus?"),
    (["train.py --lr 1"], f"... {HYPHENS}"),
    # Commands.
    ("doctr --json", f"{NO_COMMAND}doctr; did you mean `fleetrun doctor`?"),
    ("submmit slurm", f"{NO_COMMAND}submmit; did you mean `fleetrun submit`?"),
    ("kill -9 4711", f"{NO_COMMAND}kill; did you mean `fleetrun stop`? `fleetrun -- kill` runs"),
    ("run train.py", f"{NO_COMMAND}run; did you mean `fleetrun train.py`?"),
    ("--gpus=0 launch x.py", f"{NO_COMMAND}launch; did you mean `fleetrun train.py`?"),
    ("help logs", f"{NO_COMMAND}help; did you mean `fleetrun --help`?"),
    ("tail -f", f"{NO_COMMAND}tail; did you mean `fleetrun logs`? `fleetrun -- tail` runs"),
    ("top --foo", "top: no such option: --foo; see `fleetrun top --help`."),
    ("top --onec", "top: no such option: --onec; did you mean --once?"),
    ("completion", "completion: give "),
    ("completion tcsh", "completion: invalid value for"),
]
# fmt: on


@pytest.mark.parametrize(("line", "sentence"), WRONG)
def test_a_wrong_line_is_one_sentence_and_exit_code_2(
    line: str | Sequence[str],
    sentence: str,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (elsewhere / "train.py").touch()
    words = line.split(" ") if isinstance(line, str) else line
    assert app.main(words, environ={}, launch=lambda _request, _environ: 0) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "hunter2" not in err
    begin = "" if sentence.startswith("... ") else "fleetrun: "
    assert f"{begin}{sentence.removeprefix('... ')}" in err
