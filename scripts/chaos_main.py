"""Let everything go wrong that does in a cluster's life, on purpose, and see that nothing is lost.

Launches are drawn from a seed. On one host a job and a process run beside them that nobody touches.
After each launch: nobody of it is left, nobody else was hit, the exit code is the one that the
fault implies and comes in time, logs and events are valid to the last line. With --hosts, hosts
are network namespaces of this machine, which crash and lose their cables, too.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from chaos_faults import FAULTS, Fault
from chaos_job import Job, Lost, alive, await_, marked, slack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import chaos_hosts
import etcds
import lab

Prepare = Callable[[Any, random.Random, Path], AbstractContextManager[Any]]


class Result(NamedTuple):
    """What became of one launch."""

    fault: str
    took_s: float = 0.0
    allowed_s: float = 1.0
    lost: str = ""


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
    parser.add_argument("--fault", default="", metavar="TEXT", help="only faults with that name")
    parser.add_argument("--keep", action="store_true", help="keep the folders of lost launches")
    chosen = parser.parse_args()
    # Who started us in the background ignores Ctrl-C, and so would every launch.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Under nohup we go on ignoring this one, but launches must not inherit that.
    signal.signal(signal.SIGHUP, lambda *_: None)
    if chosen.hosts:
        return _on_hosts(chosen)
    with tempfile.TemporaryDirectory(prefix="chaos-bystander-") as name:
        bystander = Bystander(Path(name))

        @contextmanager
        def prepare(fault: Fault, draw: random.Random, folder: Path) -> Iterator[Job]:
            yield Job(folder, fault, draw)
            bystander.check()

        try:
            return run(chosen, FAULTS, prepare)
        finally:
            bystander.end()


def _on_hosts(chosen: argparse.Namespace) -> int:
    reason = "network namespaces need root" if not lab.is_root() else lab.missing()
    if chosen.fault.startswith("etcd"):
        reason = reason or etcds.missing()
    if reason:
        print(f"scripts/chaos: there can be no hosts here: {reason}", file=sys.stderr)
        return 3
    # Those on elastic jobs are asked for by that word: each takes several times as long.
    word = next((word for word in ("elastic", "etcd") if chosen.fault.startswith(word)), "")
    known = [
        fault
        for fault in chaos_hosts.FAULTS
        if fault.name.startswith(word) and fault.is_elastic == bool(word)
    ]
    return run(chosen, known, lambda *launch: chaos_hosts.prepared(chosen.hosts, *launch))


def run(chosen: argparse.Namespace, known: Sequence[Any], prepare: Prepare) -> int:
    """Run one launch after the other, each drawn from the seed and its number; return the code."""
    faults = [fault for fault in known if chosen.fault in fault.name]
    if not faults:
        print(f"scripts/chaos: no fault's name has {chosen.fault!r} in it", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    numbers = range(chosen.launches) if chosen.only is None else [chosen.only]
    print(f"{len(numbers)} launches, seed {seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    started, results = time.monotonic(), []
    try:
        for number in numbers:
            if chosen.seconds is not None and time.monotonic() > started + chosen.seconds:
                break
            draw = random.Random(f"{seed}/{number}")  # to be repeated, not to be secret
            fault = draw.choices(faults, [fault.weight for fault in faults])[0]
            folder = place / f"{place.name}-{number}"
            try:
                with prepare(fault, draw, folder) as job:
                    result = _launch(job, fault, chosen.allow)
            except (Lost, OSError, subprocess.SubprocessError, KeyError, ValueError) as lost:
                result = Result(fault.name, lost=str(lost) or repr(lost))
                print(f"LOST in launch {number}, {fault.name}: {result.lost}")
                where = f" --hosts {chosen.hosts}" * bool(chosen.hosts)
                print(f"  again: scripts/chaos{where} --seed {seed} --only {number}", flush=True)
            results.append(result)
            if not (result.lost and chosen.keep):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        if not chosen.keep:
            shutil.rmtree(place, ignore_errors=True)
    return _report(known, results, seed, time.monotonic() - started)


def _launch(job: Any, fault: Any, allow_s: float | None) -> Result:
    """Let FAULT happen to JOB, and see the end."""
    try:
        job.start()
        if not fault.is_early:
            job.wait_until_ready()
        codes = fault.strike(job)
        took_s = job.finish(codes)
        within_s = (fault.within_s if allow_s is None else allow_s) + job.more_s
        allowed_s = within_s * slack()
        if took_s > allowed_s:
            raise Lost(f"it ended {took_s:.1f} s after the fault, {allowed_s:.1f} s are allowed")
        return Result(fault.name, took_s, allowed_s)
    finally:
        job.clear()


def _report(known: Sequence[Any], results: Sequence[Result], seed: int, seconds: float) -> int:
    """Print what was tried, how long it took and what was lost; return the exit code."""
    print(
        f"\n  {'fault':32} {'tried':>5} {'lost':>5}  from fault to end, ms: min median max, "
        "and the most of its bound"
    )
    for name in [fault.name for fault in known]:
        mine = [result for result in results if result.fault == name]
        ended = [result for result in mine if not result.lost]
        times = ""
        if ended:
            took = [result.took_s * 1000 for result in ended]
            most = max(result.took_s / (result.allowed_s or 1) for result in ended)
            times = f"{min(took):6.0f} {median(took):6.0f} {max(took):6.0f} {most:5.0%}"
        if mine:
            print(f"  {name:32} {len(mine):5} {len(mine) - len(ended):5}  {times}")
    count = sum(bool(result.lost) for result in results)
    print(f"\n{len(results)} launches in {seconds:.0f} s, seed {seed}: {count or 'nothing'} lost")
    return 1 if count else 0


class Bystander:
    """A job and a plain process that have nothing to do with the others, and must live."""

    def __init__(self, place: Path) -> None:
        self._job = Job(place / place.name, FAULTS[0], random.Random(0))
        self._job.traits = ["child+daemon+bare", "child+saver"]
        self._job.start()
        self._job.wait_until_ready()
        # The launcher asks git for the commit; that process ends by itself.
        mark = self._job.mark
        await_("git answers", lambda: not any(w.startswith("git ") for w in marked(mark).values()))
        self._stranger = subprocess.Popen(["sleep", "86400"], env={"PADDLE_TRAINER_ID": "0"})
        self._processes = {**marked(mark), self._stranger.pid: "sleep"}

    def check(self) -> None:
        """Raise Lost if somebody was hit."""
        hit = {pid: words for pid, words in self._processes.items() if not alive(pid)}
        if hit:
            raise Lost(f"these of another job were hit: {hit}; {self._job.printed()}")

    def end(self) -> None:
        """End it."""
        self._stranger.kill()
        self._stranger.wait()
        self._job.clear()


if __name__ == "__main__":
    sys.exit(main())
