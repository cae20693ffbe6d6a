"""Let everything go wrong that does in a cluster's life, on purpose, and see that nothing is lost.

Launches are drawn from a seed; two run at a time, beside a third job that nobody touches. After
each: nobody of it is left, nobody else was hit, the exit code is the one that the fault implies,
logs and events are valid to the last line.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_batch import Batch
from chaos_faults import FAULTS, WITHIN_S
from chaos_job import Job, Lost, alive, marked, own_mounts
from chaos_report import Result, announce, report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chaos_faults import Fault

MOST_RANKS = 8
CHILDREN = ("child", "daemon", "bare", "lost", "potato")
# Seconds of grace: long where nobody may need it, short where somebody surely does.
LONG_GRACE_S, SHORT_GRACE_S = 20.0, 0.3


class Bystander:
    """A job and a plain process that have nothing to do with the others, and must live."""

    def __init__(self, folder: Path) -> None:
        traits = ["child+daemon+bare", "child+saver"]
        self._job = Job(folder, traits, random.Random(0))
        self._job.grace_s = LONG_GRACE_S
        self._job.start()
        self._job.wait_until_ready()
        self._stranger = subprocess.Popen(["sleep", "86400"], env={"PADDLE_TRAINER_ID": "0"})
        self._pids = [*marked(self._job.mark), self._stranger.pid]

    def check(self) -> None:
        """Raise Lost if somebody was hit."""
        hit = [pid for pid in self._pids if not alive(pid)]
        if hit:
            raise Lost(f"{len(hit)} of {len(self._pids)} processes of another job were hit")

    def end(self) -> str:
        """End it; say what is wrong, if anything."""
        try:
            self.check()
            self._job.let_end()
            self._job.finish([0], WITHIN_S)
        except Lost as lost:
            return str(lost)
        finally:
            self._stranger.kill()
            self._stranger.wait()
            self._job.clear()
            shutil.rmtree(self._job.folder, ignore_errors=True)
        return ""


def main() -> int:
    """Run the launches that the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--launches", type=int, default=500, metavar="N", help="how many (500)")
    parser.add_argument(
        "--hosts", type=int, metavar="N", help="on so many hosts, which can fail, too (needs root)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="draw the same launches again")
    parser.add_argument("--seconds", type=float, metavar="LIMIT", help="start no more after that")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only this launch of the seed")
    parser.add_argument(
        "--allow", type=float, metavar="SECONDS", help="for each end, on an idle machine"
    )
    parser.add_argument("--fault", metavar="TEXT", help="only faults with TEXT in their names")
    parser.add_argument("--keep", action="store_true", help="keep the folders of lost launches")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    # Who started us in the background ignores Ctrl-C, and so would every launch.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Under nohup we go on ignoring this one, but launches must not inherit that.
    signal.signal(signal.SIGHUP, lambda *_: None)
    numbers = range(chosen.launches) if chosen.only is None else [chosen.only]
    # Jobs on several hosts need what the tests are made of.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    batch = Batch(numbers, seed, chosen.fault or "", chosen.keep, chosen.seconds)
    if chosen.hosts:
        from chaos_network import run

        return run(chosen.hosts, batch)
    is_root = own_mounts()
    faults = [
        fault
        for fault in FAULTS
        if (is_root or not fault.needs_root) and (chosen.fault or "") in fault.name
    ]
    print(f"{len(numbers)} launches, seed {seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    started = time.monotonic()
    bystander = Bystander(place / f"{place.name}-bystander")
    try:
        results = list(
            _run_all(
                place,
                seed,
                numbers,
                faults=faults,
                bystander=bystander,
                allowed_s=chosen.allow,
                seconds=chosen.seconds,
            )
        )
    finally:
        hit = bystander.end()
        if not (chosen.keep and any(place.iterdir())):
            shutil.rmtree(place, ignore_errors=True)
    return report([fault.name for fault in FAULTS], results, seed, time.monotonic() - started, hit)


def _run_all(
    place: Path,
    seed: int,
    numbers: Sequence[int],
    *,
    faults: Sequence[Fault],
    bystander: Bystander,
    allowed_s: float | None,
    seconds: float | None,
) -> Iterator[Result]:
    """Run two launches at a time; yield what became of each."""
    deadline = None if seconds is None else time.monotonic() + seconds
    counter, lock = itertools.count(1), threading.Lock()

    def run(number: int) -> Result | None:
        if deadline is not None and time.monotonic() > deadline:
            return None
        result = _run(place, seed, number, faults, bystander, allowed_s)
        with lock:
            announce(result, "", seed, f"{next(counter)} of {len(numbers)}")
        return result

    with ThreadPoolExecutor(2) as pool:
        try:
            yield from (result for result in pool.map(run, numbers) if result is not None)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def _run(  # noqa: PLR0917 - all that a launch depends on
    place: Path,
    seed: int,
    number: int,
    faults: Sequence[Fault],
    bystander: Bystander,
    allowed_s: float | None,
) -> Result:
    """Do launch NUMBER of SEED, whatever the others are."""
    draw = random.Random(f"{seed}/{number}")  # to be repeated, not to be secret
    fault = draw.choices(faults, [fault.weight for fault in faults])[0]
    folder = place / f"{place.name}-{number}"
    job = Job(folder, _traits(draw, fault), draw)
    is_deaf = any("deaf" in traits for traits in job.traits)
    job.grace_s = SHORT_GRACE_S if is_deaf and "twice" not in fault.name else LONG_GRACE_S
    try:
        if fault.prepare is not None:
            fault.prepare(job)
        job.start()
        if not fault.is_early:
            job.wait_until_ready()
        codes = fault.strike(job)
        within_s = fault.within_s if allowed_s is None else allowed_s
        if job.grace_s == SHORT_GRACE_S:
            within_s += SHORT_GRACE_S
        # Under a short grace a busy machine kills before anything can be saved.
        saves = fault.saves and job.grace_s == LONG_GRACE_S
        took_s, allowed_s = job.finish(codes, within_s, saves=saves)
        bystander.check()
    except (Lost, OSError, subprocess.SubprocessError, KeyError) as lost:
        return Result(number, fault.name, 0.0, lost=str(lost) or repr(lost))
    finally:
        job.clear()
        if fault.needs_root:
            subprocess.run(["umount", folder / "log"], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(folder, ignore_errors=True)
    return Result(number, fault.name, took_s, allowed_s)


def _traits(draw: random.Random, fault: Fault) -> list[str]:
    """Draw the ranks, and what children and manners each has."""
    ranks = draw.randint(2, MOST_RANKS)
    traits = []
    for rank in range(ranks):
        words = ["plain"]
        words += [kind for kind in CHILDREN if draw.random() < (0.02, 0.15)[kind != "potato"]]
        if draw.random() < 0.2:
            words.append("saver")
        if draw.random() < 0.1 or (rank == 0 and fault.prepare is not None):
            words.append("chatty")
        if fault.needs_deaf and draw.random() < 0.5:
            words.append("deaf")
        traits.append("+".join(words))
    if fault.needs_deaf and not any("deaf" in words for words in traits):
        traits[draw.randrange(ranks)] += "+deaf"
    return traits


if __name__ == "__main__":
    sys.exit(main())
