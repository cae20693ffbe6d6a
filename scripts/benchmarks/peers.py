"""The launchers that are compared, as command lines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from processes import WORKER

from fleetrun.records import installed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
# An empty mask means CPU to fleetrun, and one GPU to Paddle's launcher.
OURS = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def _typed() -> tuple[str, ...]:
    """Return the command that users type; `-m` if it is not beside this Python, or Paddle's."""
    command = Path(sys.executable).with_name("fleetrun")
    if command.exists() and installed.OURS in command.read_bytes():
        return (str(command),)
    return (sys.executable, "-m", "fleetrun")


FLEETRUN = _typed()

_LOOP = """
i=0
while [ $i -lt "$1" ]; do
    PADDLE_TRAINER_ID=$i "$2" -u "$3" >"workerlog.$i" 2>&1 &
    i=$((i + 1))
done
wait
"""


class Peer(NamedTuple):
    """One way to launch: `before` and `after` stand around the number of ranks."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    # Importing a framework takes seconds per launch, and is paid by few ranks alike.
    is_heavy: bool = False
    env: Mapping[str, str] = {}
    # Why it cannot be had here.
    absent: str | None = None

    def command(self, ranks: int) -> list[str]:
        """Return the command that launches RANKS workers."""
        return [*self.before, str(ranks), *self.after]


BARE = "bare loop"
OUR_NAME = "fleetrun"


def all_peers() -> list[Peer]:
    """Return everything that launches, fleetrun and the bare loop first."""
    paddle = _absent("paddlepaddle", "paddlepaddle-gpu")
    torch = _torchrun()
    return [
        Peer(BARE, ("sh", "-c", _LOOP, "sh"), (sys.executable, WORKER)),
        Peer(OUR_NAME, (*FLEETRUN, "--nproc_per_node"), (WORKER,), env=OURS),
        Peer(
            "paddle launch",
            (sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node"),
            (WORKER,),
            is_heavy=True,
            absent=paddle,
        ),
        Peer(
            "paddle legacy",
            (
                sys.executable,
                "-m",
                "paddle.distributed.fleet.launch",
                "--backend",
                "gloo",
                "--nproc_per_node",
            ),
            (WORKER,),
            is_heavy=True,
            absent=paddle,
        ),
        Peer(
            "torchrun",
            (torch or "torchrun", "--nproc-per-node"),
            (WORKER,),
            is_heavy=True,
            absent=None if torch else "no torchrun is installed",
        ),
    ]


def _torchrun() -> str | None:
    """Return torchrun's path: it may well be another Python's, as Paddle and torch crowd a disk."""
    beside_us = str(Path(sys.executable).parent)
    return shutil.which("torchrun") or shutil.which("torchrun", path=beside_us)


def _absent(*packages: str) -> str | None:
    return None if any(map(_version, packages)) else f"{packages[0]} is not installed"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of what is compared, as far as it is installed."""
    packages = ("paddlepaddle", "paddlepaddle-gpu")
    installed = {package: version for package in packages if (version := _version(package))}
    torch = _torch_version()
    return {
        "python": sys.version.split()[0],
        **installed,
        **({} if torch is None else {"torch": torch}),
    }


def _torch_version() -> str | None:
    """Return the version of the torch that torchrun belongs to, which its Python knows."""
    program = _torchrun()
    if program is None:
        return None
    with Path(program).open("rb") as file:
        python = file.readline().removeprefix(b"#!").strip().decode()
    ask = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def add_ranks(parser: argparse.ArgumentParser, ranks: Sequence[int], *, heavy: int) -> None:
    """Add to PARSER how many RANKS are measured how often; at most HEAVY of frameworks."""
    parser.add_argument(
        "--ranks",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        default=tuple(ranks),
        help=f"numbers of ranks ({','.join(map(str, ranks))})",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, taken in turns (5)")
    parser.add_argument(
        "--heavy-ranks",
        type=int,
        default=heavy,
        help=f"launchers that import a framework are measured up to this many ranks ({heavy})",
    )
