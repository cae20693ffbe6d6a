"""The content of a manifest, and the commit in it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plans
import pytest
from plans import a_request, a_roster, some_facts
from waiting import until

from fleetrun import __version__
from fleetrun.cli import configfile, request
from fleetrun.cli.argv import split
from fleetrun.plan import planner
from fleetrun.plan.devices import Share
from fleetrun.run import proc
from fleetrun.run.loop import Loop
from fleetrun.sinks.provenance import Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleetrun.model import Request


def git_in(folder: Path, *words: str) -> str:
    """Run git in FOLDER without this machine's settings."""
    if not shutil.which("git"):
        pytest.skip("there is no git here")
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository with a commit of train.py."""
    (tmp_path / "train.py").write_text("pass\n")
    git_in(tmp_path, "init", "-q", "-b", "main")
    git_in(tmp_path, "add", "train.py")
    git_in(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def sink(
    folder: Path, made: Request, environ: Mapping[str, str], hide: Callable[[str], str] = str
) -> tuple[Provenance, Path]:
    """Return the sink of a launch in FOLDER and the file it is going to write."""
    facts = some_facts(2, cwd=str(folder), environ=environ)
    roster = a_roster()
    plan = planner.plan(made, facts, Share("gpu", roster.members[0].groups, "nccl"), roster)
    Path(plan.run_dir).mkdir(parents=True)
    job = plans.job(plan, asked=made)
    job.environ, job.redact = environ, hide
    return Provenance(job), Path(plan.run_dir) / "manifest.json"


def written(
    folder: Path, made: Request | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the manifest of a launch that ends before git."""
    manifest, path = sink(folder, made or a_request(), environ or {})
    loop = Loop()
    manifest.prepare()
    manifest.open(loop)
    assert not manifest.is_busy()
    assert not manifest.shows(0)
    assert path.exists()
    manifest.close()
    loop.close()
    document: dict[str, Any] = json.loads(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return document


def test_s73_a_manifest_says_where_a_result_came_from(tmp_path: Path) -> None:
    environ = {"HOME": "/root", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1"}
    words = ("--gpus=0,1", "train.py", "--lr", "0.1")
    made = request.resolve(split(words), environ)._replace(typed=words)
    document = written(tmp_path, made, environ)
    assert document["schema"] == 2
    assert document["command"] == list(words)
    assert document["cwd"] == str(tmp_path)
    assert document["versions"]["fleetrun"] == __version__
    assert document["versions"]["kernel"] == os.uname().release
    assert document["versions"]["paddle"].startswith("paddlepaddle")
    assert document["git"] is None
    assert document["hosts"] == ["127.0.0.1"]
    assert document["world_size"] == 2
    assert document["ranks"][1] == {
        "rank": 1,
        "host": 0,
        "devices": [{"kind": "gpu", "id": "1"}],
        "cpus": [],
    }
    assert document["environment"]["names"] == ["CUDA_VISIBLE_DEVICES", "HOME", "NCCL_DEBUG"]
    assert document["environment"]["values"] == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
    }
    assert {"name": "gpus", "value": "0,1", "source": "command line"} in document["settings"]
    start = f"cd {tmp_path} && env CUDA_VISIBLE_DEVICES=0,1 NCCL_DEBUG=INFO fleetrun "
    assert document["repeat"] == f"{start}--config=/dev/null --gpus=0,1 train.py --lr 0.1"


def test_s70_a_manifest_holds_no_secret(tmp_path: Path) -> None:
    environ = {
        "HF_TOKEN": "s3cr3t",
        "NCCL_TOKEN": "s3cr3t",
        "PADDLE_STORE": "http://me:s3cr3t@host/",
    }
    (tmp_path / "a.yaml").write_text("env: {DB_PASSWORD: s3cr3t}\njob_id: night\n")
    words = ("--env", "A_TOKEN=s3cr3t", "train.py", "--password=s3cr3t", "--api-key", "s3cr3t")
    config = configfile.read(str(tmp_path / "a.yaml"))
    made = request.resolve(split(words), environ, config)._replace(typed=words)
    document = written(tmp_path, made, environ)
    assert "s3cr3t" not in json.dumps(document)
    assert document["environment"]["names"] == sorted(environ)
    assert document["environment"]["values"] == {}
    assert document["command"][-3:] == ["--password=***", "--api-key", "***"]
    assert "--job_id=night '--env=DB_PASSWORD=***'" in document["repeat"]


# -- git --


def git_says(folder: Path, is_wanted: Callable[[dict[str, Any] | None], bool]) -> dict[str, Any]:
    """Return what the manifest says of git in FOLDER once it IS_WANTED."""
    manifest, path = sink(folder, a_request(), dict(os.environ))
    loop = Loop()
    manifest.open(loop)
    told: dict[str, Any] = {}

    def has_come() -> bool:
        loop.timer("test", 0.0, lambda: None)
        loop.turn()
        told["git"] = json.loads(path.read_text())["git"]
        return is_wanted(told["git"])

    until(has_come)
    manifest.close()
    loop.close()
    commit: dict[str, Any] = told["git"]
    return commit


def test_git_is_asked_when_the_ranks_have_started(repository: Path) -> None:
    assert git_says(repository, lambda git: git is not None) == {
        "folder": str(repository),
        "commit": git_in(repository, "rev-parse", "HEAD"),
        "branch": "main",
        "dirty": False,
    }
    assert not (repository / ".git/index.lock").exists()


def test_a_git_that_hangs_is_ended(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = repository / "git"
    program.write_text(f"#!/bin/sh\necho $$ >{repository}/pid\nexec /bin/sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(repository))
    pid = repository / "pid"
    git_says(repository, lambda _: pid.exists() and bool(pid.read_text().strip()))
    assert proc.stat(int(pid.read_text())) is None
