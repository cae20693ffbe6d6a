"""Trainings without a launcher, of one rank or more, on each supported Paddle."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import devices
import ports
import pytest
from processes import MARKER, assert_no_survivors, survivors
from waiting import TRAINING_S, until

from fleetrun.plan.environment import STACK_SIGNAL
from fleetrun.rundir import rankfile
from fleetrun.rundir.variables import STACK_SIGNAL_VARIABLE
from fleetrun.strategy import document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab import Host

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).parent / "train" / "models"
SITE = ROOT / "fleetrun" / "inject" / "site"
PROGRAMS = ROOT / "tests" / "device" / "programs.py"
_PADDLE26 = os.environ.get("FLEETRUN_TEST_PADDLE26")


class _Pythons(dict[str, Path]):
    """The Python of each Paddle; a test skips if that cannot be on this machine."""

    def __getitem__(self, version: str) -> Path:
        # scripts/test marks those by an empty variable; a Paddle that is merely not set up fails.
        if version == "2.6.2" and _PADDLE26 == "":
            pytest.skip("no Python here is old enough for Paddle 2.6.2", allow_module_level=True)
        return super().__getitem__(version)


PYTHONS = _Pythons(
    {
        "3.3.1": Path(sys.executable),
        "2.6.2": Path(_PADDLE26 or ROOT / ".venv-paddle2.6" / "bin" / "python"),
    }
)
# The beginning of a script with a static program, and an update of it.
STATIC = """
import numpy
import paddle
from paddle import static
paddle.enable_static()
main, startup = static.Program(), static.Program()
with static.program_guard(main, startup):
    loss = paddle.nn.Linear(4, 2)(static.data("x", [None, 4])).mean()
    paddle.optimizer.Adam().minimize(loss)
executor = static.Executor()
executor.run(startup)
feed = {"x": numpy.ones([2, 4], "float32")}
"""
RUN = "executor.run(program=main, feed=feed, fetch_list=[loss])\n"
# How long other ranks may take to notice that a rank has failed.
_AFTERWARDS_S = 30.0


def launch_on(host: Host, *words: str, version: str = "3.3.1") -> subprocess.Popen[bytes]:
    """Start `fleetrun WORDS` on HOST, with the Paddle of VERSION."""
    return host.fleetrun(*words, folder=host.folder, python=PYTHONS[version], PYTHONPATH=str(ROOT))


def mostly(version: str) -> list[Any]:
    """Return VERSION as a parameter, and the other Paddles' for --long.

    For tests that train for long, where other tests cover each Paddle.
    """
    marks = {paddle: () if paddle == version else pytest.mark.long for paddle in PYTHONS}
    return [pytest.param(paddle, marks=mark) for paddle, mark in marks.items()]


def in_turns(*values: Any) -> list[Any]:
    """Return a Paddle and one of VALUES as parameters, for tests of what takes both in any pair.

    Each value has one Paddle, in turns; the other pairs are for --long.
    """
    return [
        pytest.param(version, value, marks=marks, id=f"{version}-{number}")
        for number, value in enumerate(values)
        for place, version in enumerate(PYTHONS)
        for marks in [() if number % len(PYTHONS) == place else pytest.mark.long]
    ]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Any:
    """Return the JSON result of MAKE in a folder NAME; only one worker of pytest-xdist calls it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "made.json"
        if not made.exists():
            text = json.dumps(make(folder))
            made.write_text(text, encoding="utf-8")
        return json.loads(made.read_text(encoding="utf-8"))


def told(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the strategy.json of ASKED, with the launcher's verdicts on its fields."""
    return {"schema": 1, **asked, "verdicts": document.known(asked)}


def evidence(folder: Path, rank: int = 0) -> dict[str, Any]:
    """Return the last evidence of RANK in FOLDER."""
    recorded = rankfile.evidence(str(folder), str(rank))
    assert recorded is not None, f"no evidence of rank {rank} in {folder}"
    return recorded


def run(
    python: Path, argv: Sequence[str | Path], folder: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run PYTHON with ARGV in FOLDER on the CPU, both outputs in one; MORE are its variables."""
    # A thread may call this, and outlive the fixture that cleans the environment of a test.
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PADDLE_", "FLEETRUN_", "FLAGS_"))
    }
    return subprocess.run(
        [python, *argv],
        cwd=folder,
        env={
            **environ,
            "CUDA_VISIBLE_DEVICES": "",
            **devices.variables(python),
            "OMP_NUM_THREADS": "1",
            **more,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )


def run_marked(
    python: Path | str, words: Sequence[str | Path], folder: Path, **variables: str
) -> tuple[subprocess.CompletedProcess[str], dict[int, str]]:
    """Run PYTHON with WORDS in FOLDER; return how it ended, and the processes that it left alive.

    Those are killed. Both outputs are one; VARIABLES are added to the environment.
    """
    marker = uuid.uuid4().hex
    done = subprocess.run(
        [python, *words],
        cwd=folder,
        env={**os.environ, **variables, MARKER: marker},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )
    left = survivors(marker)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert_no_survivors(marker)
    return done, left


def alone(
    version: str, folder: Path, script: str, asked: dict[str, Any], *words: str
) -> tuple[dict[str, Any], str]:
    """Return the proof of one process that runs SCRIPT with ASKED and WORDS, and its output."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    (folder / "strategy.json").write_text(json.dumps(told(asked)), encoding="utf-8")
    done = subprocess.run(
        [PYTHONS[version], "-W", "ignore", folder / "train.py", *words],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            **devices.variables(PYTHONS[version]),
            **devices.of_rank(0),
            "PYTHONPATH": str(SITE),
            "FLEETRUN_STRATEGY_FILE": str(folder / "strategy.json"),
            "FLEETRUN_RECORDS": str(folder / "rank.0.jsonl"),
        },
        capture_output=True,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return evidence(folder), done.stdout


def train(
    python: Path,
    model: str,
    folder: Path,
    strategy: dict[str, Any] | None,
    *,
    check_ranks: int | str = 0,
    profile: str = "",
    nranks: int = 2,
    hosts: int = 1,
    more: dict[str, str] | None = None,
    builds: dict[str, Any] | None = None,
) -> list[Any]:
    """Return the report of each of NRANKS ranks of MODEL; PYTHON runs them with STRATEGY.

    The steps PROFILE are recorded. The strategy is told that the ranks are on so many HOSTS. MORE
    are variables of the ranks, BUILDS the fields of BuildStrategy.
    """
    folder.mkdir()
    variables = {"OUTPUT": str(folder / "report"), **(more or {})}
    if strategy is not None:
        asked = {
            "strategy": strategy,
            "build_strategy": builds or {},
            "check_ranks": check_ranks,
            "topology": {
                "nranks": nranks,
                "nnodes": hosts,
                "ranks_per_node": nranks // hosts,
            },
        }
        (folder / "strategy.json").write_text(json.dumps(told(asked)))
        variables["FLEETRUN_STRATEGY_FILE"] = str(folder / "strategy.json")

    def of_rank(rank: int) -> dict[str, str]:
        return {
            "FLEETRUN_RECORDS": str(folder / f"rank.{rank}.jsonl"),
            "FLEETRUN_PROFILE": profile and f"{profile}:{folder}/trace.{rank}.json",
        }

    started = start(python, [MODELS / model], folder, nranks, of_rank, **variables)
    codes, outputs = ends(started, folder)
    assert codes == [0] * nranks, f"{codes}\n{outputs}"
    return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(nranks)]


def start(
    python: Path,
    argv: Sequence[str | Path],
    folder: Path,
    nranks: int,
    of_rank: Callable[[int], dict[str, str]] = lambda _: {},
    **variables: str,
) -> list[subprocess.Popen[bytes]]:
    """Start NRANKS ranks of ARGV without a launcher; OF_RANK returns the variables of one rank."""
    master, *endpoints = (f"127.0.0.1:{port}" for port in ports.free(1 + nranks))
    environ = {name: value for name, value in os.environ.items() if name[:9] != "FLEETRUN_"}
    environ |= {
        "PADDLE_MASTER": master,
        "PADDLE_TRAINERS_NUM": str(nranks),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
        **devices.variables(python),
        "PYTHONPATH": str(SITE),
        "OMP_NUM_THREADS": "1",
        # A launcher sets it: what they wait for in vain can be seen.
        STACK_SIGNAL_VARIABLE: str(STACK_SIGNAL),
        **variables,
    }
    ranks = []
    for rank, endpoint in enumerate(endpoints):
        own = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": endpoint}
        own |= {**devices.of_rank(rank), **of_rank(rank)}
        with (folder / f"output.{rank}").open("w") as output:
            ranks.append(
                subprocess.Popen(
                    [python, *argv],
                    env={**environ, **own},
                    cwd=folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return ranks


def ends(ranks: list[subprocess.Popen[bytes]], folder: Path) -> tuple[list[int], list[str]]:
    """Wait for RANKS; return their exit codes and their output, from FOLDER.

    Ranks that wait for a failed one are killed.
    """
    try:
        until(
            lambda: (
                all(process.poll() == 0 for process in ranks)
                or any(process.poll() for process in ranks)
            ),
            TRAINING_S,
        )
        with suppress(AssertionError):
            until(lambda: None not in [process.poll() for process in ranks], _AFTERWARDS_S)
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [(folder / f"output.{rank}").read_text() for rank in range(len(ranks))]
    return [rank.wait() for rank in ranks], outputs


def assert_as_alone(ranks: Sequence[Any], near: float = 1e-6) -> None:
    """Compare the weights of each model of RANKS with those of one process, and among ranks."""
    reports = [{"": rank} if "weights" in rank else rank for rank in ranks]
    names = [name for name, model in reports[0].items() if "alone" in model]
    assert names
    for models in reports:
        for name in names:
            weights = models[name]["weights"]
            assert weights == pytest.approx(models[name]["alone"], abs=near), name
            assert weights == reports[0][name]["weights"], name


def train_as_alone(
    version: str, model: str, folder: Path, strategy: dict[str, Any], **more: Any
) -> list[Any]:
    """Return the result of `train` with the Paddle of VERSION, whose weights are one process's."""
    ranks = train(PYTHONS[version], model, folder / "ours", strategy, **more)
    assert_as_alone(ranks)
    return ranks


def run_program(
    folder: Path, program: str, nranks: int, version: str = "3.3.1", **more: str
) -> tuple[list[int], list[str], list[dict[str, Any]]]:
    """Return the exit codes of NRANKS ranks of PROGRAM, their output, and their reports.

    MORE are their variables.
    """
    folder.mkdir(exist_ok=True)
    report = str(folder / "report")
    argv: list[str | Path] = [PROGRAMS, program]
    ranks = start(PYTHONS[version], argv, folder, nranks, lambda _: more, OUTPUT=report)
    codes, outputs = ends(ranks, folder)
    files = [folder / f"report.{rank}" for rank in range(nranks)]
    return codes, outputs, [json.loads(file.read_text()) for file in files if file.exists()]
