"""The command lines of docs/suites.md: each is planned as it stands, or does so below `exec`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import fleetrun

from fleetrun.rundir.variables import ASSUME_DEVICES

pytestmark = pytest.mark.extended

PAGE = (Path(__file__).parents[1] / "docs" / "cookbook.md").read_text(encoding="utf-8")
LINES = re.findall(r"(?m)^fleetrun (.*)$", PAGE.partition("\n## Suites\n")[2])
DIRECT = [line for line in LINES if not line.startswith("exec ")]
# How many processes a line starts on this host, by a part of it.
PLANNED = {
    "run_pretrain.py": 8,
    "rec_mv3": 8,
    "dp8": 8,
    "ppyoloe": 8,
    "ResNet50": 4,
    "static_ps": 3,
    "": 2,
}


def processes_here(plan: str) -> list[dict[str, Any]]:
    """Return the processes of this host in the JSON of PLAN."""
    nodes = json.loads(plan)["nodes"]
    return [process for node in nodes if node["here"] for process in node["processes"]]


def test_the_page_has_lines_of_both_kinds() -> None:
    assert len(DIRECT) >= 10
    assert len(LINES) - len(DIRECT) >= 3


@pytest.mark.parametrize("line", DIRECT)
def test_a_suites_line_is_planned(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    script = tmp_path / next(word for word in words if word.endswith(".py"))
    script.parent.mkdir(parents=True, exist_ok=True)
    script.touch()
    several = ("--host=192.168.0.1",) if "192.168.0.2" in line else ()
    kind = "npu" if "--npus" in line else "gpu"
    done = fleetrun(
        *("--dry-run=json", *several, *words),
        folder=tmp_path,
        CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7",
        **{ASSUME_DEVICES: f"{kind}:8"},
    )
    assert done.returncode == 0, done.stderr
    wanted = next(count for part, count in PLANNED.items() if part in line)
    assert len(processes_here(done.stdout)) == wanted


@pytest.mark.parametrize("line", [line for line in LINES if line not in DIRECT])
def test_a_program_that_starts_the_launcher_starts_this_one(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    (tmp_path / "train.py").touch()
    begin = "python -m paddle.distributed.launch --dry-run=json --nproc_per_node=2 train.py"
    for name in ("paddleformers-cli", "erniekit"):
        (tmp_path / name).write_text(f'#!/bin/sh\n{begin} "$@"\n')
        (tmp_path / name).chmod(0o755)
    run = f"import subprocess, sys\nsubprocess.run({begin.split()!r} + sys.argv[1:], check=True)\n"
    (tmp_path / "main.py").write_text(run)
    (tmp_path / "python").symlink_to(sys.executable)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = fleetrun(*words, folder=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    first, _ = processes_here(done.stdout)
    assert words[-1] in first["argv"]
