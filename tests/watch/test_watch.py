"""The watch over real processes: which are stopped, which lag, at almost no cost."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import plans
import pytest
from nvmls import FakeNvml, hang
from waiting import LONG_S

from fleetrun.host import nvml
from fleetrun.model import Rules
from fleetrun.run.events import Hung, Started
from fleetrun.run.loop import Loop
from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fleetrun.model import LaunchPlan
    from fleetrun.run.events import Declared

BUSY = "while True: pass"
IDLE = "import time\ntime.sleep(60)"


def a_plan(folder: Path, ranks: int, **changes: Any) -> LaunchPlan:
    here = str(folder)
    return plans.plan(per_node=ranks, cwd=here, log_dir=here, run_dir=here, **changes)


class Room:
    """A watch with its own loop, over processes that run Python CODES; an empty one is none."""

    def __init__(
        self, folder: Path, *codes: str, hang_timeout_s: float = 0.0, **watch: float
    ) -> None:
        self.children = [
            subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
            for code in codes
            if code
        ]
        self.declared: list[Declared] = []
        self.remarks: list[str] = []
        self.loop = Loop()
        plan = a_plan(folder, len(codes), rules=Rules(hang_timeout_s=hang_timeout_s))
        self.job = plans.job(plan, log=self.remarks.append)
        records = FlightRecords(self.job, None) if hang_timeout_s else None
        self.watch = Watch(self.job, records=records, **watch)  # type: ignore[arg-type]
        for number in range(len(codes)):
            (folder / f"workerlog.{number}").touch()
        self.watch.declare = self.declared.append
        self.watch.open(self.loop)
        for number, child in enumerate(self.children):
            self.watch.on_event(Started(number, f"rank {number}", child.pid, time.monotonic()))

    def until(self, condition: Callable[[], object], seconds: float = LONG_S) -> None:
        """Turn the loop until CONDITION holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.remarks
            self.loop.turn()

    def turn_for(self, seconds: float) -> None:
        """Turn the loop for a while."""
        end = time.monotonic() + seconds
        self.loop.timer("end", end, lambda: None)
        self.until(lambda: time.monotonic() >= end)

    def close(self) -> None:
        """End everything."""
        self.watch.close()
        # A launcher does this last.
        self.loop.close()
        for child in self.children:
            child.kill()
            child.wait()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Callable[..., Room]]:
    made = []

    def make(*codes: str, **watch: float) -> Room:
        made.append(Room(tmp_path, *codes, **watch))
        return made[-1]

    yield make
    for meter in made:
        meter.close()


def test_s61_a_heartbeat_before_anybody_heard_of_the_start_counts(
    tmp_path: Path, room: Callable[..., Room]
) -> None:
    here = room(BUSY, hang_timeout_s=0.2)
    beat = tmp_path / "beat"
    beat.write_text("1")
    here.job.plan = a_plan(tmp_path, 1, env={"FLEETRUN_HEARTBEAT": str(beat)})
    here.watch.on_event(Started(0, "rank 0", here.children[0].pid, time.monotonic()))
    # A rank that reported progress and only spins since then hangs.
    here.until(lambda: here.declared)
    assert isinstance(here.declared[0], Hung)


def watched(folder: Path, **watch: object) -> Room:
    """Make a watch over a silent rank, which asks the driver of WATCH."""
    return Room(folder, IDLE, hang_timeout_s=0.2, **watch)  # type: ignore[arg-type]


def test_a_driver_that_hangs_is_said_and_the_hang_declared(tmp_path: Path) -> None:
    with closing(
        watched(
            tmp_path,
            gpus=lambda: lambda: nvml.rates(FakeNvml(init=hang), ("0",)),
            driver_s=0.3,
        )
    ) as here:
        here.until(lambda: here.declared)
    why = "Whether a GPU computes is not known: the NVIDIA driver has not answered within 0.3 s."
    assert here.remarks[0].startswith(why)
    assert isinstance(here.declared[0], Hung)
