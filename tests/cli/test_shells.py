"""Completion by Tab: the candidates at each place, and real shells."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from terminals import Terminal
from waiting import until

from fleetrun.cli import app, parser
from fleetrun.rundir.variables import COMPLETE

pytestmark = pytest.mark.usefixtures("elsewhere")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nproc"], [("plain", "--nproc_per_node")]),
        (["--dry"], [("plain", "--dry-run")]),
        (["--elastic_l"], [("plain", "--elastic_level")]),
        (["--nproc_per_node", "g"], [("plain", "gpu")]),
        (["--dry-run=j"], [("plain", "json")]),
        (["--gpus", ""], []),
        (["--device_kind", "m"], [("plain", "mlu"), ("plain", "metax_gpu"), ("plain", "musa")]),
        (["--config", "a"], [("file", "a")]),
        (["--log_dir", "a"], [("dir", "a")]),
        (["--gpus=0", ""], [("file", "")]),
        (["--gpus=0", "train.py", "--gp"], [("file", "--gp")]),
        ([""], [("file", "")]),
        (["comp"], [("file", "comp"), ("plain", "completion")]),
        (["completion", "zsh", ""], []),
        (["--strategy", "amp,ov"], [("file", "amp,ov"), ("plain", "amp,overlap")]),
        (["--set", "nccl_c"], [("plain", "nccl_comm_num=")]),
        (["tune", "--va"], [("plain", "--vary")]),
        (["tune", "--vary", "nccl_c"], [("plain", "nccl_comm_num=")]),
        (["verify", "--strategy", "ov"], [("file", "ov"), ("plain", "overlap")]),
        (["verify", "--updates", "9", "--ip"], [("plain", "--ips")]),
        (["doctor", "--ips=a", "lo"], [("file", "lo")]),
        (["exec", "train.sh", "--ip"], [("file", "--ip")]),
        (["strategy", "l"], [("plain", "list")]),
        (["strategy", "list", "--f"], [("plain", "--fields")]),
        (["strategy", "explain", "--paddle", "2"], [("plain", "2.6.2")]),
    ],
)
def test_options_their_values_and_files_complete(
    words: list[str], expected: list[tuple[str, str]]
) -> None:
    *before, last = words
    items = ShellComplete(parser.ROOT, {}, "fleetrun", COMPLETE).get_completions(before, last)
    assert [(item.type, item.value) for item in items] == expected


@pytest.mark.parametrize(
    ("shell", "words", "cword", "answer"),
    [
        ("zsh", "fleetrun --dry-run j", "2", "plain\njson\n_\n"),
        ("bash", "fleetrun\n--dry-run\n=", "2", "plain,table\nplain,json\n"),
        ("bash", "fleetrun\n--dry-run\n=\nj", "3", "plain,json\n"),
        ("bash", "fleetrun\ntune\n--nproc-per-node\n2\n--va", "4", "plain,--vary\n"),
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
    assert capsys.readouterr().out == answer


# The typed keys, a Tab, an X; and the resulting line.
TYPED = {
    "fleetrun --nproc": "fleetrun --nproc_per_node X",
    "fleetrun --backend gl": "fleetrun --backend gloo X",
    "fleetrun --bind no": "fleetrun --bind none X",
    "fleetrun --strategy comm_f": "fleetrun --strategy comm_fusion X",
    "fleetrun --gpus=0 tra": "fleetrun --gpus=0 train.py X",
    "fleetrun strategy show nccl_c": "fleetrun strategy show nccl_comm_num X",
    "fleetrun strategy explain --gr": "fleetrun strategy explain --graph X",
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
        assert answer.rpartition("LINE:")[2].rstrip() == line, answer
    process.kill()
    process.wait()
