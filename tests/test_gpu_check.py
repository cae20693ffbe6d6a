"""`scripts/gpu-check` tries what it says; here on the CPU, where it says that it does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from training import PYTHONS
from warming import warm

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access(ROOT / ".venv" / "bin" / "python", os.X_OK), reason="there is no .venv"
    ),
]


def gpu_check(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "gpu-check", "--cpu", *options],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_training_and_a_field_are_tried_on_the_cpu_and_written_down(tmp_path: Path) -> None:
    numbers = tmp_path / "seen.json"
    done = gpu_check(
        "--only=^plain dygraph$|^dygraph nccl|^hier.* dygraph|gpu$",
        "--json",
        str(numbers),
        **warm(PYTHONS["3.3.1"]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("No GPU is here (or --cpu): 2 ranks on the CPU over gloo")
    assert "2 as predicted, 0 not, 2 left out." in done.stdout
    document = json.loads(numbers.read_text())
    assert (document["device"], document["ranks"], document["schema"]) == ("cpu", 2, 1)
    seen = {row["name"]: (row["is_right"], row["seen"]) for row in document["checks"]}
    assert seen["plain dygraph"] == (True, "ranks differ by 0.0e+00, on cpu")
    assert seen["hierarchical dygraph"] == (None, "needs 4 ranks")
    assert seen["tests marked gpu"] == (None, "no GPU")
    assert seen["dygraph nccl_comm_num"][1].startswith("effective, 4 allreduces, 2 groups")


def test_what_cannot_be_a_number_of_ranks_is_refused() -> None:
    done = gpu_check("--ranks=0")
    assert done.returncode == 2
    assert "--ranks: give a number from 1" in done.stderr


def test_every_kind_of_check_is_named() -> None:
    names = gpu_check("--list").stdout.splitlines()
    for wanted in ("plain static", "O2 with master gradients", "a collective that never ends"):
        assert wanted in names
    assert len(names) == len(set(names))
    assert sum(name.startswith("dygraph ") for name in names) >= 8
    assert sum(name.startswith("static ") for name in names) >= 12


def test_a_paddle_that_does_not_tell_of_nccl_is_asked_all_the_same() -> None:
    program = str(ROOT / "scripts" / "gpu_checks")
    argv = [str(PYTHONS["2.6.2"]), program, "--cpu", "--only=^plain", "--list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["plain dygraph", "plain static"], done.stderr


def test_the_launcher_is_tried_without_paddle(tmp_path: Path) -> None:
    numbers = tmp_path / "seen.json"
    done = gpu_check(
        "--launcher", "--only=^NVML|not there$|waits in a kernel|kill -9", "--json", str(numbers)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no Paddle is used" in done.stdout
    rows = {row["name"]: row["is_right"] for row in json.loads(numbers.read_text())["checks"]}
    assert rows["a rank that waits in a kernel hangs"] is True
    assert rows["memory after kill -9 of the launcher"] is True
    assert rows["a device that is not there"] is True
    assert rows["NVML"] is None
