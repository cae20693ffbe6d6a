"""Launches of `scripts/chaos --hosts N`: on hosts that are namespaces, each with a drawn fault."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import chaos_elastic
import etcds  # pyright: ignore[reportMissingImports] - it is in tests
import lab  # pyright: ignore[reportMissingImports] - as above
from chaos_elastic import ETCD, ElasticJob, EtcdJob
from chaos_hosts import FAULTS, GRACE_S, HostsJob
from chaos_job import Lost
from chaos_pace import Pace
from chaos_paddle import FAULTS as PADDLE
from chaos_paddle import PaddleJob
from chaos_report import Result, report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chaos_hosts import Fault


def run(  # noqa: PLR0917 - what the command line says
    hosts: int,
    launches: Sequence[int],
    seed: int,
    fault: str,
    keep: bool,  # noqa: FBT001
    seconds: float | None,
) -> int:
    """Do LAUNCHES of SEED on HOSTS hosts; return the exit code."""
    reason = "network namespaces need root" if not lab.is_root() else lab.missing()
    if fault.startswith("etcd"):
        reason = reason or etcds.missing()
    if reason:
        print(f"scripts/chaos: there can be no hosts here: {reason}", file=sys.stderr)
        return 3
    # Elastic ones are asked for by that word: each takes several times as long.
    kinds = {"elastic": chaos_elastic.FAULTS, "etcd": ETCD, "paddle": PADDLE}
    known = next((of for word, of in kinds.items() if fault.startswith(word)), FAULTS)
    faults = [one for one in known if fault in one.name]
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"{len(launches)} launches on {hosts} hosts, seed {seed}", flush=True)
    started = time.monotonic()
    pace, results = Pace(), []
    try:
        for number in launches:
            if seconds is not None and time.monotonic() > started + seconds:
                break
            result = _run(place / str(number), hosts, seed, number, faults, pace)
            results.append(result)
            if result.lost:
                again = f"scripts/chaos --hosts {hosts} --seed {seed} --only {number}"
                print(f"LOST in launch {number}, {result.fault}: {result.lost}\n  again: {again}")
                sys.stdout.flush()
            elif sys.stderr.isatty():
                print(f"\r\033[K{number}: {result.fault}", end="\r", file=sys.stderr, flush=True)
            if not (result.lost and keep):
                shutil.rmtree(place / str(number), ignore_errors=True)
    finally:
        pace.end()
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
    return report([one.name for one in known], results, seed, time.monotonic() - started)


def _run(  # noqa: PLR0917 - all that a launch depends on
    folder: Path, hosts: int, seed: int, number: int, faults: Sequence[Fault], pace: Pace
) -> Result:
    draw = random.Random(f"{seed}/{number}")  # to be repeated, not to be secret
    fault = draw.choices(faults, [one.weight for one in faults])[0]
    kind = ElasticJob if fault.is_elastic else HostsJob
    if fault.has_etcd or fault.trains:
        kind = EtcdJob if fault.has_etcd else PaddleJob
    try:
        with lab.network(
            hosts + fault.has_etcd, folder, is_slow=fault.needs_slow_switch
        ) as network:
            job = kind(network, folder, fault, draw)
            try:
                job.start()
                if not fault.is_early:
                    job.wait_until_ready()
                    time.sleep(draw.uniform(0, 0.5))
                codes = fault.strike(job)
                within_s = fault.within_s + (GRACE_S if job.deaf else 0.0)
                took_s, allowed_s = job.finish(codes, within_s, pace)
            finally:
                job.clear()
    except (Lost, OSError, subprocess.SubprocessError, KeyError, ValueError) as lost:
        return Result(number, fault.name, 0.0, lost=str(lost) or repr(lost))
    return Result(number, fault.name, took_s, allowed_s)
