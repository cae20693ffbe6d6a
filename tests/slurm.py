"""A real Slurm on namespace hosts: a controller on the first, a daemon on each."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lab import Host

NEEDED = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo")

CONF = """\
ClusterName=lab
SlurmctldHost={first}({address})
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=defer,batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=5
SlurmdTimeout=60
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return why this machine cannot run a Slurm, or None."""
    absent = [name for name in NEEDED if not shutil.which(name)]
    if absent:
        return f"there is no {absent[0]} here (Debian: apt install slurmctld slurmd slurm-client)"
    return None


class Slurm:
    """A Slurm of HOSTS, with its files in FOLDER."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self._hosts = hosts
        folder.mkdir()
        self._conf = folder / "slurm.conf"
        nodes = [
            f"NodeName={host.name} NodeAddr={host.ip} CPUs=4 RealMemory=1000" for host in hosts
        ]
        first = hosts[0]
        text = CONF.format(
            first=first.name, address=first.ip, folder=folder, nodes="\n".join(nodes)
        )
        self._conf.write_text(text)

    def command(self, *words: str) -> list[str]:
        """Return the command that runs WORDS on the first host, as its users would."""
        return self._hosts[0].command(["env", f"SLURM_CONF={self._conf}", *words])

    def run(
        self, *words: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run WORDS to their end on the first host."""
        command = self.command(*words)
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def start(self) -> None:
        """Start its daemons, and wait until all hosts are idle."""
        daemons = [["slurmctld", "-i"], *[["slurmd"] for _ in self._hosts]]
        for host, daemon in zip((self._hosts[0], *self._hosts), daemons, strict=True):
            host.run(*daemon, "-f", str(self._conf))
        idle = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"]
        until(lambda: self.run(*idle).stdout.split() == ["idle"] * len(self._hosts))
