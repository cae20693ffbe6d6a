"""Measures allreduces of two ranks here, or of one on each host, and judges them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok
from fleetrun.plan import kinds
from fleetrun.text import format_size

# Importing Paddle takes a busy host half a minute; longer means a hang.
_ALLREDUCE_S = 180.0
_LAST_LINES = 3


class Transfer(NamedTuple):
    """Allreduces of one size: bytes, seconds of each, and whether the sums were correct."""

    nbytes: int
    seconds: float
    is_right: bool


class Measurement(NamedTuple):
    """The allreduces of some ranks."""

    backend: str
    ranks: int
    rows: tuple[Transfer, ...] = ()
    # Why there are no rows: the job's exit and its last words.
    trouble: str = ""

    def bandwidth(self, row: Transfer) -> float:
        """Return the bandwidth of each rank's link in ROW, in bytes per second.

        As NCCL's tests count it: a ring allreduce moves 2 (n - 1) / n of the data over each link.
        """
        return row.nbytes * 2 * (self.ranks - 1) / self.ranks / row.seconds


def measure(job: CheckedJob) -> Measurement:
    """Launch ranks that sum numbers; return their measurement, or why there is none."""
    planned = Measurement(kinds.backends(job.kind)[0], max(len(job.members), 2))
    if job.roster is None:
        return planned._replace(trouble="the job cannot be planned; see above")
    if job.log is not None:
        job.log("Measuring allreduces: ranks import Paddle, which takes some seconds.")
    program = Path(__file__).parents[1] / "inject" / "allreduce_check.py"
    # A folder without a config file.
    with tempfile.TemporaryDirectory(prefix="fleetrun-doctor-") as folder:
        out = Path(folder) / "measured.json"
        words = [*_options(job), f"--log_dir={folder}/log", "--quiet", str(program), str(out)]
        with subprocess.Popen(
            [sys.executable, "-m", "fleetrun", *words],
            cwd=folder,
            env=dict(job.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as launcher:
            try:
                output = launcher.communicate(timeout=_ALLREDUCE_S)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                return planned._replace(trouble=f"no result within {_ALLREDUCE_S:g} s")
            finally:
                # It ends its ranks.
                launcher.terminate()
        if launcher.returncode:
            lines = [line for line in output.splitlines() if line.startswith("fleetrun: ")]
            last = "; ".join(line.removeprefix("fleetrun: ") for line in lines[:_LAST_LINES])
            return planned._replace(trouble=f"exit code {launcher.returncode} ({last})")
        try:
            told = json.loads(out.read_text(encoding="utf-8"))
        except FileNotFoundError:
            # Rank 0 is on another host.
            return planned
    rows = tuple(Transfer(*row) for row in told["rows"])
    return Measurement(told["backend"], told["ranks"], rows)


def _options(job: CheckedJob) -> Sequence[str]:
    """Return the launch options of the measuring ranks, which resemble JOB's."""
    words = [f"--env={name}={value}" for name, value in job.request.env]
    words += [f"--nccl={name}={value}" for name, value in job.request.nccl]
    if job.roster is not None and job.has_peers:
        me = job.members[job.roster.me]
        words.append(f"--ips={','.join(member.host for member in job.members)}")
        words += [f"--start_port={min(me.ports)}", f"--host={me.host}", "--nproc_per_node=1"]
        return [*words, f"--{job.kind}s={job.devices[0]}"] if job.devices else words
    if len(job.devices) > 1:
        return [*words, f"--{job.kind}s={','.join(job.devices[:2])}"]
    # NCCL does not connect two ranks on one GPU.
    return [*words, "--nproc_per_node=2", "--device_kind=cpu"]


def judge(measured: Measurement) -> Finding:
    """Judge the results, latency and bandwidth of MEASURED."""
    check, backend = "allreduce", measured.backend
    if measured.trouble:
        return error(
            check,
            f"two ranks could not run it: {measured.trouble}",
            "no training with several ranks will work here",
            "fleetrun --nproc_per_node=2 --tee=all run_check",
        )
    if not measured.rows:
        seen = f"{measured.ranks} ranks ran it over {backend}; rank 0's host has the times"
        return ok(check, seen)
    wrong = [row for row in measured.rows if not row.is_right]
    if wrong:
        return error(
            check,
            f"the sum of {format_size(wrong[0].nbytes)} over {backend} is wrong",
            "training here gives wrong results, too",
            "nvidia-smi -q -d ECC; --nccl P2P_DISABLE=1  # is the sum right then?",
        )
    first, best = measured.rows[0], max(measured.rows, key=measured.bandwidth)
    seen = (
        f"right over {backend}: {first.seconds * 1e6:.0f} us for {format_size(first.nbytes)}, "
        f"{rate(measured.bandwidth(best))} at {format_size(best.nbytes)}"
    )
    return ok(check, seen)


def rate(bytes_s: float) -> str:
    """Return a bandwidth as text.

    >>> rate(1.34e9)
    '1.34 GB/s'
    """
    return f"{bytes_s / 1e9:.3g} GB/s"
