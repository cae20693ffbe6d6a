"""Starts one launcher on each host of a Slurm allocation by srun, from a single process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from fleetrun.engines.detect import Detected
from fleetrun.errors import EnvironmentFault, shell_code
from fleetrun.run import libc
from fleetrun.rundir.variables import with_token

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Meant for tasks by sbatch and salloc; older versions of srun would apply them.
_OTHERS = ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE")
_QUERY_S = 20.0


def command(words: Sequence[str], nodes: int, name: str) -> list[str]:
    """Return the srun that runs `fleetrun WORDS` once on each of NODES hosts, as the step NAME."""
    options = (
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--job-name={name}"),
        # The launchers end each other, with grace; Slurm's exit code is then the culprit's.
        *("--kill-on-bad-exit=0", "--wait=0"),
        # The ranks may have all CPUs of the job; --bind shares them out.
        *("--cpu-bind=quiet,none", "--export=ALL"),
    )
    return ["srun", *options, sys.executable, "-m", "fleetrun", *words]


def run(words: Sequence[str], allocation: Detected) -> int:
    """Run the launchers of ALLOCATION to their end, and return the job's exit code."""
    if shutil.which("srun") is None:
        raise EnvironmentFault(
            f"{allocation.engine} gives this job {allocation.nnodes} hosts "
            f"({allocation.sources['nnodes']}), and there is no srun here to reach the others."
        )
    name = f"fleetrun-{os.getpid()}"
    job = allocation.sources["job"].value if "job" in allocation.sources else ""
    # Blocked from here on, so that no signal is lost before the wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_CAUGHT, signal.SIGCHLD})

    def prepare() -> None:
        # The job must end with us, however we end: srun kills it on this signal.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = subprocess.Popen(
            command(words, allocation.nnodes or 1, name),
            # Slurm passes the environment, and so the job's token, to the hosts unseen.
            env={k: v for k, v in with_token(os.environ).items() if k not in _OTHERS},
            stdin=subprocess.DEVNULL,
            # We handle Ctrl-C: srun would ask for a second one.
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - there are no threads
        )
        signum = None
        while process.poll() is None:
            number = signal.sigwait({*_CAUGHT, signal.SIGCHLD})
            if number != signal.SIGCHLD:
                is_first, signum = signum is None, signum or number
                if not (is_first and _stop(job, name)):
                    # srun kills its tasks at once.
                    process.terminate()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = process.returncode
    return 128 + signum if signum is not None else shell_code(code)


def _stop(job: str, name: str) -> bool:
    """Ask the launchers in the step NAME of JOB to stop; False if that is not possible."""
    query = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S, check=False)
        steps = [line.split()[0] for line in done.stdout.splitlines() if line.split()[1:] == [name]]
        if not steps:
            return False
        cancel = ["scancel", "--signal=TERM", steps[0]]
        return not subprocess.run(cancel, timeout=_QUERY_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False
