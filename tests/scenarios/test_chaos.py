"""A little of scripts/chaos with every test run: nothing may be lost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commandline import ROOT


@pytest.mark.slow
def test_chaos_loses_nothing() -> None:
    few = ["--launches=25", "--seed=7", "--seconds=20"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "chaos_main.py", *few],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost" in done.stdout
