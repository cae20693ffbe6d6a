"""Every command of the README works when it is pasted where it stands.

Set-up, the project's own scripts and what pip does are left out. What needs GPUs, several hosts or
endpoints on them is run with --dry-run. The project to try things in is the README's, with a small
stand-in for each training script, which trains nothing but says that it did as Paddle's hooks do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import MARKER, assert_no_survivors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Set-up, the tests themselves, and what measures for minutes.
LEFT_OUT = re.compile(r"(scripts/|pip install|python -m pip|apt-get|dnf )")
CLUSTER = re.compile(r" --(gpus|ips|servers)=")

TRAINER = """
import os, signal, socket, sys
if os.environ.get("TRAINING_ROLE") == "PSERVER":
    listening = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
    signal.pause()
times = os.environ.get("FLEETRUN_STEP_TIMES")
if times:
    with open(times.replace("{rank}", os.environ["PADDLE_TRAINER_ID"]), "w") as file:
        for number in range(1, int(os.environ["FLEETRUN_STOP_AFTER"]) + 1):
            file.write(f"{number} {number / 10} {1 / number}\\n")
print("trained", *sys.argv[1:])
"""


class Piece(NamedTuple):
    """One thing that a reader pastes: commands, or a file with its name."""

    kind: str
    text: str


def pieces() -> list[Piece]:
    """Return the README's commands and named files, in its order."""
    found = []
    # Text and blocks in turn.
    for place, part in enumerate(re.split(r"^```", README, flags=re.MULTILINE)):
        kind, _, text = part.partition("\n")
        if place % 2:
            found += [Piece(kind, text)] if kind in {"sh", "yaml"} else []
            continue
        for inline in re.findall(r"`([^`]+)`", part):
            # A command in a sentence, which may be broken like one.
            if re.match(r"(\w+=\S+ )*fleetrun\s.*\.(py|json)\b", inline, flags=re.DOTALL):
                found.append(Piece("sh", " ".join(inline.split())))
    return found


def commands(text: str) -> list[str]:
    """Return the command lines of a block, long ones put together."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def adapted(command: str) -> str:
    """Return COMMAND as it can be tried on any machine; nothing for what is left out."""
    if LEFT_OUT.match(command):
        return ""
    if not CLUSTER.search(command):
        return command
    dry = command if "--dry-run" in command else command.replace("fleetrun ", "fleetrun --dry-run ")
    return f"env -u CUDA_VISIBLE_DEVICES FLEETRUN_ASSUME_DEVICES=gpu:8 {dry}"


def script() -> str:
    """Return all that a reader pastes, which ends at the first command that fails."""
    lines = []
    for kind, text in pieces():
        if kind == "yaml":
            # Only a file that says its name is meant to be kept.
            named = re.match(r"# (\S+\.yaml)\n", text)
            lines += [f"cat >{named[1]} <<'END'\n{text}END"] if named else []
            continue
        for command in filter(None, map(adapted, commands(text))):
            shown = command.replace("'", "'\\''")
            lines += [f"echo '>>> {shown}'", command, "code=$?"]
            lines += ['[ "$code" = 0 ] || { echo "it exited with $code"; exit 1; }']
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_every_command_works_when_it_is_pasted_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("train_resnet.py", "train_ctr.py"):
        (tmp_path / "scripts" / name).write_text(TRAINER)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "fleetrun"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m fleetrun "$@"\n')
    command.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    marker = uuid.uuid4().hex
    done = subprocess.run(
        ["bash", "-c", script()],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", MARKER: marker},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert_no_survivors(marker)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(">>> ") >= 20
    assert done.stdout.count("\ntrained --epochs 3\n") == 1


def test_what_the_readme_gives_a_training_script_is_an_option_of_it() -> None:
    for name, source in (("train.py", "train_resnet.py"), ("train_ctr.py", "train_ctr.py")):
        text = (ROOT / "scripts" / source).read_text(encoding="utf-8")
        calls = [line for piece in pieces() for line in commands(piece.text) if name in line]
        assert calls
        for call in calls:
            for flag in re.findall(r" (--\w+)", call.partition(f" {name}")[2].partition("#")[0]):
                assert f'"{flag}"' in text, call


def test_the_readme_says_how_to_get_at_the_command_and_how_long_tests_take() -> None:
    assert ". .venv/bin/activate" in README
    assert "minutes" in README.partition("## Launching")[0]
