"""Launches of the job under fleetrun, and what they left behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.records import rankfile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")

# Nothing that the job does takes as long; the launcher gives up, and says where the ranks stand.
HANG_S = 60
# Longer than the launcher waits.
LIMIT_S = 240.0


class Machine(NamedTuple):
    """What there is to train on: GPUs or, without any, the CPU with gloo."""

    device: str
    ranks: int


class Done(NamedTuple):
    """How a launch ended, what each rank left, and what fleetrun recorded of the strategy."""

    code: int
    output: str
    trained: tuple[dict[str, Any], ...]
    proofs: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]

    @property
    def last_words(self) -> str:
        """The last line that says something."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def environment() -> dict[str, str]:
    """Return the environment of a launch."""
    folders = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}


def launch(
    machine: Machine,
    folder: Path,
    *options: str,
    words: tuple[str, ...] = (),
    ranks: int | None = None,
) -> Done:
    """Run the job with OPTIONS of fleetrun and WORDS of its own in FOLDER."""
    folder.mkdir(parents=True)
    ranks = ranks or machine.ranks
    devices = [f"--gpus=0-{ranks - 1}"] if machine.device == "gpu" else []
    if not any(option.startswith("--hang_timeout") for option in options):
        options = (f"--hang_timeout={HANG_S}", *options)
    argv = [sys.executable, "-m", "fleetrun", f"--nproc_per_node={ranks}", *devices]
    env = environment()
    if machine.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    whole = [*argv, f"--log_dir={folder / 'log'}", *options, JOB, *words]
    code, output = ended(whole, cwd=folder, env=env)
    latest = folder / "log" / "latest"
    return Done(
        code,
        output,
        tuple(_read(latest / f"trained.{rank}.json") for rank in range(ranks)),
        tuple(rankfile.evidence(str(latest), str(rank)) or {} for rank in range(ranks)),
        tuple(_lines(latest / "events.jsonl")),
    )


def ended(
    argv: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run ARGV to its end, or for `LIMIT_S`; return its exit code, and what it said."""
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"it had not ended after {LIMIT_S:g} s"
    return done.returncode, done.stdout


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON at PATH; nothing where there is none."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def distance(first: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference between two ranks' weights; infinite where they share none.

    >>> distance({"weights": {"a": [1.0, 2.0]}}, {"weights": {"a": [1.0, 2.5]}})
    0.5
    """
    ours, theirs = first.get("weights", {}), other.get("weights", {})
    pairs = [(ours[name], theirs[name]) for name in ours if name in theirs]
    gaps = [abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True)]
    # A NaN is no small difference.
    return max(gaps) if gaps and not any(map(math.isnan, gaps)) else math.inf
