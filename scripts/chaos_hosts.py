"""`scripts/chaos --hosts N`: jobs on several hosts, of which ranks, launchers, hosts, cables fail.

The hosts are network namespaces, the ranks are shells. After each launch nobody of it is left on
any host that lives, and all launchers there have ended with the same code and verdict. Elastic jobs
go on while hosts come and go: each of their ranks holds a lock, and one that starts finds those of
other generations free, as two generations never train at once.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import etcds
import lab
from chaos_job import TIMEOUT_S, Lost, alive, await_, environ
from waiting import patient

HEARTBEAT_TIMEOUT_S, GRACE_S, ELASTIC_TIMEOUT_S = 2.0, 0.5, 1.0
# From a failure that somebody sees to the end of the last launcher, on an idle machine.
SEEN_S = 1.5
# From the loss of a host or its cable: its silence, the grace of the others, and as above.
SILENT_S = HEARTBEAT_TIMEOUT_S + GRACE_S + SEEN_S
SHORT_S = 3.0
UNMET = 4  # the exit code where not all hosts have come
KILL, TERM, STOP, CONT = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT

# Says that it is ready, waits for the code to end with, and ends; some ignore all polite signals.
RANK = """
generation=$PADDLE_RESTART_COUNT rank=$PADDLE_TRAINER_ID
case " $2 " in *" $rank "*) trap "" TERM INT HUP ;; esac
exec 9>>"$1/lock.$generation.$rank"
flock -x 9
for other in "$1"/lock.*; do
    case "$other" in *"/lock.$generation."*) continue ;; esac
    # Those who look at once do not hinder each other.
    flock -n -s "$other" true ||
        echo "rank $rank of generation $generation starts while $other is held" >>"$1/together"
done
mkfifo "$1/orders.$generation.$rank"
exec 3<>"$1/orders.$generation.$rank"
echo "rank $rank line 0"
echo "$$ $(hostname)" >"$1/new.$generation.$rank"
mv "$1/new.$generation.$rank" "$1/is.$generation.$rank.of.$PADDLE_TRAINERS_NUM"
read -r code <&3
exit "$code"
"""


class Fault(NamedTuple):
    """A fault: `strike` does it at a random moment, and returns the exit codes that it implies."""

    name: str
    strike: Callable[[Any], Sequence[int]]
    weight: int = 2
    within_s: float = SEEN_S
    # The hosts that nobody starts, and the seconds after which the last one is started.
    absent: int = 0
    late_s: float = 0.0
    options: tuple[str, ...] = ()
    rdzv_timeout_s: float = 20.0
    is_early: bool = False
    needs_slow_switch: bool = False
    # Whether the job goes on without hosts that are lost, and whether etcd keeps its roster.
    is_elastic: bool = False
    has_etcd: bool = False


@contextmanager
def prepared(hosts: int, fault: Fault, draw: random.Random, folder: Path) -> Iterator[HostsJob]:
    """Make HOSTS and a job for them."""
    folder.mkdir()
    with ExitStack() as stack:
        more = int(fault.has_etcd)
        network = stack.enter_context(
            lab.network(hosts + more, folder, is_slow=fault.needs_slow_switch)
        )
        used = network.hosts[:hosts]
        master = f"{used[0].ip}:6170"
        if fault.has_etcd:
            # It is on the last host, which is none of the job's.
            master = stack.enter_context(etcds.on_hosts(network.hosts[hosts:]))
        kind = ElasticJob if fault.is_elastic else HostsJob
        yield kind(network, used, master, folder, fault, draw)


class HostsJob:
    """A launch on HOSTS of NETWORK; every random choice is drawn from DRAW."""

    def __init__(  # noqa: PLR0917 - all that a launch depends on
        self,
        network: lab.Network,
        hosts: Sequence[lab.Host],
        master: str,
        folder: Path,
        fault: Fault,
        draw: random.Random,
    ) -> None:
        self.network = network
        self.hosts = hosts
        self.master = master
        self.folder = folder
        self.fault = fault
        self.draw = draw
        self.per_host = draw.randint(1, 2)
        self.deaf = [n for n in range(len(hosts) * self.per_host) if draw.random() < 0.15]
        self.meets = bool(fault.options) or fault.has_etcd or draw.random() < 0.5
        self.struck_at = 0.0
        # Hosts of elastic jobs are waited for longer: a slow one is another fault there.
        least_s = HEARTBEAT_TIMEOUT_S * (1 + fault.is_elastic)
        # A launcher that waits for a processor is not lost.
        self.heartbeat_timeout_s = patient(least_s)
        self.rdzv_timeout_s = patient(fault.rdzv_timeout_s)
        # What this adds to the time that an idle machine may take.
        self.more_s = self.heartbeat_timeout_s - least_s + (GRACE_S if self.deaf else 0.0)
        if fault.is_early or fault.has_etcd:
            self.more_s += self.rdzv_timeout_s - fault.rdzv_timeout_s
        self.generation = -1
        self.launchers: dict[lab.Host, subprocess.Popen[bytes]] = {}
        # Hosts that are gone, are cut off and have to end by themselves, or whose launchers were
        # killed, so that what these were told no longer counts.
        self.dead: set[lab.Host] = set()
        self.alone: set[lab.Host] = set()
        self.killed: set[lab.Host] = set()
        self.asked_early: lab.Host | None = None

    # Before the fault ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start a launcher on each host, in any order."""
        (self.folder / "rank.sh").write_text(RANK)
        order = list(self.hosts)[: len(self.hosts) - self.fault.absent]
        self.draw.shuffle(order)
        for place, host in enumerate(order):
            if place == len(order) - 1:
                time.sleep(self.fault.late_s)
            self.launchers[host] = self.launch(host)

    def launch(self, host: lab.Host) -> subprocess.Popen[bytes]:
        """Start a launcher on HOST."""
        terms = {
            "nproc_per_node": self.per_host,
            "grace": GRACE_S,
            "heartbeat_timeout": self.heartbeat_timeout_s,
            "rdzv_timeout": self.rdzv_timeout_s,
        }
        command = [sys.executable, "-m", "fleetrun", "--quiet", *self.words()]
        command += [f"--{name}={value}" for name, value in terms.items()]
        command += ["sh", str(self.folder / "rank.sh"), str(self.folder)]
        # Without a token, who is late has no place in an elastic job that has begun.
        env = environ(FLEETRUN_TOKEN=f"chaos-{os.getpid()}")
        return host.start(*command, " ".join(map(str, self.deaf)), env=env)

    def words(self) -> list[str]:
        """Return the options of this job."""
        return [f"--ips={','.join(host.ip for host in self.hosts)}", *self.fault.options]

    @property
    def left(self) -> list[lab.Host]:
        """The hosts that the job has now, or soon will."""
        gone = self.dead | self.alone | self.killed
        return [host for host in self.hosts if host in self.launchers and host not in gone]

    def wait_until_ready(self) -> None:
        """Wait until all ranks run, and then a moment."""
        self.wait_for(len(self.left))
        time.sleep(self.draw.uniform(0, 0.5))

    def wait_for(self, hosts: int, *, after: int = -1) -> None:
        """Wait until all ranks of so many HOSTS run, in a generation after AFTER."""
        wanted = hosts * self.per_host

        def run() -> bool:
            for host in self.left:
                if (code := self.launchers[host].poll()) is not None:
                    raise Lost(f"{host.name} ended with {code}: {self.printed(host)}")
            if len(self.ranks()) != wanted or self.generation <= after:
                return False
            here = {path.read_text().split()[1] for path in self.ranks()}
            return here <= {host.name for host in self.left}

        self.await_(f"{wanted} ranks run", run)

    def ranks(self) -> list[Path]:
        """Return the files of the newest generation's ranks; none while some are missing."""
        files = [(path.name.split("."), path) for path in self.folder.glob("is.*")]
        self.generation = max((int(name[1]) for name, _ in files), default=-1)
        newest = [(name, path) for name, path in files if int(name[1]) == self.generation]
        is_whole = all(int(name[4]) == len(newest) for name, _ in newest)
        return [path for _, path in newest] if is_whole else []

    def await_(self, what: str, condition: Callable[[], object]) -> None:
        """Wait as long as a generation may take: silence, grace, newcomers, a start."""
        try:
            await_(what, condition, patient(TIMEOUT_S))
        except Lost as lost:
            outputs = "\n".join(f"{host.name}: {self.printed(host)}" for host in self.launchers)
            raise Lost(f"{lost}\n{outputs}") from None

    # What can be done to it ---------------------------------------------------------------------

    def a_host(self) -> lab.Host:
        """Draw a host."""
        return self.draw.choice([*self.launchers])

    def a_rank(self) -> int:
        """Draw a rank."""
        return self.draw.randrange(len(self.ranks()))

    def order(self, rank: int, code: int) -> None:
        """Let RANK of this generation end with CODE."""
        fd = os.open(self.folder / f"orders.{self.generation}.{rank}", os.O_RDWR)
        os.write(fd, b"%d\n" % code)
        # A pipe without ends forgets what is in it; the rank has its own, or is dead.
        os.close(fd)

    def let_end(self) -> None:
        """Let all ranks end well, those of a later generation, too, if there is one."""
        ordered = set()

        def ended() -> bool:
            ranks = len(self.ranks())
            if ranks and self.generation not in ordered:
                ordered.add(self.generation)
                for rank in self.draw.sample(range(ranks), ranks):
                    self.order(rank, 0)
                self.struck_at = time.monotonic()
            return all(self.launchers[host].poll() is not None for host in self.left)

        self.await_("the job ends", ended)

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

    def finish(self, codes: Sequence[int]) -> float:
        """Wait for the end and check everything; return the seconds since the fault."""
        watched = [host for host in self.launchers if host not in self.dead]
        limit_s = TIMEOUT_S + 2 * (self.fault.within_s + self.more_s)
        for host in watched:
            launcher = self.launchers[host]
            await_(f"{host.name} ends", lambda: launcher.poll() is not None, limit_s)  # noqa: B023
        took_s = time.monotonic() - self.struck_at
        for host in watched:
            with suppress(Lost):
                # Whoever ends a job whose launcher was killed needs a moment.
                await_("nobody is left", lambda: not host.processes(), 5.0)  # noqa: B023
            if processes := host.processes():
                raise Lost(f"these are left on {host.name}: {processes}")
        judged = [host for host in watched if host not in self.alone | self.killed]
        # Nobody may have heard of a launcher that was asked to end before it had joined.
        early = self.asked_early
        if early in judged and self.launchers[early].returncode in {-TERM, 128 + TERM}:
            judged.remove(early)
        if early == self.hosts[0]:
            # It does not wait for who joins later, and finds nobody.
            judged = [host for host in judged if self.launchers[host].returncode != UNMET]
        ends = {host.name: self.launchers[host].returncode for host in judged}
        if not set(ends.values()) <= set(codes) or len(set(ends.values())) > 1:
            outputs = "\n".join(f"{host.name}: {self.printed(host)}" for host in watched)
            raise Lost(f"exit codes {ends} instead of {' or '.join(map(str, codes))}\n{outputs}")
        if not self.fault.is_early:
            self._check_verdicts(judged)
        if (self.folder / "together").exists():
            raise Lost((self.folder / "together").read_text())
        return took_s

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
            # Where it happened is said on the others only; who was asked says it himself.
            verdict = re.sub(r" on \S+( \(\S+\))?$", "", last["verdict"])
            asked = "fleetrun was asked to stop (SIGTERM)"
            verdicts[host.name] = verdict.replace("interrupted by SIGTERM", asked)
        if len(set(verdicts.values())) > 1:
            raise Lost(f"several verdicts: {verdicts}")

    def printed(self, host: lab.Host) -> str:
        """Return what the launcher of HOST said."""
        return (host.folder / "output").read_text(errors="replace").strip()

    def clear(self) -> None:
        """End what is left, before the hosts are removed."""
        for launcher in self.launchers.values():
            launcher.kill()


class ElasticJob(HostsJob):
    """A job that goes on with the hosts that are left."""

    def words(self) -> list[str]:
        """Return the options that make it elastic."""
        where = [f"--master={self.master}"] if self.meets else super().words()
        count = self.fault.options or ("--nnodes=1:4",)
        return [*where, *count, f"--elastic_timeout={ELASTIC_TIMEOUT_S}"]

    def wait_for(self, hosts: int, *, after: int = -1) -> None:
        """Wait as for any job; hosts beyond the most are spare."""
        super().wait_for(min(hosts, 3 if self.fault.options else 4), after=after)

    def another(self) -> lab.Host | None:
        """Draw a host that can be lost: not the first, which has the coordinator but for etcd."""
        others = [host for host in self.left if self.fault.has_etcd or host != self.hosts[0]]
        return self.draw.choice(others) if len(self.left) > 1 and others else None


# -- faults ----------------------------------------------------------------------------------------


def end_well(job: HostsJob) -> Sequence[int]:
    job.let_end()
    # nsenter stops when its child does, and lets it go on when it goes on itself.
    for host in job.alone:
        job.launchers[host].send_signal(CONT)
    return [0]


def exit_ranks(job: HostsJob, number: int = 1) -> Sequence[int]:
    codes = job.draw.sample(range(1, 101), number)
    job.struck_at = time.monotonic()
    for rank, code in zip(job.draw.sample(range(len(job.ranks())), number), codes, strict=True):
        job.order(rank, code)
    return codes


def kill_a_rank(job: HostsJob) -> Sequence[int]:
    pid, name = job.draw.choice(job.ranks()).read_text().split()
    job.struck_at = time.monotonic()
    (host,) = (host for host in job.hosts if host.name == name)
    host.run("kill", "-KILL", pid, check=False)
    return [128 + KILL]


def restart(job: HostsJob) -> Sequence[int]:
    before = job.generation
    kill_a_rank(job)
    job.wait_for(len(job.left), after=before)
    return end_well(job)


def kill_launcher(job: HostsJob) -> Sequence[int]:
    host = job.a_host()
    job.killed.add(host)
    job.tell_launcher(host, KILL)
    return range(1, 256)


def term_launchers(job: HostsJob) -> Sequence[int]:
    for host in job.draw.choice(([job.a_host()], [*job.launchers])):
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
    # Whoever is left without the coordinator has lost it, and so has it the others.
    job.alone |= {*job.hosts} if host == job.hosts[0] else {host}
    job.struck_at = time.monotonic()
    job.network.cut(host)
    return range(1, 256)


def cut_for_a_moment(job: HostsJob) -> Sequence[int]:
    host = job.a_host()
    job.network.cut(host)
    time.sleep(job.draw.uniform(0.1, 0.3 * HEARTBEAT_TIMEOUT_S))
    job.network.heal(host)
    time.sleep(job.draw.uniform(0, HEARTBEAT_TIMEOUT_S))
    return end_well(job)


def spoil_network(job: HostsJob) -> Sequence[int]:
    job.network.spoil(**job.draw.choice(({"loss": 5}, {"delay_ms": 20})))
    time.sleep(job.draw.uniform(0, 2 * HEARTBEAT_TIMEOUT_S))
    return job.draw.choice((exit_ranks, end_well))(job)


def miss_a_host(job: HostsJob) -> Sequence[int]:
    job.struck_at = time.monotonic()
    missing = job.hosts[-1]
    for launcher in job.launchers.values():
        launcher.wait(TIMEOUT_S + job.more_s)
    for host in job.launchers:
        if missing.ip not in job.printed(host) and host != job.hosts[0]:
            raise Lost(f"{host.name} does not name {missing.ip}: {job.printed(host)}")
    return [UNMET]


def signal_early(job: HostsJob) -> Sequence[int]:
    time.sleep(job.draw.uniform(0, 0.6))
    host, signum = job.a_host(), job.draw.choice((TERM, KILL))
    if signum == KILL:
        job.killed.add(host)
    else:
        job.asked_early = host
    job.tell_launcher(host, signum)
    # Who has not heard of anybody else waits for the rest of the rendezvous.
    return [UNMET, 128 + TERM, 1] if signum == TERM else range(1, 256)


# -- faults of elastic jobs ------------------------------------------------------------------------


def lose_launcher(job: ElasticJob) -> None:
    if host := job.another():
        job.tell_launcher(host, job.draw.choice((KILL, TERM)))
        job.killed.add(host)


def stop_launcher(job: ElasticJob) -> None:
    """Stop a launcher for so long that it counts as lost."""
    if host := job.another():
        job.tell_launcher(host, STOP)
        job.alone.add(host)


def lose_host(job: ElasticJob) -> None:
    if host := job.another():
        host.crash()
        job.dead.add(host)


def lose_cable(job: ElasticJob) -> None:
    if host := job.another():
        job.network.cut(host)
        job.alone.add(host)


def goes_on(*events: Callable[[ElasticJob], None]) -> Callable[[ElasticJob], Sequence[int]]:
    """Return the fault of some of EVENTS, one or several, after which the job goes on."""

    def strike(job: ElasticJob) -> Sequence[int]:
        for _ in range(1 if len(events) == 1 else job.draw.randint(2, 4)):
            job.draw.choice(events)(job)
            time.sleep(job.draw.choice((0.0, job.draw.uniform(0, 1), job.draw.uniform(0, 6))))
        job.wait_for(len(job.left))
        return end_well(job)

    return strike


def start_again(job: ElasticJob) -> Sequence[int]:
    """Let ranks ask for another start, by Paddle's code for that."""
    # The third time in a row it would be "no progress".
    for _ in range(job.draw.randint(1, 2)):
        before = job.generation
        job.order(job.a_rank(), 101)
        job.wait_for(len(job.left), after=before)
    return end_well(job)


def newcomer(job: ElasticJob) -> Sequence[int]:
    """Let one more host come while the job runs."""
    before = job.generation
    for host in job.hosts:
        if host not in job.launchers:
            job.launchers[host] = job.launch(host)
    job.wait_for(len(job.left), after=before)
    return end_well(job)


_early = partial(Fault, rdzv_timeout_s=SHORT_S, is_early=True)
_elastic = partial(Fault, is_elastic=True)
_ELASTIC = (
    _elastic("elastic: nothing", end_well),
    _elastic("elastic: a rank fails", exit_ranks),
    _elastic("elastic: a rank wants another start", start_again, weight=3),
    _elastic("elastic: launcher: killed or asked", goes_on(lose_launcher), weight=6),
    _elastic("elastic: launcher: -STOP", goes_on(stop_launcher), weight=3),
    _elastic("elastic: host: crash", goes_on(lose_host), weight=3),
    _elastic("elastic: cable: cut for ever", goes_on(lose_cable), weight=3),
    _elastic("elastic: newcomer", newcomer, absent=1, weight=3),
    _elastic(
        "elastic: all at once",
        goes_on(lose_launcher, stop_launcher, lose_host, lose_cable),
        weight=8,
    ),
    _elastic("elastic: a spare", goes_on(lose_launcher), options=("--nnodes=3", "--spares=1")),
)
FAULTS = (
    Fault("nothing", end_well),
    Fault("rank: exit with a code", exit_ranks, weight=4),
    Fault("rank: kill -KILL", kill_a_rank, weight=4),
    Fault("two ranks fail together", partial(exit_ranks, number=2)),
    Fault("restart", restart, options=("--max_restart=1",), weight=3),
    Fault("launcher: -KILL", kill_launcher, weight=4, within_s=SILENT_S),
    Fault("launchers: -TERM", term_launchers, weight=5),
    Fault("host: crash", crash_host, weight=4, within_s=SILENT_S),
    Fault("cable: cut for ever", cut_host, weight=4, within_s=SILENT_S),
    Fault("cable: cut for a moment", cut_for_a_moment, weight=3),
    Fault("network: loss or delay", spoil_network, needs_slow_switch=True, within_s=2 * SEEN_S),
    Fault("a host comes late", end_well, late_s=1.5),
    _early("a host never comes", miss_a_host, absent=1, within_s=SHORT_S + SEEN_S),
    _early("starting: -TERM or -KILL", signal_early, weight=4, within_s=SHORT_S + SILENT_S),
    *_ELASTIC,
    *(
        # Who is cut off looks for the others until --rdzv_timeout.
        fault._replace(name=fault.name.replace("elastic:", "etcd:"), has_etcd=True, within_s=25.0)
        for fault in _ELASTIC
    ),
)
