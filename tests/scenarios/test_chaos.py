"""A short run of scripts/chaos in every test run: nothing may be lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checkout import ROOT


def chaos(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "chaos_main.py", *words],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_chaos_counts_an_end_that_comes_late_as_lost() -> None:
    done = chaos("--launches=1", "--seed=7", "--fault=rank: exit", "--allow=0")
    assert done.returncode == 1
    assert "after the fault, 0.0 s are allowed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launches", [6, pytest.param(25, marks=pytest.mark.long)])
def test_chaos_loses_nothing(launches: int) -> None:
    done = chaos(f"--launches={launches}", "--seed=7", "--seconds=20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost" in done.stdout


@pytest.mark.slow
@pytest.mark.multinode
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="there is no /dev/net/tun")
@pytest.mark.parametrize("launches", [3, pytest.param(12, marks=pytest.mark.long)])
def test_chaos_on_several_hosts_loses_nothing(launches: int) -> None:
    done = chaos("--hosts=4", f"--launches={launches}", "--seed=7", "--seconds=30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost" in done.stdout
