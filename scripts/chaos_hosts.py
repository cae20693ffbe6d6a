"""`scripts/chaos --hosts N`: jobs on several hosts, of which ranks, launchers, hosts, cables fail.

The hosts are network namespaces, the ranks are shells. After each launch nobody of it is left on
any host that lives, all launchers there have ended with the same code and verdict, the one that the
fault implies, and none of them late.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from chaos_job import TIMEOUT_S, Lost, alive, await_, slack
from waiting import patient

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    import lab

    Strike = Callable[["HostsJob"], Sequence[int]]

ROOT = Path(__file__).parents[1]
HEARTBEAT_TIMEOUT_S = 2.0
GRACE_S = 0.5
# From a failure that somebody sees to the end of the last launcher, on an idle machine.
SEEN_S = 1.5
# From the loss of a host or its cable: its silence, the grace of the others, and as above.
SILENT_S = HEARTBEAT_TIMEOUT_S + GRACE_S + SEEN_S
_PREFIXES = ("CUDA_VISIBLE", "PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "FLEETRUN_", "TRAINER_", "POD_")
KILL, TERM = signal.SIGKILL, signal.SIGTERM

# Says that it is ready, waits for the code to end with, and ends; some ignore all polite signals.
RANK = """
case " $2 " in *" $PADDLE_TRAINER_ID "*) trap "" TERM INT HUP ;; esac
exec 3<>"$1/orders.$PADDLE_TRAINER_ID"
echo "rank $PADDLE_TRAINER_ID line 0"
echo $$ >>"$1/ready.$PADDLE_TRAINER_ID"
read -r code <&3
exit "$code"
"""


class Fault(NamedTuple):
    """A fault: `strike` does it at a random moment, and returns the exit codes that it implies."""

    name: str
    strike: Strike
    weight: int = 2
    within_s: float = SEEN_S
    # The hosts that nobody starts, and those that are started so many seconds later.
    absent: int = 0
    late_s: float = 0.0
    options: tuple[str, ...] = ()
    rdzv_timeout_s: float = 20.0
    is_early: bool = False
    needs_slow_switch: bool = False
    # Whether the job goes on without hosts that are lost; see chaos_elastic.py.
    is_elastic: bool = False
    # Whether its roster is kept in etcd, on one host more; see chaos_elastic.py, too.
    has_etcd: bool = False
    # What one host alone is started with, which it cannot do.
    ill: tuple[str, ...] = ()


class HostsJob:
    """A launch on the hosts of NETWORK; every random choice is drawn from DRAW."""

    script = RANK
    least_heartbeat_s = HEARTBEAT_TIMEOUT_S
    ready_within_s = TIMEOUT_S
    variables: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, network: lab.Network, folder: Path, fault: Fault, draw: random.Random
    ) -> None:
        self.network = network
        self.hosts: Sequence[lab.Host] = network.hosts
        self.folder = folder
        self.fault = fault
        self.draw = draw
        self.per_host = draw.randint(1, 2)
        ranks = range(len(self.hosts) * self.per_host)
        self.ranks = ranks
        self.deaf = [rank for rank in ranks if draw.random() < 0.15]
        self.struck_at = 0.0
        # A launcher that waits for a processor is not lost.
        self.heartbeat_timeout_s = patient(self.least_heartbeat_s)
        self.rdzv_timeout_s = patient(fault.rdzv_timeout_s)
        # What this adds to the time that an idle machine may take.
        self.slower_s = self.heartbeat_timeout_s - self.least_heartbeat_s
        if fault.is_early or fault.has_etcd:
            self.slower_s += self.rdzv_timeout_s - fault.rdzv_timeout_s
        # The coordinator's terms count, whatever the other hosts were started with.
        self.terms = {host: self._other_terms() for host in self.hosts[1:]}
        self.ill_host = draw.choice(self.hosts) if fault.ill else None
        self.launchers: dict[lab.Host, subprocess.Popen[bytes]] = {}
        # Hosts that are gone, or are cut off and have to end by themselves.
        self.dead: set[lab.Host] = set()
        self.alone: set[lab.Host] = set()
        # Those whose launchers were killed: what they were told no longer counts.
        self.killed: set[lab.Host] = set()

    def _other_terms(self) -> dict[str, float]:
        """Draw terms for a host that does not coordinate; those of most jobs are the same."""
        if self.fault.is_early or self.fault.is_elastic or self.fault.has_etcd:
            return {}
        if self.draw.random() < 0.5:
            return {}
        least_s = self.heartbeat_timeout_s
        return {
            "heartbeat_timeout": self.draw.choice([least_s, least_s / 2, 60]),
            "grace": self.draw.choice([GRACE_S, 20]),
            "rdzv_timeout": self.draw.choice([self.rdzv_timeout_s, 600]),
        }

    def unheard(self) -> set[lab.Host]:
        """Return the hosts that came when the job was over, and found nobody."""
        return set()

    # Before the fault ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start a launcher on each host, in any order."""
        (self.folder / "rank.sh").write_text(self.script)
        for rank in self.ranks:
            os.mkfifo(self.folder / f"orders.{rank}")
        order = list(self.hosts)[: len(self.hosts) - self.fault.absent]
        self.draw.shuffle(order)
        for place, host in enumerate(order):
            if place == len(order) - 1 and self.fault.late_s:
                time.sleep(self.fault.late_s)
            self.launchers[host] = self.launch(host)

    def launch(self, host: lab.Host, *more: str) -> subprocess.Popen[bytes]:
        """Start a launcher on HOST."""
        command = [sys.executable, "-m", "fleetrun", "--quiet", *self.words()]
        terms: dict[str, float] = {
            "grace": GRACE_S,
            "heartbeat_timeout": self.heartbeat_timeout_s,
            "rdzv_timeout": self.rdzv_timeout_s,
        }
        terms |= self.terms.get(host, {})
        command += [f"--nproc_per_node={self.per_host}"]
        command += [f"--{name}={value}" for name, value in terms.items()]
        ill = self.fault.ill if host is self.ill_host else ()
        command += [*more, *ill, "sh", str(self.folder / "rank.sh")]
        command += [str(self.folder), " ".join(map(str, self.deaf))]
        env = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **self.variables}
        return host.start(*command, env=env)

    def words(self) -> list[str]:
        """Return the options of this job."""
        ips = ",".join(host.ip for host in self.hosts)
        return [f"--ips={ips}", *self.fault.options]

    def wait_until_ready(self, times: int = 1) -> None:
        """Wait until every rank is there."""
        files = [self.folder / f"ready.{rank}" for rank in self.ranks]

        def ready() -> bool:
            for host, launcher in self.launchers.items():
                if launcher.poll() is not None:
                    raise Lost(
                        f"{host.name} ended with {launcher.returncode}: {self.printed(host)}"
                    )
            return all(file.exists() and file.read_text().count("\n") == times for file in files)

        await_("all ranks are ready", ready, patient(self.ready_within_s))

    # What can be done to it ---------------------------------------------------------------------

    def a_host(self) -> lab.Host:
        """Draw a host."""
        return self.draw.choice([*self.launchers])

    def a_rank(self) -> int:
        """Draw a rank."""
        return self.draw.choice(self.ranks)

    def host_of(self, rank: int) -> lab.Host:
        """Return the host of RANK."""
        return self.hosts[rank // self.per_host]

    def order(self, rank: int, code: int) -> None:
        """Let RANK end with CODE."""
        fd = os.open(self.folder / f"orders.{rank}", os.O_RDWR)
        os.write(fd, b"%d\n" % code)
        # A pipe without ends forgets what is in it; the rank has its own, or is dead.
        os.close(fd)

    def let_end(self) -> None:
        """Let all ranks end well, one after the other."""
        self.struck_at = time.monotonic()
        for rank in self.draw.sample(self.ranks, len(self.ranks)):
            self.order(rank, 0)
            time.sleep(self.draw.uniform(0, 0.05))
        self.struck_at = time.monotonic()

    def strike(self, host: lab.Host, pid: str, signum: int) -> None:
        """Send SIGNUM to process PID of HOST, as it is numbered there."""
        self.struck_at = time.monotonic()
        host.run("kill", f"-{int(signum)}", pid, check=False)

    def tell_launcher(self, host: lab.Host, signum: int) -> None:
        """Send SIGNUM to the launcher of HOST."""
        # nsenter is the parent of what it starts in another process namespace.
        pid = self.launchers[host].pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        await_("the launcher is there", lambda: children.read_text().split() or not alive(pid))
        self.struck_at = time.monotonic()
        for child in children.read_text().split():
            os.kill(int(child), signum)

    # Afterwards ---------------------------------------------------------------------------------

    def finish(self, codes: Sequence[int], within_s: float) -> tuple[float, float]:
        """Wait for the end and check everything; return seconds since the fault, and how many."""
        watched = {h: p for h, p in self.launchers.items() if h not in self.dead}
        for host, launcher in watched.items():
            limit_s = TIMEOUT_S + within_s + 2 * self.slower_s
            self._await_end(host, launcher, self.struck_at + limit_s)
        took = time.monotonic() - self.struck_at
        for host in watched:
            with suppress(Lost):
                # Whoever ends a job whose launcher was killed needs a moment.
                await_("nobody is left", lambda: not host.processes(), 5.0)  # noqa: B023
            left = host.processes()
            if left:
                raise Lost(f"these are left on {host.name}: {left}")
        judged = [host for host in watched if host not in self.alone | self.killed | self.unheard()]
        # Python itself had not come to our code yet, so nobody had heard of that launcher.
        judged = [h for h in judged if not self.fault.is_early or self.launchers[h].returncode >= 0]
        ends = {host: self.launchers[host].returncode for host in judged}
        if not set(ends.values()) <= set(codes) or len(set(ends.values())) > 1:
            seen = {host.name: code for host, code in ends.items()}
            outputs = "\n".join(f"{host.name}: {self.printed(host)}" for host in watched)
            raise Lost(f"exit codes {seen} instead of {' or '.join(map(str, codes))}\n{outputs}")
        if not self.fault.is_early:
            self._check_verdicts(judged)
        allowed = within_s * slack()
        allowed += self.slower_s
        if took > allowed:
            outputs = "\n".join(f"{host.name}: {self.printed(host)}" for host in watched)
            raise Lost(
                f"it ended {took:.1f} s after the fault, {allowed:.1f} s are allowed\n{outputs}"
            )
        return took, allowed

    def _await_end(self, host: lab.Host, launcher: subprocess.Popen[bytes], until: float) -> None:
        try:
            launcher.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Lost(f"the launcher of {host.name} hangs: {self.printed(host)}") from None

    def _check_verdicts(self, judged: Sequence[lab.Host]) -> None:
        """All hosts have come to the same end, and have it in words."""
        verdicts = {}
        for host in judged:
            file = host.folder / "log" / "latest" / "events.jsonl"
            if not file.exists():
                continue
            last = json.loads(file.read_text().splitlines()[-1])
            if last["event"] != "finished":
                raise Lost(f"events.jsonl of {host.name} ends with {last}")
            # Where it happened is said on the others only.
            verdict = re.sub(r" on \S+( \(\S+\))?$", "", last["verdict"])
            # As who was asked says it himself.
            verdicts[host.name] = verdict.replace(
                "interrupted by SIGTERM", "fleetrun was asked to stop (SIGTERM)"
            )
        if len(set(verdicts.values())) > 1:
            raise Lost(f"several verdicts: {verdicts}")

    def printed(self, host: lab.Host) -> str:
        """Return what the launcher of HOST said."""
        return (host.folder / "output").read_text(errors="replace").strip()

    def clear(self) -> None:
        """End what is left, before the hosts are removed."""
        for launcher in self.launchers.values():
            launcher.kill()


# -- faults ----------------------------------------------------------------------------------------


def end_well(job: HostsJob) -> Sequence[int]:
    job.let_end()
    return [0]


def exit_a_rank(job: HostsJob) -> Sequence[int]:
    code = job.draw.randrange(1, 126)
    job.struck_at = time.monotonic()
    job.order(job.a_rank(), code)
    return [code]


def exit_two_ranks(job: HostsJob) -> Sequence[int]:
    job.struck_at = time.monotonic()
    for rank, code in zip(job.draw.sample(job.ranks, 2), (41, 42), strict=True):
        job.order(rank, code)
    return [41, 42]


def kill_a_rank(job: HostsJob) -> Sequence[int]:
    rank = job.a_rank()
    pid = (job.folder / f"ready.{rank}").read_text().split()[-1]
    job.strike(job.host_of(rank), pid, KILL)
    return [128 + KILL]


def restart(job: HostsJob) -> Sequence[int]:
    kill_a_rank(job)
    job.wait_until_ready(times=2)
    job.let_end()
    return [0]


def kill_launcher(job: HostsJob) -> Sequence[int]:
    host = job.a_host()
    job.killed.add(host)
    job.tell_launcher(host, KILL)
    return range(1, 256)


def term_launcher(job: HostsJob) -> Sequence[int]:
    job.tell_launcher(job.a_host(), TERM)
    return [128 + TERM]


def term_all(job: HostsJob) -> Sequence[int]:
    for host in job.launchers:
        job.tell_launcher(host, TERM)
    return [128 + TERM]


def crash_host(job: HostsJob) -> Sequence[int]:
    host = job.a_host()
    job.dead.add(host)
    job.struck_at = time.monotonic()
    host.crash()
    return range(1, 256)


def cut_host(job: HostsJob) -> Sequence[int]:
    host = job.a_host()
    job.alone.add(host)
    if host == job.hosts[0]:
        # Whoever is left has lost the coordinator, and so has it the others.
        job.alone |= set(job.hosts)
    job.struck_at = time.monotonic()
    job.network.cut(host)
    return range(1, 256)


def cut_for_a_moment(job: HostsJob) -> Sequence[int]:
    host = job.a_host()
    job.network.cut(host)
    time.sleep(job.draw.uniform(0.1, 0.3 * HEARTBEAT_TIMEOUT_S))
    job.network.heal(host)
    time.sleep(job.draw.uniform(0, HEARTBEAT_TIMEOUT_S))
    job.let_end()
    return [0]


def spoil(**what: float) -> Strike:
    def strike(job: HostsJob) -> Sequence[int]:
        job.network.spoil(**what)
        time.sleep(job.draw.uniform(0, 2 * HEARTBEAT_TIMEOUT_S))
        if job.draw.random() < 0.5:
            return exit_a_rank(job)
        job.let_end()
        return [0]

    return strike


def miss_a_host(job: HostsJob) -> Sequence[int]:
    job.struck_at = time.monotonic()
    missing = job.hosts[-1]
    for launcher in job.launchers.values():
        launcher.wait(TIMEOUT_S + job.slower_s)
    for host in job.launchers:
        if missing.ip not in job.printed(host) and host != job.hosts[0]:
            raise Lost(f"{host.name} does not name {missing.ip}: {job.printed(host)}")
    return [4]


def flood(job: HostsJob) -> Sequence[int]:
    """Send garbage to every port that anybody of the job listens at, then let it end."""
    host = job.hosts[0]
    code = (
        "import os, socket, sys\n"
        "for port in range(6166, 6170):\n"
        "    for _ in range(100):\n"
        "        try:\n"
        "            link = socket.create_connection((sys.argv[1], port), 1)\n"
        "            link.sendall(os.urandom(200))\n"
        "        except OSError:\n"
        "            break\n"
    )
    job.a_host().run(sys.executable, "-c", code, host.ip)
    job.let_end()
    return [0]


def signal_early(signum: int) -> Strike:
    def strike(job: HostsJob) -> Sequence[int]:
        time.sleep(job.draw.uniform(0, 0.6))
        host = job.a_host()
        if signum == KILL:
            job.killed.add(host)
        job.tell_launcher(host, signum)
        # Who has not heard of anybody else waits for the rest of the rendezvous.
        return [4, 128 + TERM, 1] if signum == TERM else range(1, 256)

    return strike


def tell(code: int) -> Strike:
    """Return what waits for hosts that all end with CODE, as one of them cannot start."""

    def strike(job: HostsJob) -> Sequence[int]:
        job.struck_at = time.monotonic()
        return [code]

    return strike


SHORT_S = 3.0
FAULTS = (
    Fault("nothing", end_well),
    Fault("rank: exit with a code", exit_a_rank, weight=4),
    Fault("rank: kill -KILL", kill_a_rank, weight=4),
    Fault("two ranks fail together", exit_two_ranks),
    Fault("restart", restart, options=("--max_restart=1",), weight=3),
    Fault("launcher: -KILL", kill_launcher, weight=4, within_s=SILENT_S),
    Fault("launcher: -TERM", term_launcher, weight=3),
    Fault("all launchers: -TERM", term_all),
    Fault("host: crash", crash_host, weight=4, within_s=SILENT_S),
    Fault("cable: cut for ever", cut_host, weight=4, within_s=SILENT_S),
    Fault("cable: cut for a moment", cut_for_a_moment, weight=3),
    Fault("network: 5 % loss", spoil(loss=5), needs_slow_switch=True, within_s=2 * SEEN_S),
    Fault("network: 20 ms", spoil(delay_ms=20), needs_slow_switch=True, within_s=2 * SEEN_S),
    Fault("a host comes late", end_well, late_s=1.5),
    Fault(
        "a host never comes",
        miss_a_host,
        absent=1,
        rdzv_timeout_s=SHORT_S,
        is_early=True,
        within_s=SHORT_S + SEEN_S,
    ),
    Fault("strangers call", flood),
    Fault("starting: no script", tell(3), is_early=True, ill=("none.py",)),
    Fault("starting: a wrong value", tell(2), is_early=True, ill=("--bind=none,",)),
    Fault("starting: no log folder", tell(3), is_early=True, ill=("--log_dir=/proc/none",)),
    Fault("starting: no GPU", tell(3), is_early=True, ill=("--gpus=0",)),
    Fault(
        "starting: -TERM",
        signal_early(TERM),
        rdzv_timeout_s=SHORT_S,
        is_early=True,
        within_s=SHORT_S + SILENT_S,
    ),
    Fault(
        "starting: -KILL",
        signal_early(KILL),
        rdzv_timeout_s=SHORT_S,
        is_early=True,
        within_s=SHORT_S + SILENT_S,
    ),
)
