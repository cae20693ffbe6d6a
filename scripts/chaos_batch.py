"""One launch of scripts/chaos after the other, each drawn from the seed and its number."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chaos_job import Lost
from chaos_report import Result, announce, report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Batch(NamedTuple):
    """The launches that the command line asks for."""

    launches: Sequence[int]
    seed: int
    # Only faults with this text in their names.
    fault: str
    # Whether the folders of lost launches stay.
    keep: bool
    # Start none after so many seconds.
    seconds: float | None

    def run(
        self,
        where: str,
        options: str,
        known: Sequence[Any],
        launch: Callable[[Any, random.Random, Path], tuple[float, float]],
    ) -> int:
        """Run the launches WHERE, with OPTIONS of scripts/chaos; return the exit code.

        LAUNCH takes a fault of KNOWN, which has a `name` and a `weight`, the launch's own random
        numbers and a folder. It returns the seconds from the fault to the end, and those allowed,
        or raises Lost.
        """
        faults = [fault for fault in known if self.fault in fault.name]
        if not faults:
            print(f"scripts/chaos: no fault's name has {self.fault!r} in it", file=sys.stderr)
            return 2
        place = Path(tempfile.mkdtemp(prefix="chaos-"))
        print(f"{len(self.launches)} launches {where}, seed {self.seed}", flush=True)
        started, results = time.monotonic(), []
        try:
            for number in self.launches:
                if self.seconds is not None and time.monotonic() > started + self.seconds:
                    break
                draw = random.Random(f"{self.seed}/{number}")  # to be repeated, not to be secret
                fault = draw.choices(faults, [fault.weight for fault in faults])[0]
                try:
                    took = launch(fault, draw, place / str(number))
                    result = Result(number, fault.name, *took)
                except (Lost, OSError, subprocess.SubprocessError, KeyError, ValueError) as lost:
                    result = Result(number, fault.name, 0.0, lost=str(lost) or repr(lost))
                results.append(result)
                announce(result, f"{options} ", self.seed, str(number))
                if not (result.lost and self.keep):
                    shutil.rmtree(place / str(number), ignore_errors=True)
        finally:
            if not self.keep:
                shutil.rmtree(place, ignore_errors=True)
        names = [fault.name for fault in known]
        return report(names, results, self.seed, time.monotonic() - started)
