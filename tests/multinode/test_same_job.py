"""The same job by each engine: the same ranks, the same environment but for names, one verdict."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, NamedTuple

import pytest
import sshd
from checkout import ROOT
from processes import MARKER, assert_no_survivors
from slurm import Slurm, missing
from waiting import TRAINING_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lab import Host

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

EACH = 2
FLEETRUN = (sys.executable, "-m", "fleetrun", "--quiet")
IPS = "--ips=10.88.0.1,10.88.0.2"
BOTH = f"--nproc_per_node={EACH}"
# Writes down its environment, and fails if told to.
DUMP = 'env > "$1/env.$PADDLE_TRAINER_ID"; [ "$PADDLE_TRAINER_ID" != "$2" ] || exit 7\n'
# The variables that ranks get from fleetrun, except those of a single run.
TOLD = ("PADDLE_", "FLAGS_", "GLOO_", "NCCL_", "OMP_")
OWN = ("_PORT", "_JOB", "_JOB_ID", "_LOG", "_DIR", "_PATH")


class Way(NamedTuple):
    """How a job is started on the first host; {ssh} is ssh's file. `engine`: what it needs."""

    engine: str
    words: tuple[str, ...]
    options: tuple[str, ...] = ()


OPEN_MPI = (
    *("mpirun.openmpi", "--mca", "plm_rsh_agent", "ssh -F {ssh}"),
    *("--mca", "oob_tcp_if_include", "eth0", "-x", "PYTHONPATH", "-x", MARKER),
)
WAYS = {
    "ssh": Way("sshd", (), ("--hosts=10.88.0.1:2,10.88.0.2:2", "--ssh=ssh -F {ssh}")),
    "Slurm, a task for each rank": Way("slurm", ("srun", "--nodes=2", "--ntasks-per-node=2")),
    "Open MPI, a task for each rank": Way(
        "mpirun.openmpi", (*OPEN_MPI, "-H", "10.88.0.1:2,10.88.0.2:2", "-n", "4"), (IPS,)
    ),
}


class Hosts:
    """Two hosts with everything that ENGINE needs to start jobs."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path, engine: str) -> None:
        self._hosts = hosts
        self._marker = uuid.uuid4().hex
        self._shown = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: self._marker}
        self._ssh = folder / "keys" / "ssh_config"
        self._cluster: Slurm | None = None
        if engine == "slurm":
            self._cluster = Slurm(hosts, folder / "slurm")
            self._cluster.start()
            return
        sshd.on_hosts(hosts, folder / "keys", **self._shown)

    def run(self, way: Way, script: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run SCRIPT by WAY; no process may be left."""
        words = (*way.words, *FLEETRUN, *way.options, *script)
        words = tuple(word.format(ssh=self._ssh) for word in words)
        start = self._hosts[0].command if self._cluster is None else self._command
        root = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        done = subprocess.run(
            start(words),
            env={**os.environ, **self._shown, **root},
            capture_output=True,
            text=True,
            check=False,
            timeout=TRAINING_S,
        )
        assert_no_survivors(self._marker)
        return done

    def _command(self, words: Sequence[str]) -> list[str]:
        assert self._cluster is not None
        return self._cluster.command(*words)

    def by_hand(self, script: Sequence[str]) -> list[int]:
        """Run SCRIPT by a launcher on each host, and return their exit codes."""
        env = {**os.environ, **self._shown}
        started = [host.start(*FLEETRUN, IPS, BOTH, *script, env=env) for host in self._hosts]
        return [launcher.wait(TRAINING_S) for launcher in started]


def hosts_for(way: Way, hosts: tuple[Host, Host], folder: Path) -> Hosts:
    """Return HOSTS with what WAY needs; skips where that is not here."""
    if way.engine == "slurm":
        reason = missing()
    else:
        is_here = shutil.which(way.engine) and sshd.SSHD
        reason = None if is_here else f"there is no {way.engine} or no sshd here"
    if reason is not None:
        pytest.skip(reason)
    return Hosts(hosts, folder, way.engine)


def environments(folder: Path) -> dict[int, dict[str, str]]:
    """Return each rank's variables, except ports, host names and paths of the run."""
    by_rank = {}
    for path in sorted(folder.glob("env.*")):
        text = re.sub(r"10\.88\.0\.(\d)|node-(\d)", r"host\1\2", path.read_text())
        text = re.sub(r"(?<=host\d:)\d+", "PORT", text)
        pairs = (line.partition("=") for line in text.splitlines())
        by_rank[int(path.suffix[1:])] = {
            name: value
            for name, _, value in pairs
            if name.startswith(TOLD) and not name.endswith(OWN)
        }
    return by_rank


@pytest.mark.parametrize("way", [pytest.param(way, id=name) for name, way in WAYS.items()])
def test_ranks_are_told_the_same_and_the_code_is_that_of_the_first_to_fail(
    way: Way, two_hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    hosts = hosts_for(way, two_hosts, tmp_path)
    for name in ("dump", "hand"):
        (tmp_path / name).mkdir()
    script = tmp_path / "rank.sh"
    script.write_text(DUMP)
    done = hosts.run(way, ("sh", str(script), str(tmp_path / "dump")))
    assert done.returncode == 0, done.stderr
    assert hosts.by_hand(("sh", str(script), str(tmp_path / "hand"))) == [0, 0]
    by_engine, by_hand = environments(tmp_path / "dump"), environments(tmp_path / "hand")
    assert list(by_hand) == [0, 1, 2, 3]
    for rank, told in by_hand.items():
        assert by_engine[rank].items() ^ told.items() == set()
    failed = hosts.run(way, ("sh", str(script), str(tmp_path / "dump"), "3"))
    assert failed.returncode == 7, failed.stderr
    assert "rank 3 exited with 7" in failed.stderr.lower()
