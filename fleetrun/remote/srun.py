"""Starts one launcher on each host of a Slurm allocation by srun, from a single process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from fleetrun.engines.detect import Detected
from fleetrun.errors import EnvironmentFault, shell_code
from fleetrun.run import libc
from fleetrun.run.policy import POLITE
from fleetrun.rundir.variables import with_token

# Meant for tasks by sbatch and salloc; older versions of srun would apply them.
_OTHERS = ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE")


def run(words: Sequence[str], allocation: Detected) -> int:
    """Run `fleetrun WORDS` on each host of ALLOCATION, and return the job's exit code."""
    srun = shutil.which("srun")
    if srun is None:
        raise EnvironmentFault(
            f"{allocation.engine} gives this job {allocation.nnodes} hosts "
            f"({allocation.sources['nnodes']}), and there is no srun here to reach the others."
        )
    options = (
        *(f"--nodes={allocation.nnodes}", f"--ntasks={allocation.nnodes}", "--ntasks-per-node=1"),
        # The launchers end each other, with grace; Slurm's exit code is then the culprit's.
        *("--kill-on-bad-exit=0", "--wait=0"),
        # The ranks may have all CPUs of the job; --bind shares them out.
        *("--cpu-bind=quiet,none", "--export=ALL"),
        # It forwards a first SIGINT, which asks the launchers to stop.
        "--disable-status",
    )
    # Blocked from here on, so that no signal is lost before the wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*POLITE, signal.SIGCHLD, signal.SIGCONT})

    def prepare() -> None:
        # The job must end with us, however we end: srun kills it on this signal.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = subprocess.Popen(
            [srun, *options, sys.executable, "-m", "fleetrun", *words],
            # Slurm passes the environment, and so the job's token, to the hosts unseen.
            env={k: v for k, v in with_token(os.environ).items() if k not in _OTHERS},
            stdin=subprocess.DEVNULL,
            # We handle Ctrl-C.
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - there are no threads
        )
        first = 0
        while process.poll() is None:
            told = signal.sigwaitinfo({*POLITE, signal.SIGCHLD})
            if told.si_signo != signal.SIGCHLD:
                if not _has_told_all(told.si_pid):
                    # srun kills its tasks at once when terminated.
                    process.send_signal(signal.SIGTERM if first else signal.SIGINT)
                first = first or told.si_signo
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 128 + first if first else shell_code(process.returncode)


def _has_told_all(pid: int) -> bool:
    """Whether PID is Slurm, which ends the job, launchers included: then CONT comes at once."""
    with suppress(OSError), open(f"/proc/{pid}/comm") as file:
        is_slurm = file.read() == "slurmstepd\n"
        return is_slurm and signal.sigtimedwait({signal.SIGCONT}, 1.0) is not None
    return False
