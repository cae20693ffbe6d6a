"""Completion by Tab: the candidates at each place, and real shells."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from terminals import Terminal
from waiting import until

from fleetrun.cli import app, shells
from fleetrun.rundir.variables import COMPLETE

pytestmark = pytest.mark.usefixtures("elsewhere")
ROOT = Path(__file__).parents[2]


def completed(*words: str) -> list[tuple[str, str]]:
    """Return the candidates for the last of WORDS, each with its type."""
    *before, last = words
    return [(item.type, item.value) for item in shells.candidates(before, last)]


_VARIED = "--vary=fuse_all_reduce_ops=true,false"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nproc"], [("plain", "--nproc_per_node")]),
        (["--nproc-"], [("plain", "--nproc-per-node")]),
        (["--dry"], [("plain", "--dry-run")]),
        (["--elastic_l"], [("plain", "--elastic_level")]),
        (["--nproc_per_node", "g"], [("plain", "gpu")]),
        (["--nproc_per_node=c"], [("plain", "--nproc_per_node=cpu")]),
        (["--dry-run=j"], [("plain", "--dry-run=json")]),
        (["--tee="], [("plain", "--tee=all")]),
        (["--nonsense="], []),
        (["--gpus", ""], []),
        (["--device_kind", "m"], [("plain", "mlu"), ("plain", "metax_gpu"), ("plain", "musa")]),
        (["--config", "a"], [("file", "a")]),
        (["--log_dir", "a"], [("dir", "a")]),
        (["--gpus=0", ""], [("file", "")]),
        (["--gpus=0", "train.py", "--gp"], [("file", "--gp")]),
        (["-m", "pkg", "--gp"], [("file", "--gp")]),
        (["--", "--gp"], [("file", "--gp")]),
        ([""], [("file", "")]),
        (["comp"], [("file", "comp"), ("plain", "completion")]),
        (["completion", "zsh", ""], []),
        (
            ["--strategy=amp,ov"],
            [("file", "--strategy=amp,ov"), ("plain", "--strategy=amp,overlap")],
        ),
        (["--set", "nccl_c"], [("plain", "nccl_comm_num=")]),
        (["--set", "gradient_merge_configs.k"], [("plain", "gradient_merge_configs.k_steps=")]),
        (["--set", "nccl_comm_num="], [("plain", "nccl_comm_num=auto")]),
        (
            ["--set", "sharding_configs.sharding_segment_strategy=segment_a"],
            [("plain", "sharding_configs.sharding_segment_strategy=segment_anchors")],
        ),
        (["--set", "no_such=t"], []),
        (["tune", "--va"], [("plain", "--vary")]),
        (["tune", "--vary", "nccl_c"], [("plain", "nccl_comm_num=")]),
        (["tune", "--vary=fuse_all_reduce_ops=true,f"], [("plain", _VARIED)]),
        (["tune", "--vary=a=1", "tr"], [("file", "tr")]),
        (["strategy", "l"], [("plain", "list")]),
        (["strategy", "list", "--f"], [("plain", "--fields")]),
        (["strategy", "show", "nccl_c"], [("file", "nccl_c"), ("plain", "nccl_comm_num")]),
        (["strategy", "explain", "--graph=d"], [("plain", "--graph=dygraph")]),
        (["strategy", "explain", "--paddle", "2"], [("plain", "2.6.2")]),
    ],
)
def test_options_their_values_and_files_complete(
    words: list[str], expected: list[tuple[str, str]]
) -> None:
    assert completed(*words) == expected


@pytest.mark.parametrize(
    ("shell", "words", "cword", "answer"),
    [
        ("zsh", "fleetrun --dry-run=j", "1", "plain\n--dry-run=json\n_\n"),
        ("zsh", "fleetrun --log_d", "1", "plain\n--log_dir\n"),
        ("zsh", "fleetrun --gpus=0 tr", "2", "file\ntr\n_\n"),
        ("fish", "fleetrun --dry-run=j", "--dry-run=j", "plain,--dry-run=json\n"),
        ("fish", "fleetrun --gpus=0 tr", "tr", "file,tr\n"),
        ("bash", "fleetrun\n--dry-run\n=", "2", "plain,table\nplain,json\n"),
        ("bash", "fleetrun\n--master\na\n:\n1\n--dr", "5", "plain,--dry-run\n"),
    ],
)
def test_each_shell_is_answered_in_its_own_words(
    shell: str,
    words: str,
    cword: str,
    answer: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", cword)
    assert app.main([], environ={COMPLETE: f"{shell}_complete"}) == 0
    assert capsys.readouterr().out.startswith(answer)


# The typed keys, a Tab, an X; and the resulting line.
TYPED = {
    "fleetrun --nproc": "fleetrun --nproc_per_node X",
    "fleetrun --backend gl": "fleetrun --backend gloo X",
    "fleetrun --dry-run=j": "fleetrun --dry-run=json X",
    "fleetrun --strategy=over": "fleetrun --strategy=overlap X",
    "fleetrun --strategy comm_f": "fleetrun --strategy comm_fusion X",
    "fleetrun --set fuse_grad_size_in_M": "fleetrun --set fuse_grad_size_in_MB=X",
    "fleetrun --set=fuse_all_reduce_ops=f": "fleetrun --set=fuse_all_reduce_ops=false X",
    "fleetrun --gpus=0 tra": "fleetrun --gpus=0 train.py X",
    "fleetrun strategy show nccl_c": "fleetrun strategy show nccl_comm_num X",
    "fleetrun strategy explain --gr": "fleetrun strategy explain --graph X",
    "./fleetrun tune --vary a=1 --warm": "./fleetrun tune --vary a=1 --warmup X",
}
# Prints the completed line; Ctrl-A goes to its beginning.
_SHOW = {"bash": "printf 'LINE:%s\\n' ", "zsh": "print -r -- LINE:", "fish": "echo LINE:"}
_BEGIN = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
    "fish": ["--no-config", "-i"],
}
_READY = {
    "bash": 'PS1="> "; eval "$(fleetrun completion bash)"',
    "zsh": 'autoload -Uz compinit; compinit -u -D; PS1="> "; eval "$(fleetrun completion zsh)"',
    "fish": "fleetrun completion fish | source",
}


@pytest.fixture
def installed(elsewhere: Path) -> Path:
    """Make a folder with a script, and with a fleetrun that is first on PATH."""
    (elsewhere / "train.py").touch()
    command = elsewhere / "fleetrun"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m fleetrun "$@"\n')
    command.chmod(0o755)
    return elsewhere


def shell_of(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_a_real_shell_completes(name: str, installed: Path, terminal: Terminal) -> None:
    environ = {
        "PATH": f"{installed}:{os.environ['PATH']}",
        "HOME": str(installed),
        "TERM": "dumb",
        "LC_ALL": "C",
        "INPUTRC": "/dev/null",
        "COLUMNS": "200",
    }
    process = terminal.start([shell_of(name), *_BEGIN[name]], environ, installed)
    terminal.type(f"{_READY[name]}; echo READY''NOW\n".encode())
    until(terminal.shows(b"READYNOW\r\n"))
    for typed, line in TYPED.items():
        terminal.shown = b""
        terminal.type(f"{typed}\tX\x01{_SHOW[name]}'\x05'; echo EN''D\n".encode())
        until(terminal.shows(b"END\r\n"))
        answer = terminal.shown.partition(b"END\r\n")[0].decode(errors="replace")
        # zsh adds a blank also where a value is to follow.
        wanted = line.replace("=X", "= X") if name == "zsh" else line
        assert answer.rpartition("LINE:")[2].rstrip() == wanted, answer
    process.kill()
    process.wait()
