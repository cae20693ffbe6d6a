"""`fleetrun run_check`: Paddle's check of its installation, in the ranks that were asked for."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import devices
import ports
import pytest
from training import PYTHONS, ROOT, run
from waiting import TRAINING_S

from fleetrun.inject import run_check

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_paddle_is_checked_in_each_rank_and_in_all_together(version: str, tmp_path: Path) -> None:
    # A file of that name is not run.
    (tmp_path / "run_check").write_text("#!/bin/sh\nexit 9\n")
    argv = ["-m", "fleetrun", "--nproc_per_node=2", "--tee", "run_check"]
    done = run(PYTHONS[version], argv, tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        # On a plug-in each rank of Paddle's own check would take the first device.
        for sentence in ("works well on 2 ranks", *["works well on 1 CPU"] * (not devices.kind())):
            assert any(
                line.startswith(f"[rank {rank}] ") and sentence in line
                for line in done.stdout.splitlines()
            ), done.stdout


@pytest.mark.slow
def test_two_hosts_are_checked_together(tmp_path: Path) -> None:
    master = f"--master=127.0.0.1:{ports.free(1)[0]}"
    words = [master, "--nnodes=2", "--host=127.0.0.1", "--nproc_per_node=1"]
    hosts = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        hosts.append(
            subprocess.Popen(
                [PYTHONS["3.3.1"], "-m", "fleetrun", *words, "run_check"],
                cwd=tmp_path / str(number),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for host in hosts:
        output, _ = host.communicate(timeout=TRAINING_S)
        assert host.returncode == 0, output
        assert "works well on 2 ranks of 2 hosts." in output


@pytest.mark.parametrize(
    ("mask", "selected", "expected"),
    [
        (None, "1", ("1", "0")),
        ("all", "1", ("1", "0")),
        ("4,6,7", "2", ("7", "0")),
        ("GPU-a,GPU-b", "0,1", ("GPU-a,GPU-b", "0,1")),
        ("4,5", None, ("4,5", None)),
    ],
)
def test_a_rank_checks_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch,
    mask: str | None,
    selected: str | None,
    expected: tuple[str | None, str | None],
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", mask), ("FLAGS_selected_gpus", selected)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    run_check.hide_other_gpus()
    names = ("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus")
    assert tuple(map(os.environ.get, names)) == expected
    for name in names:
        # monkeypatch restores what it has set itself.
        monkeypatch.setenv(name, "")
