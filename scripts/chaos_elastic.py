"""Faults of `scripts/chaos --hosts N` on elastic jobs, which go on while hosts come and go.

Each rank holds a lock of its own, and one that starts finds those of other generations free: two
generations never train at once. In the end the ranks of the hosts that are left end well, and
so does the job.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import etcds
from chaos_hosts import HEARTBEAT_TIMEOUT_S, KILL, TERM, Fault, HostsJob
from chaos_job import Lost, await_

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import lab

# What a generation may take after the last fault: the silence of a host, the grace of the others,
# the wait for newcomers, and the next one's start on a busy machine.
_GOES_ON_S = 30.0
_ELASTIC_TIMEOUT_S = 1.0

# Says that it is there, waits for the code to end with, and ends; some ignore all polite signals.
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
hostname >"$1/is.$generation.$rank.of.$PADDLE_TRAINERS_NUM"
read -r code <&3
exit "$code"
"""


class ElasticJob(HostsJob):
    """A job that goes on with the hosts that are left."""

    script = RANK
    # Hosts are waited for longer than elsewhere: a slow one is another fault here, and no delay.
    least_heartbeat_s = 2 * HEARTBEAT_TIMEOUT_S
    # Without one, who is late has no place in a job that has begun.
    variables: ClassVar = {"FLEETRUN_TOKEN": "known to this chaos alone"}

    def __init__(
        self, network: lab.Network, folder: Path, fault: Fault, draw: random.Random
    ) -> None:
        super().__init__(network, folder, fault, draw)
        self.generation = 0
        # Of hosts that have ranks at a time.
        self.most = 3 if fault.options else 4
        self.meets = bool(fault.options) or draw.random() < 0.5
        self.stopped: set[lab.Host] = set()
        # Those whose launchers were killed and started again.
        self.returned: set[lab.Host] = set()

    def words(self) -> list[str]:
        """Return the options that make it elastic."""
        count = self.fault.options or ("--nnodes=1:4",)
        return [*self._where(), *count, f"--elastic_timeout={_ELASTIC_TIMEOUT_S}"]

    def _where(self) -> list[str]:
        return [f"--master={self.hosts[0].ip}:6170"] if self.meets else super().words()

    @property
    def left(self) -> list[lab.Host]:
        """The hosts that the job has now, or soon will."""
        gone = self.dead | self.alone | self.killed
        return [host for host in self.hosts if host in self.launchers and host not in gone]

    def another(self) -> lab.Host | None:
        """Draw a host that can be lost: not the first, which has the coordinator."""
        others = [host for host in self.left if host != self.hosts[0]]
        return self.draw.choice(others) if others else None

    def wait_until_ready(self, times: int = 1) -> None:  # noqa: ARG002 - as the class above has it
        """Wait until the ranks of the hosts that are left run together."""
        self.wait_for(len(self.left))

    def has_ranks(self, host: lab.Host) -> bool:
        """Whether HOST has ranks, or has had some."""
        return (host.folder / "log" / "latest").exists()

    def unheard(self) -> set[lab.Host]:
        """Return the hosts that came back and got no place: the others may have ended by then."""
        return {host for host in self.returned if not self.has_ranks(host)}

    def wait_for(self, hosts: int, *, after: int = -1) -> None:
        """Wait until all ranks of so many HOSTS run, in a generation after AFTER."""
        wanted = min(hosts, self.most) * self.per_host

        def run() -> bool:
            for host in self.left:
                code = self.launchers[host].poll()
                if code is not None:
                    raise Lost(f"{host.name} ended with {code}: {self.printed(host)}")
            if self.look() != wanted or self.generation <= after:
                return False
            newest = self.folder.glob(f"is.{self.generation}.*")
            return {path.read_text().strip() for path in newest} <= {
                host.name for host in self.left
            }

        self._await(f"{wanted} ranks run", run)

    def look(self) -> int:
        """Return how many ranks the newest generation has; 0 while some are missing."""
        names = [path.name.split(".") for path in self.folder.glob("is.*")]
        here = [(int(name[1]), int(name[4])) for name in names]
        self.generation = max((generation for generation, _ in here), default=-1)
        newest = [total for generation, total in here if generation == self.generation]
        return len(newest) if newest == [len(newest)] * len(newest) else 0

    def _await(self, what: str, condition: Callable[[], object]) -> None:
        try:
            await_(what, condition, _GOES_ON_S + 2 * self.slower_s)
        except Lost as lost:
            seen = sorted(path.name for path in self.folder.glob("is.*"))
            outputs = "\n".join(f"{host.name}: {self.printed(host)}" for host in self.launchers)
            raise Lost(f"{lost}; there are {seen}\n{outputs}") from None

    def order(self, rank: int, code: int) -> None:
        """Let RANK of this generation end with CODE."""
        fd = os.open(self.folder / f"orders.{self.generation}.{rank}", os.O_RDWR)
        os.write(fd, b"%d\n" % code)
        os.close(fd)

    def let_end(self) -> None:
        """Let all ranks end well, those of a later generation, too, if there is one."""
        ordered = set()

        def ended() -> bool:
            ranks = self.look()
            if ranks and self.generation not in ordered:
                ordered.add(self.generation)
                for rank in self.draw.sample(range(ranks), ranks):
                    self.order(rank, 0)
                self.struck_at = time.monotonic()
            heard = set(self.left) - self.unheard()
            return all(self.launchers[host].poll() is not None for host in heard)

        self._await("the job ends", ended)
        struck_at = self.struck_at
        for host in self.unheard():
            # Nobody is left to tell it that the job is over: it would wait until --rdzv_timeout.
            if self.launchers[host].poll() is None:
                self.tell_launcher(host, TERM)
        self.struck_at = struck_at

    def check(self) -> None:
        """See that no two generations ran at once."""
        together = self.folder / "together"
        if together.exists():
            raise Lost(together.read_text())


class EtcdJob(ElasticJob):
    """One whose roster is kept in etcd, on the last host, which is none of the job's."""

    def __init__(
        self, network: lab.Network, folder: Path, fault: Fault, draw: random.Random
    ) -> None:
        super().__init__(network, folder, fault, draw)
        *self.hosts, self.keeper = network.hosts
        self.master = ""
        self._etcd = ExitStack()

    def start(self) -> None:
        """Start etcd, then a launcher on each host, in any order."""
        self.master = self._etcd.enter_context(etcds.on_hosts([self.keeper]))
        super().start()

    def clear(self) -> None:
        """End what is left, before the hosts are removed."""
        super().clear()
        self._etcd.close()

    def _where(self) -> list[str]:
        return [f"--master={self.master}"]

    def another(self) -> lab.Host | None:
        """Draw a host that can be lost, which is any."""
        return self.draw.choice(self.left) if len(self.left) > 1 else None


# -- what can happen -------------------------------------------------------------------------------


def _end_launcher(job: ElasticJob, number: int) -> None:
    host = job.another()
    if host is not None:
        job.tell_launcher(host, number)
        job.killed.add(host)


_kill_launcher = partial(_end_launcher, number=KILL)
_term_launcher = partial(_end_launcher, number=TERM)


def _crash(job: ElasticJob) -> None:
    host = job.another()
    if host is not None:
        host.crash()
        job.dead.add(host)


def _cut(job: ElasticJob) -> None:
    host = job.another()
    if host is not None:
        job.network.cut(host)
        job.alone.add(host)


def _stop_launcher(job: ElasticJob) -> None:
    """Stop a launcher for so long that it counts as lost."""
    host = job.another()
    if host is not None:
        job.tell_launcher(host, signal.SIGSTOP)
        job.alone.add(host)
        job.stopped.add(host)


def _come_back(job: ElasticJob) -> None:
    """Start a launcher again where one was killed."""
    gone = [host for host in job.killed if job.launchers[host].poll() is not None]
    if gone:
        host = job.draw.choice(sorted(gone, key=lambda host: host.name))
        job.killed.discard(host)
        job.returned.add(host)
        # The run of the one that was killed is no verdict of this one, which may get no ranks.
        (host.folder / "log" / "latest").unlink(missing_ok=True)
        job.launchers[host] = job.launch(host)


EVENTS = (_kill_launcher, _term_launcher, _crash, _cut, _stop_launcher, _come_back)


def single(event: Callable[[ElasticJob], None]) -> Callable[[ElasticJob], Sequence[int]]:
    """Return the fault that is EVENT, after which the job goes on to its end."""

    def strike(job: ElasticJob) -> Sequence[int]:
        before = set(job.left)
        event(job)
        lost = before - set(job.left)
        is_missed = any(job.has_ranks(host) for host in lost)
        job.wait_for(len(job.left), after=0 if is_missed else -1)
        return _end(job)

    return strike


def storm(job: ElasticJob) -> Sequence[int]:
    """Let several things happen, one upon the other."""
    for _ in range(job.draw.randint(2, 4)):
        job.draw.choice(EVENTS)(job)
        time.sleep(job.draw.choice((0.0, job.draw.uniform(0, 1), job.draw.uniform(0, 6))))
    job.wait_for(len(job.left))
    return _end(job)


def start_again(job: ElasticJob) -> Sequence[int]:
    """Let ranks ask for another start, by Paddle's code for that."""
    # The third time in a row it would be "no progress".
    for _ in range(job.draw.randint(1, 2)):
        before = job.generation
        job.order(job.draw.choice(range(len(job.left) * job.per_host)), 101)
        job.wait_for(len(job.left), after=before)
    return _end(job)


def fail(job: ElasticJob) -> Sequence[int]:
    """Let a rank fail, which is for --max_restart."""
    job.struck_at = time.monotonic()
    job.order(job.draw.choice(range(len(job.left) * job.per_host)), 7)
    return [7]


def _end(job: ElasticJob) -> Sequence[int]:
    job.let_end()
    for host in job.stopped:
        # nsenter stops when its child does, and lets it go on when it goes on itself.
        job.launchers[host].send_signal(signal.SIGCONT)
    job.check()
    return [0]


def newcomer(job: ElasticJob) -> Sequence[int]:
    """Let one more host come while the job runs."""
    for host in job.hosts:
        if host not in job.launchers:
            job.launchers[host] = job.launch(host)
    job.wait_for(len(job.left), after=job.generation)
    return _end(job)


_elastic = partial(Fault, is_elastic=True)
FAULTS = (
    _elastic("elastic: nothing", _end),
    _elastic("elastic: a rank fails", fail),
    _elastic("elastic: a rank wants another start", start_again, weight=3),
    _elastic("elastic: launcher: -KILL", single(_kill_launcher), weight=3),
    _elastic("elastic: launcher: -TERM", single(_term_launcher), weight=3),
    _elastic("elastic: launcher: -STOP", single(_stop_launcher), weight=3),
    _elastic("elastic: host: crash", single(_crash), weight=3),
    _elastic("elastic: cable: cut for ever", single(_cut), weight=3),
    _elastic("elastic: newcomer", newcomer, absent=1, weight=3),
    _elastic("elastic: all at once", storm, weight=8),
    _elastic("elastic: a spare", single(_kill_launcher), options=("--nnodes=3", "--spares=1")),
)

ETCD = tuple(
    # Who is cut off looks for the others until --rdzv_timeout.
    fault._replace(name=fault.name.replace("elastic:", "etcd:"), has_etcd=True, within_s=25.0)
    for fault in FAULTS
)
