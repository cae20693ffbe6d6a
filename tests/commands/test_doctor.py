"""`fleetrun doctor` through the real command line, with real faults; it imports no Paddle."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import fakedriver
import pytest
from checkout import environ
from commandline import FLEETRUN
from lab import is_root
from waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


pytestmark = pytest.mark.slow

ALONE = ("unshare", "--mount", "sh", "-ec")


def run(
    folder: Path,
    *words: str,
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run the doctor in FOLDER with WORDS."""
    return subprocess.run(
        [*prefix, *FLEETRUN, "doctor", *words],
        cwd=folder,
        env=environ(**(env or {})),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def findings(done: subprocess.CompletedProcess[str], check: str) -> list[dict[str, Any]]:
    """Return the findings of CHECK in the output of DONE."""
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    levels = {finding["level"] for finding in document["findings"]}
    assert done.returncode == document["exit_code"] == (3 if "error" in levels else 0)
    return [finding for finding in document["findings"] if finding["check"] == check]


def level(done: subprocess.CompletedProcess[str], check: str) -> str:
    (finding,) = findings(done, check)
    return str(finding["level"])


def test_a_page_for_people_ends_with_the_count(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc_per_node=2")
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert lines[0].split() == ["ok", "job", "2", "processes,", "2", "here"]
    assert re.fullmatch(r"\d+ ok, \d+ warnings?, \d+ errors?", lines[-1])
    assert "Paddle" in done.stdout


def test_paddle_is_not_imported(tmp_path: Path) -> None:
    done = run(tmp_path, env={"PYTHONVERBOSE": "1"})
    imported = {
        line.split("'")[1] for line in done.stderr.splitlines() if line.startswith("import '")
    }
    assert "fleetrun.doctor.checkup" in imported
    assert not imported & {"paddle", "numpy", "pynvml"}


def test_a_port_that_is_taken_is_an_error_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = findings(run(tmp_path, "--json", f"--start_port={port}"), "port")
    assert finding["level"] == "error"
    assert f"{port} is taken by pid {os.getpid()}" in finding["seen"]


def test_a_job_that_cannot_be_planned_is_an_error_with_the_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", "--nproc_per_node=1", "nowhere.py")
    (finding,) = findings(done, "job")
    assert finding["level"] == "error"
    assert "nowhere.py" in finding["seen"]


def test_no_secret_is_shown(tmp_path: Path) -> None:
    (tmp_path / "secret-abcdef12").mkdir()
    done = run(tmp_path, "--json", "--env=DB_PASSWORD=abcdef12", "--log_dir=/proc/abcdef12")
    assert "abcdef12" not in done.stdout + done.stderr


@pytest.mark.skipif(not is_root(), reason="mounting needs root")
@pytest.mark.parametrize(("folder", "check"), [("/dev/shm", "shared memory"), ("log", "disk")])
def test_a_full_file_system_is_an_error(folder: str, check: str, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    fill = f'mount -t tmpfs -o size=1m tmpfs {folder}; ! cat /dev/zero >{folder}/full; exec "$@"'
    done = run(tmp_path, "--json", prefix=(*ALONE, fill, "sh"))
    (finding,) = [
        entry for entry in json.loads(done.stdout)["findings"] if entry["check"].startswith(check)
    ]
    assert (finding["level"], done.returncode) == ("error", 3)
    assert "No space left" in finding["seen"]


@fakedriver.needed
@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({"FAKE_GPUS": "2"}, "it starts, with 2 GPUs"),
        ({"FAKE_CUDA": "802"}, "cuInit ends with 802, CUDA_ERROR_SYSTEM_NOT_READY: "),
        ({"FAKE_CUDA": "803"}, "cuInit ends with 803, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: "),
    ],
)
def test_cuda_is_started_beside_nvml(tmp_path: Path, env: dict[str, str], seen: str) -> None:
    env = {**env, **fakedriver.build(tmp_path / "driver")}
    done = run(tmp_path, "--json", prefix=fakedriver.HERE, env=env)
    (finding,) = findings(done, "CUDA")
    assert finding["seen"].startswith(seen)
    assert finding["level"] == ("error" if "FAKE_CUDA" in env else "ok")
    assert findings(done, "GPU")[0]["seen"] == "GPU 0: Fake H100, 80 GiB"


@pytest.mark.skipif(not is_root(), reason="only root may mount")
def test_a_container_without_gpus_on_a_machine_with_some_may_run_a_job_on_the_cpu(
    tmp_path: Path,
) -> None:
    prefix = fakedriver.HERE
    (finding,) = findings(run(tmp_path, "--json", prefix=prefix), "GPUs")
    assert finding["level"] == "warning"
    assert finding["mend"].startswith("docker run --gpus all")
    (finding,) = findings(run(tmp_path, "--json", "--gpus=0", prefix=prefix), "job")
    assert "NVIDIA's driver is here, but none of its GPUs (docker run --gpus all" in finding["seen"]
