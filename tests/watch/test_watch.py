"""The watch over real processes: heartbeats and drivers."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import plans
from nvmls import FakeNvml, hang
from waiting import LONG_S

from fleetrun.host import nvml
from fleetrun.model import Rules
from fleetrun.run.events import Hung, Started
from fleetrun.run.loop import Loop
from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fleetrun.model import LaunchPlan
    from fleetrun.run.events import Declared

BUSY = "while True: pass"
IDLE = "import time\ntime.sleep(60)"


def a_plan(folder: Path, **changes: Any) -> LaunchPlan:
    here = str(folder)
    return plans.plan(per_node=1, cwd=here, log_dir=here, run_dir=here, **changes)


class Room:
    """A watch with its own loop, over a rank that runs Python CODE."""

    def __init__(self, folder: Path, code: str, **watch: Any) -> None:
        words = [sys.executable, "-S", "-c", code]
        self.child = subprocess.Popen(words, start_new_session=True)
        self.declared: list[Declared] = []
        self.remarks: list[str] = []
        self.loop = Loop()
        self.job = plans.job(
            a_plan(folder, rules=Rules(hang_timeout_s=0.2)), log=self.remarks.append
        )
        self.watch = Watch(self.job, records=FlightRecords(self.job, None), **watch)
        (folder / "workerlog.0").touch()
        self.watch.declare = self.declared.append
        self.watch.open(self.loop)
        self.watch.on_event(Started(0, "rank 0", self.child.pid, time.monotonic()))

    def until(self, condition: Callable[[], object]) -> None:
        """Turn the loop until CONDITION holds."""
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, self.remarks
            self.loop.turn()

    def close(self) -> None:
        """End everything."""
        self.watch.close()
        # A launcher does this last.
        self.loop.close()
        self.child.kill()
        self.child.wait()


def test_s61_a_heartbeat_before_anybody_heard_of_the_start_counts(tmp_path: Path) -> None:
    with closing(Room(tmp_path, BUSY)) as here:
        beat = tmp_path / "beat"
        beat.write_text("1")
        here.job.plan = a_plan(tmp_path, env={"FLEETRUN_HEARTBEAT": str(beat)})
        here.watch.on_event(Started(0, "rank 0", here.child.pid, time.monotonic()))
        # A rank that reported progress and only spins since then hangs.
        here.until(lambda: here.declared)
        assert isinstance(here.declared[0], Hung)


def test_a_driver_that_hangs_is_said_and_the_hang_declared(tmp_path: Path) -> None:
    def gpus() -> Callable[[], object]:
        return lambda: nvml.rates(FakeNvml(init=hang), ("0",))

    with closing(Room(tmp_path, IDLE, gpus=gpus, driver_s=0.3)) as here:
        here.until(lambda: here.declared)
    why = "Whether a GPU computes is not known: the NVIDIA driver has not answered within 0.3 s."
    assert here.remarks[0].startswith(why)
    assert isinstance(here.declared[0], Hung)
