"""A real launch writes a manifest that can repeat it, and no secret to any file."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Command, fleetrun
from waiting import LONG_S

pytestmark = pytest.mark.slow

SECRETS = {
    "HF_TOKEN": "hush-token",
    "DB_PASSWORD": "hush-password",
    "AWS_SECRET_ACCESS_KEY": "hush-aws",
    "PADDLE_API_KEY": "hush-paddle",
    "https_proxy": "http://me:hush-proxy@127.0.0.1:3128/",
}


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the last launch's manifest."""
    document: dict[str, Any] = json.loads((folder / "log/latest/manifest.json").read_text())
    return document


def dry(folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Return the plan of a command line as JSON."""
    done = fleetrun("--dry-run=json", *words, folder=folder, **(env or {}))
    assert done.returncode == 0, done.stderr
    return done.stdout


def compared(text: str) -> object:
    """Return a plan without the ports and names that differ in each launch."""
    document = json.loads(text)
    for process in document["nodes"][0]["processes"]:
        process["rank"].pop("endpoint")
        process["env"] = {
            name: value
            for name, value in process["env"].items()
            if not any(word in name for word in ("ENDPOINT", "MASTER"))
        }
    name = document["nodes"][0]["run_dir"].rpartition("/")[2]
    return json.loads(json.dumps(document).replace(name, "RUN"))


def test_s70_no_secret_is_in_any_file_or_on_the_console(tmp_path: Path) -> None:
    # The first failure ends the other rank, whose output must have been seen by then.
    check = (
        'case "$DB_PASSWORD$MY_TOKEN$1$3" in hush*hush*hush*hush-b) echo seen;; esac; touch up.$R; '
        "until [ -e up.0 ] && [ -e up.1 ]; do sleep 0.01; done; exit 7"
    )
    job = Command(tmp_path, check, "--env", "MY_TOKEN=hush-given", "--tee")
    job.argv.remove("--quiet")
    job.argv += ["--password=hush-a", "--api-key", "hush-b", "https://me:hush-c@127.0.0.1/"]
    ended = job.run(env=SECRETS)
    assert ended.code == 7
    # Ranks get them unchanged.
    assert ended.out.count(b"seen") == 2
    assert "hush" not in ended.stderr + ended.out.decode()
    files = [path for path in (tmp_path / "log").rglob("*") if path.is_file()]
    assert {"manifest.json", "plan.json", "events.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if b"hush" in path.read_bytes()]
    path = (tmp_path / "log/latest/manifest.json").resolve()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(SECRETS) <= set(manifest_of(tmp_path)["environment"]["names"])


def test_s73_the_same_launch_comes_out_of_its_manifest(tmp_path: Path) -> None:
    env = {"FLAGS_check": "1", "CUDA_VISIBLE_DEVICES": ""}
    (tmp_path / "fleetrun.yaml").write_text("grace: 3\n")
    (tmp_path / "show.py").write_text(
        "import os, sys\nprint(os.environ['FLAGS_check'], sys.argv)\n"
    )
    words = ["--nproc_per_node=2", "--env", "A=b c", "--tee", "0", "show.py", "--lr", "", "a b"]
    first = dry(tmp_path, *words, env=env)
    run = [sys.executable, "-m", "fleetrun"]
    base = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(
        [*run, "--quiet", *words], cwd=tmp_path, env={**base, **env}, check=True, timeout=LONG_S
    )
    line = manifest_of(tmp_path)["repeat"]
    (tmp_path / "fleetrun.yaml").unlink()

    def repeat(*options: str) -> str:
        words = line.replace("fleetrun", shlex.join([*run, *options]), 1)
        return subprocess.run(
            ["sh", "-c", words],
            cwd="/",
            env=base,
            capture_output=True,
            text=True,
            check=True,
            timeout=LONG_S,
        ).stdout

    again = repeat("--dry-run=json")
    assert compared(again) == {**_quiet(first), "settings": json.loads(again)["settings"]}
    # The ranks get the same from another folder and another shell.
    assert repeat() == "1 ['show.py', '--lr', '', 'a b']\n"


def _quiet(text: str) -> dict[str, object]:
    facts = compared(text)
    assert isinstance(facts, dict)
    return facts
