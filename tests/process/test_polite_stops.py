"""A request to end reaches a rank before what it has started, so it can still save."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import Command
from training import PYTHONS, in_turns

if TYPE_CHECKING:
    from pathlib import Path

LOADER = """
import os, signal, sys, time
import numpy
import paddle
from paddle.io import DataLoader, Dataset
paddle.set_device("cpu")
rank, workers = int(os.environ["PADDLE_TRAINER_ID"]), int(sys.argv[1])
stopping = False
def stop(*_):
    global stopping
    stopping = True
signal.signal(signal.SIGTERM, stop)
class Samples(Dataset):
    def __len__(self):
        return 1000000
    def __getitem__(self, index):
        return numpy.full([4], index, "float32")
for step, _ in enumerate(DataLoader(Samples(), batch_size=1, num_workers=workers)):
    if step == 3:
        open(f"ready{rank}", "w").close()
    if rank == 1 and os.path.exists("ready0"):
        os._exit(5)
    # The step in which the request comes takes a second.
    until = time.monotonic() + 1.0
    while step > 3 and time.monotonic() < until:
        time.sleep(0.05)
    if stopping:
        open(f"saved{rank}", "w").close()
        sys.exit(0)
"""
HELPED = """
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
def stop(signum, _):
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        open(f"saved{signum}", "w").close()
    if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        sys.exit(0)
for name in ("TERM", "INT", "HUP", "USR1", "USR2"):
    signal.signal(getattr(signal, f"SIG{name}"), stop)
open("ready", "w").close()
while True:
    signal.pause()
"""
WRAPPED = "--wrap=0: sh -c '\"$@\"; exit $?' sh"


@pytest.mark.train
@pytest.mark.parametrize(("paddle", "workers"), in_turns(1, 2))
def test_a_rank_with_a_data_loader_saves_when_another_has_failed(
    tmp_path: Path, paddle: str, workers: int
) -> None:
    code = LOADER.replace("int(sys.argv[1])", str(workers))
    command = Command.python(tmp_path, code)
    command.argv[0] = str(PYTHONS[paddle])
    done = command.run(env={"PYTHONPATH": str(ROOT)})
    assert done.code == 5, done.stderr
    assert (tmp_path / "saved0").exists(), done.stderr
    assert "killed by signal" not in done.stderr


@pytest.mark.parametrize(
    ("signum", "options"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGHUP, ()),
        # A command that gives the rank a session of its own.
        (signal.SIGTERM, ("--wrap=0: setsid -w",)),
        pytest.param(signal.SIGINT, (WRAPPED,), marks=pytest.mark.extended),
    ],
)
def test_a_stop_leaves_a_child_until_its_rank_has_ended(
    tmp_path: Path, signum: signal.Signals, options: tuple[str, ...]
) -> None:
    command = Command.python(tmp_path, HELPED, *options, ranks=1)
    launcher = command.start_until("ready")
    launcher.send_signal(signum)
    command.finish(launcher)
    assert (tmp_path / f"saved{int(signum)}").exists()


@pytest.mark.parametrize(
    ("signum", "options"),
    [
        (signal.SIGUSR1, ()),
        pytest.param(signal.SIGUSR2, (WRAPPED,), marks=pytest.mark.extended),
    ],
)
def test_a_notice_reaches_the_rank_alone(
    tmp_path: Path, signum: signal.Signals, options: tuple[str, ...]
) -> None:
    command = Command.python(tmp_path, HELPED, *options, ranks=1)
    launcher = command.start_until("ready")
    launcher.send_signal(signum)
    command.wait_for(f"saved{int(signum)}")
    launcher.terminate()
    command.finish(launcher)
    assert (tmp_path / f"saved{int(signal.SIGTERM)}").exists()


def test_a_killed_launcher_stops_ranks_before_their_children(tmp_path: Path) -> None:
    command = Command.python(tmp_path, HELPED, ranks=1)
    launcher = command.start_until("ready")
    with launcher:
        command.kill(launcher)
    assert (tmp_path / f"saved{int(signal.SIGTERM)}").exists()
