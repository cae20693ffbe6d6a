"""`scripts/chaos --engine ssh|slurm --hosts N`: jobs started by an engine, of which anything fails.

The hosts are network namespaces with a real sshd or a real Slurm, the ranks are shells. After each
launch the exit code is the culprit's, and nobody of it is left on any host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lab  # pyright: ignore[reportMissingImports] - it is in tests
import slurm  # pyright: ignore[reportMissingImports] - as above
import sshd_hosts  # pyright: ignore[reportMissingImports] - as above
from chaos_hosts import GRACE_S, RANK
from chaos_job import Lost, await_, marked
from waiting import patient  # pyright: ignore[reportMissingImports] - as above

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from chaos_batch import Batch

    Strike = Callable[["EngineJob"], Sequence[int]]

ROOT = Path(__file__).parents[1]

MARK = "CHAOS_MARK"
TIMEOUT_S = 240.0
# fleetrun's own, as a busy machine stops a host for longer than a short one.
HEARTBEAT_TIMEOUT_S = 10.0
ANY_FAILURE = range(1, 256)
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
FLEETRUN = (sys.executable, "-m", "fleetrun", "--quiet")
_PREFIXES = ("CUDA_VISIBLE", "PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "FLEETRUN_", "SLURM_", "SSH_")


class Fault(NamedTuple):
    """A fault: `strike` does it at a random moment, and returns the exit codes that it implies."""

    name: str
    strike: Strike
    weight: int = 2
    # Below these engines; "": below all.
    engine: str = ""
    is_early: bool = False


class EngineJob:
    """A launch by ENGINE on HOSTS; every random choice is drawn from DRAW."""

    def __init__(
        self, engine: str, hosts: Sequence[lab.Host], folder: Path, draw: random.Random
    ) -> None:
        self.engine = engine
        self.hosts = hosts
        self.folder = folder
        self.draw = draw
        self.mark = f"chaos-{uuid.uuid4().hex}"
        self.ranks_per_host = draw.randint(1, 2)
        self.ranks = range(len(hosts) * self.ranks_per_host)
        # Slurm: from the allocation's shell, one task on each host, or one for each rank.
        ways = ("shell", "host", "rank") if engine == "slurm" else ("there", "sent", "sent")
        self.way = draw.choice(ways)
        # What --ship sends is kept there.
        self.sent = folder / "sent"
        self.cluster: slurm.Slurm
        self.ssh: Path
        self.process: subprocess.Popen[bytes]
        self.has_started = False
        self.has_crashed = False

    def prepare(self) -> None:
        """Start the daemons of the engine."""
        (self.folder / "rank.sh").write_text(RANK)
        for rank in self.ranks:
            os.mkfifo(self.folder / f"orders.{rank}")
        self.sent.mkdir()
        if self.engine == "ssh":
            shown = {"TMPDIR": str(self.sent), "CUDA_VISIBLE_DEVICES": "", MARK: self.mark}
            if self.way == "there":
                shown["PYTHONPATH"] = str(ROOT)
            self.ssh = sshd_hosts.on_hosts(self.hosts, self.folder / "keys", **shown)
        else:
            self.cluster = slurm.Slurm(self.hosts, self.folder / "slurm")
            self.cluster.start()

    def start(self) -> None:
        """Start the launch on the first host, as its user would."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), MARK: self.mark}
        options = (f"--grace={GRACE_S}", f"--heartbeat_timeout={patient(HEARTBEAT_TIMEOUT_S)}")
        options += ("--rdzv_timeout=120",)
        script = ("sh", str(self.folder / "rank.sh"), str(self.folder), "")
        if self.engine == "ssh":
            ips = ",".join(f"{host.ip}:{self.ranks_per_host}" for host in self.hosts)
            options += (f"--hosts={ips}", f"--ssh=ssh -F {self.ssh}")
            options += ("--ship",) if self.way == "sent" else ()
            command = self.hosts[0].command([*FLEETRUN, *options, *script])
        else:
            number = f"--nodes={len(self.hosts)}"
            before = {
                "shell": ("salloc", number),
                "host": ("srun", number, "--ntasks-per-node=1"),
                "rank": ("srun", number, f"--ntasks-per-node={self.ranks_per_host}"),
            }[self.way]
            own = () if self.way == "rank" else (f"--nproc_per_node={self.ranks_per_host}",)
            command = self.cluster.command(*before, *FLEETRUN, *options, *own, *script)
        with (self.folder / "output").open("wb") as output:
            self.has_started = True
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def wait_until_ready(self) -> None:
        """Wait until every rank is there."""
        files = [self.folder / f"ready.{rank}" for rank in self.ranks]

        def ready() -> bool:
            if self.process.poll() is not None:
                raise Lost(f"it ended with {self.process.returncode}: {self.printed()}")
            return all(file.exists() for file in files)

        await_("all ranks are ready", ready, TIMEOUT_S)

    def order(self, rank: int, code: int) -> None:
        """Let RANK end with CODE."""
        fd = os.open(self.folder / f"orders.{rank}", os.O_RDWR)
        os.write(fd, b"%d\n" % code)
        os.close(fd)

    def let_end(self) -> None:
        """Let all ranks end well."""
        for rank in self.draw.sample(self.ranks, len(self.ranks)):
            self.order(rank, 0)

    def processes(self, program: str, *words: str) -> list[int]:
        """Return the processes of this launch that run PROGRAM with all of WORDS, oldest first.

        Those that one of them has forked do not count.
        """
        pids = {
            pid
            for pid, line in marked(self.mark).items()
            if line.startswith(f"{program} ") and all(word in line for word in words)
        }
        return sorted(pid for pid in pids if _parent(pid) not in pids)

    def strike(self, signum: int, program: str, *words: str) -> None:
        """Send SIGNUM to one process of this launch that runs PROGRAM with all of WORDS."""
        pids = self.processes(program, *words)
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self.draw.choice(pids), signum)

    def tell_front(self, signum: int) -> None:
        """Send SIGNUM to what the user has started: the head, the shell's fleetrun, or srun."""
        words = ("srun",) if self.is_step else (sys.executable, "-m fleetrun")
        await_("there is somebody to be told", lambda: self._has_ended or self.processes(*words))
        for pid in self.processes(*words)[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    @property
    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_step(self) -> bool:
        """Whether the user has started it by srun."""
        return self.engine == "slurm" and self.way != "shell"

    @property
    def codes_after_kill(self) -> Sequence[int]:
        """What may follow where the front is killed: salloc then ends with 0 (salloc.c)."""
        is_shell = self.engine == "slurm" and self.way == "shell"
        return range(256) if is_shell else ANY_FAILURE

    def cancel(self, *options: str) -> None:
        """Cancel the job by Slurm's own command."""
        for job in self.cluster.run("squeue", "--noheader", "--format=%i").stdout.split():
            self.cluster.run("scancel", *options, job)

    def printed(self) -> str:
        """Return all that was shown."""
        return (self.folder / "output").read_text(errors="replace")[-3000:]

    def finish(self, codes: Sequence[int]) -> None:
        """Wait for the end and check everything."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Lost(f"it hangs: {self.printed()}") from None
        try:
            await_("nobody is left", lambda: not marked(self.mark), 30.0)
        except Lost:
            raise Lost(f"these are left: {marked(self.mark)}\n{self.printed()}") from None
        if not self.has_crashed and (left := [path.name for path in self.sent.iterdir()]):
            raise Lost(f"{left} is left of what was sent: {self.printed()}")
        # Whoever was killed says nothing, and nsenter hands that on as a death of its own.
        code = 128 - code if code < 0 else code
        if code not in codes:
            wanted = " or ".join(map(str, list(codes)[:4]))
            raise Lost(f"{self.way}: exit code {code} instead of {wanted}\n{self.printed()}")

    def clear(self) -> None:
        """End what is left, before the hosts are removed."""
        if self.has_started:
            self.process.kill()
            self.process.wait()


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


# -- faults ----------------------------------------------------------------------------------------


# Each strikes at what its name says, and returns the exit codes that may follow from it.


def end_well(job: EngineJob) -> Sequence[int]:
    job.let_end()
    return [0]


def exit_a_rank(job: EngineJob) -> Sequence[int]:
    code = job.draw.randrange(1, 126)
    job.order(job.draw.choice(job.ranks), code)
    return [code]


def exit_two_ranks(job: EngineJob) -> Sequence[int]:
    for rank, code in zip(job.draw.sample(job.ranks, 2), (41, 42), strict=True):
        job.order(rank, code)
    return [41, 42]


def kill_a_rank(job: EngineJob) -> Sequence[int]:
    rank = job.draw.choice(job.ranks)
    inner = (job.folder / f"ready.{rank}").read_text().split()[-1]
    host = job.hosts[rank // job.ranks_per_host]
    host.run("kill", "-9", inner, check=False)
    return [128 + KILL]


def tell_front(signum: int) -> Strike:
    def strike(job: EngineJob) -> Sequence[int]:
        if job.is_step and signum != KILL:
            # What srun is told it does not tell its tasks.
            job.cancel("--signal=TERM")
            return [128 + TERM]
        job.tell_front(signum)
        return job.codes_after_kill if signum == KILL else [128 + signum]

    return strike


def cancel(job: EngineJob) -> Sequence[int]:
    job.cancel()
    # An srun that is busy with that may lose the codes of its tasks, and end with 0.
    return range(256)


def tell_early(signum: int) -> Strike:
    def strike(job: EngineJob) -> Sequence[int]:
        time.sleep(job.draw.uniform(0, 1.5))
        job.tell_front(signum)
        return job.codes_after_kill if signum == KILL else ANY_FAILURE

    return strike


def kill_one(program: str, *words: str) -> Strike:
    def strike(job: EngineJob) -> Sequence[int]:
        job.strike(KILL, program, *words)
        return ANY_FAILURE

    return strike


def kill_an_agent(job: EngineJob) -> Sequence[int]:
    # What runs first where all is sent becomes the agent.
    job.strike(KILL, sys.executable, "remote.agent" if job.way == "there" else "os.read(0, 1)")
    return ANY_FAILURE


def kill_a_launcher(job: EngineJob) -> Sequence[int]:
    # Forked from an agent it is called fleetrun; where PYTHONPATH is sent, it is a Python's own.
    for program in job.draw.sample((sys.executable, "fleetrun"), 2):
        if job.processes(program, "--heartbeat_timeout"):
            job.strike(KILL, program, "--heartbeat_timeout")
            break
    # In an allocation's shell what starts the launchers may be struck.
    return job.codes_after_kill


def crash_host(job: EngineJob) -> Sequence[int]:
    job.has_crashed = True
    # The first one is that of the user.
    job.draw.choice(job.hosts[1:]).crash()
    return ANY_FAILURE


FAULTS = (
    Fault("nothing", end_well),
    Fault("rank: exit with a code", exit_a_rank, weight=5),
    Fault("rank: kill -KILL", kill_a_rank, weight=4),
    Fault("two ranks fail together", exit_two_ranks),
    Fault("front: -TERM", tell_front(TERM), weight=3),
    Fault("front: -INT", tell_front(INT)),
    Fault("front: -KILL", tell_front(KILL), weight=3),
    Fault("a launcher: -KILL", kill_a_launcher, weight=3),
    Fault("ssh: -KILL", kill_one("ssh", "BatchMode=yes"), weight=3, engine="ssh"),
    Fault("an agent: -KILL", kill_an_agent, engine="ssh"),
    Fault("srun: -KILL", kill_one("srun"), weight=3, engine="slurm"),
    Fault("scancel", cancel, weight=3, engine="slurm"),
    Fault("host: crash", crash_host, weight=3),
    Fault("starting: front -TERM", tell_early(TERM), is_early=True, weight=3),
    Fault("starting: front -KILL", tell_early(KILL), is_early=True, weight=3),
)


def run(engine: str, hosts: int, batch: Batch) -> int:
    """Do the launches of BATCH by ENGINE on HOSTS hosts; return the exit code."""
    reason = "network namespaces need root" if not lab.is_root() else lab.missing()
    if reason is None and engine == "slurm":
        reason = slurm.missing()
    if reason is None and engine == "ssh" and not sshd_hosts.SSHD:
        reason = "there is no sshd (Debian: apt install openssh-server)"
    if reason:
        print(f"scripts/chaos: {reason}", file=sys.stderr)
        return 3
    known = [fault for fault in FAULTS if fault.engine in {"", engine}]

    def launch(fault: Fault, draw: random.Random, folder: Path) -> tuple[float, float]:
        return _launch(engine, hosts, fault, draw, folder)

    options = f"--engine {engine} --hosts {hosts}"
    return batch.run(f"by {engine} on {hosts} hosts", options, known, launch)


def _launch(
    engine: str, hosts: int, fault: Fault, draw: random.Random, folder: Path
) -> tuple[float, float]:
    with lab.hosts(hosts, folder) as made:
        job = EngineJob(engine, made, folder, draw)
        try:
            job.prepare()
            job.start()
            if not fault.is_early:
                job.wait_until_ready()
                time.sleep(draw.uniform(0, 0.5))
            began = time.monotonic()
            job.finish(fault.strike(job))
        finally:
            job.clear()
    return time.monotonic() - began, TIMEOUT_S
