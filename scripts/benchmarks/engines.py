"""`scripts/bench nodes --engine E`: from the command to the first line of every rank.

Beside it the engine alone starts the same worker on the same hosts, which are network namespaces of
this machine with a real sshd, Slurm or Open MPI; and as many fleetruns start it there that know of
no engine and of no other.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import processes
import report
from peers import FLEETRUN, OURS, ROOT
from processes import WORKER, Failed
from report import ms, spread, summary

sys.path.insert(0, str(ROOT / "tests"))

import lab
import slurm
import sshd_hosts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

BARE, APART, OUR = "the engine alone", "launches apart", "fleetrun"
_TURN = (BARE, APART, OUR)
# Others that start a command on many hosts by ssh, where they are installed.
_STARTERS = ("pdsh", "clush")
# As many hosts at once.
_FANOUT = "64"
_NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
_PYTHON = (sys.executable, "-S", WORKER)


def missing(engine: str) -> str | None:
    """Say what keeps this machine from having ENGINE, or None."""
    if engine == "slurm":
        return slurm.missing()
    if not sshd_hosts.SSHD:
        return "there is no sshd (Debian: apt install openssh-server)"
    if engine == "mpi" and not shutil.which("mpirun.openmpi"):
        return "there is no mpirun.openmpi (Debian: apt install openmpi-bin)"
    return None


def turns(engine: str) -> tuple[str, ...]:
    """Return what is measured beside ENGINE."""
    starters = (
        [starter for starter in _STARTERS if shutil.which(starter)] if engine == "ssh" else []
    )
    return (*_TURN, *starters)


class Hosts:
    """HOSTS with what ENGINE needs, and the pipe on which workers say when they came."""

    def __init__(self, engine: str, hosts: Sequence[lab.Host], folder: Path) -> None:
        self._engine = engine
        self._hosts = hosts
        self._reports = processes.Reports(folder)
        self._reports.release()
        told = {**self._reports.env, **OURS}
        told["PYTHONPATH"] = str(ROOT)
        with processes.place() as (_, base):
            self._env = {**base, **told}
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            self._env[name] = "1"
        self._cluster: slurm.Slurm | None = None
        self._ssh = Path()
        if engine == "slurm":
            cluster = slurm.Slurm(hosts, folder / "slurm")
            cluster.start()
            self._cluster = cluster
        else:
            self._ssh = sshd_hosts.on_hosts(hosts, folder / "keys", **told)

    def commands(self, name: str) -> list[list[str]]:
        """Return what is started side by side to run the worker on each host."""
        ips, first = [host.ip for host in self._hosts], self._hosts[0]
        ours = (*FLEETRUN, "--nproc_per_node=1")
        if name == APART:
            return [host.command([*ours, WORKER]) for host in self._hosts]
        listed = f"--ips={','.join(ips)}"
        if self._engine == "ssh":
            ssh = ("ssh", "-F", str(self._ssh))
            if name == BARE:
                return [first.command([*ssh, ip, " ".join(_PYTHON)]) for ip in ips]
            if name in _STARTERS:
                return [first.command(self._by_starter(name, ips))]
            by_ssh = (f"--hosts={','.join(ips)}", f"--ssh={' '.join(ssh)}")
            return [first.command([*ours, *by_ssh, WORKER])]
        if self._cluster is not None:
            srun = ("srun", f"--nodes={len(ips)}", "--ntasks-per-node=1")
            return [self._cluster.command(*srun, *(_PYTHON if name == BARE else (*ours, WORKER)))]
        mpirun = (
            *("mpirun.openmpi", "--mca", "plm_rsh_agent", f"ssh -F {self._ssh}"),
            *("--mca", "oob_tcp_if_include", "eth0", "-H", ",".join(ips), "-N", "1"),
        )
        own = () if len(ips) == 1 else (listed,)
        return [first.command([*mpirun, *(_PYTHON if name == BARE else (*ours, *own, WORKER))])]

    def _by_starter(self, name: str, ips: Sequence[str]) -> list[str]:
        """Return the command by which the program NAME runs the worker on IPS."""
        own = {
            "pdsh": ("env", f"PDSH_SSH_ARGS_APPEND=-F {self._ssh}", "pdsh", "-R", "ssh"),
            "clush": ("clush", "-o", f"-F {self._ssh}"),
        }
        return [*own[name], "-S", "-f", _FANOUT, "-w", ",".join(ips), " ".join(_PYTHON)]

    def measure(self, name: str) -> float:
        """Return the seconds from the command to the last worker's first line."""
        began = time.monotonic()
        started = [
            subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for command in self.commands(name)
        ]
        firsts = self._reports.hear("first", len(self._hosts), started)
        ends = [launcher.communicate(timeout=processes.TIMEOUT_S)[1] for launcher in started]
        codes = [launcher.returncode for launcher in started]
        if len(firsts) < len(self._hosts) or any(codes):
            raise Failed(f"{len(firsts)} ranks came, exit codes {codes}: {ends[0][-300:]!r}")
        return max(firsts) - began

    def close(self) -> None:
        """Close the pipe; the hosts end the rest."""
        self._reports.close()


@contextmanager
def many_neighbours(hosts: int) -> Iterator[None]:
    """Let the kernel know the neighbours of all HOSTS at once: it is one for all namespaces."""
    before = _NEIGHBOURS.read_text()
    try:
        _NEIGHBOURS.write_text(str(max(int(before), 2 * hosts**2)))
        yield
    finally:
        _NEIGHBOURS.write_text(before)


def run(chosen: argparse.Namespace) -> int:
    """Measure, show, and write what CHOSEN says."""
    reason = missing(chosen.engine)
    if reason:
        print(f"scripts/bench: {reason}", file=sys.stderr)
        return 3
    machine = report.machine()
    print(f"{machine['cpus']} cores, load {machine['load_before']:.1f} before\n")
    times_by_hosts: dict[int, dict[str, list[float]]] = {}
    names = turns(chosen.engine)
    for number in chosen.hosts:
        times: dict[str, list[float]] = defaultdict(list)
        with (
            tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name,
            many_neighbours(number),
            lab.hosts(number, Path(name)) as made,
        ):
            hosts = Hosts(chosen.engine, made, Path(name))
            for turn, which in report.in_turns(chosen.rounds, names):
                report.progress(f"{number} hosts, round {turn}: {which}")
                times[which].append(hosts.measure(which))
            hosts.close()
        times_by_hosts[number] = times
    report.progress("")
    _show(chosen.engine, names, times_by_hosts, chosen.rounds)
    rows = [{"hosts": number, **times} for number, times in times_by_hosts.items()]
    report.write(chosen, {"machine": machine, "engine": chosen.engine, "seconds": rows})
    return 0


def _show(
    engine: str,
    names: Sequence[str],
    by_hosts: Mapping[int, Mapping[str, Sequence[float]]],
    rounds: int,
) -> None:
    rows = []
    for number, times in by_hosts.items():
        bare, apart, ours = (summary(times[which]) for which in _TURN)
        both = bare.median + apart.median
        more = [ms(ours.median - bare.median), f"{ours.median / both:.2f} x"]
        rows.append([str(number), *(spread(summary(times[which])) for which in names), *more])
    title = f"{engine}: command to the last first line; median (lowest-highest) of {rounds}, ms"
    print(report.table(title, ["hosts", *names, "more than alone", "of both"], rows))
