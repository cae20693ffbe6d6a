"""Launches of `scripts/chaos --hosts N`: on hosts that are namespaces, each with a drawn fault."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import chaos_elastic
import etcds
import lab
from chaos_elastic import ETCD, ElasticJob, EtcdJob
from chaos_hosts import FAULTS, GRACE_S, HostsJob

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from chaos_batch import Batch
    from chaos_hosts import Fault


def run(hosts: int, batch: Batch) -> int:
    """Do the launches of BATCH on HOSTS hosts; return the exit code."""
    reason = "network namespaces need root" if not lab.is_root() else lab.missing()
    if batch.fault.startswith("etcd"):
        reason = reason or etcds.missing()
    if reason:
        print(f"scripts/chaos: there can be no hosts here: {reason}", file=sys.stderr)
        return 3
    # Elastic ones are asked for by that word: each takes several times as long.
    kinds = {"elastic": chaos_elastic.FAULTS, "etcd": ETCD}
    known = next((kinds[word] for word in kinds if batch.fault.startswith(word)), FAULTS)

    def launch(fault: Fault, draw: random.Random, folder: Path) -> tuple[float, float]:
        return _launch(hosts, fault, draw, folder)

    return batch.run(f"on {hosts} hosts", f"--hosts {hosts}", known, launch)


def _launch(hosts: int, fault: Fault, draw: random.Random, folder: Path) -> tuple[float, float]:
    kind = ElasticJob if fault.is_elastic else HostsJob
    if fault.has_etcd:
        kind = EtcdJob
    with lab.network(hosts + fault.has_etcd, folder, is_slow=fault.needs_slow_switch) as network:
        job = kind(network, folder, fault, draw)
        try:
            job.start()
            if not fault.is_early:
                job.wait_until_ready()
                time.sleep(draw.uniform(0, 0.5))
            codes = fault.strike(job)
            return job.finish(codes, fault.within_s + (GRACE_S if job.deaf else 0.0))
        finally:
            job.clear()
