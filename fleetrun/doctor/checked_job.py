"""The job that a host is checked for: what is known before the first check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fleetrun.doctor.cuda import CudaStart, read_driver, start_cuda
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.engines.engine import Engine
from fleetrun.errors import EnvironmentFault
from fleetrun.host import paddles, probe
from fleetrun.host.nvml import Survey
from fleetrun.host.paddles import InstalledPaddle
from fleetrun.model import Facts, LaunchPlan, Member, Request, Roster
from fleetrun.plan import hosts, kinds, planner
from fleetrun.text import counted


class CheckedJob(NamedTuple):
    """The request, this host's driver and Paddle (None: there is none), and the job's plan here.

    `facts`, `plan` and `roster` are None if it cannot be planned; `fault` says why.
    """

    request: Request
    environ: Mapping[str, str]
    driver: Survey | None = None
    # None: it was not started.
    cuda: CudaStart | None = None
    paddle: InstalledPaddle | None = None
    facts: Facts | None = None
    plan: LaunchPlan | None = None
    roster: Roster | None = None
    # The kind of devices of its ranks.
    kind: str = "cpu"
    fault: str = ""
    # How long to wait for the job's other hosts, in seconds.
    timeout_s: float = 0.0
    log: Callable[[str], None] | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """The hosts of the job, as far as they are known."""
        return () if self.roster is None else self.roster.members

    @property
    def has_peers(self) -> bool:
        """Whether other hosts of the job are known."""
        return len(self.members) > 1

    @property
    def ranks(self) -> int:
        """The number of its processes here."""
        return 1 if self.plan is None else len(self.plan.processes)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its ranks here, by the user's names."""
        processes = () if self.plan is None else self.plan.processes
        ranks = [process.rank for process in processes if process.rank is not None]
        return tuple(device.id for rank in ranks for device in rank.devices)

    @property
    def is_nccl(self) -> bool:
        """Whether NCCL connects its ranks."""
        return self.kind == "gpu" and self.request.backend in {"auto", "nccl"}

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its ranks that the user sets."""
        return {**self.environ, **dict(self.request.env)}


def read(
    request: Request,
    environ: Mapping[str, str],
    timeout_s: float,
    log: Callable[[str], None] | None,
) -> CheckedJob:
    """Return the job of REQUEST on this host; raises UsageError if the request is invalid."""
    probe.current_folder()
    job = CheckedJob(
        request,
        environ,
        driver=read_driver(),
        paddle=paddles.find(sys.path),
        timeout_s=timeout_s,
        log=log,
    )
    if job.driver is not None and job.driver.is_stuck:
        # Another query would hang, too; there is a finding about it already.
        return job
    if job.driver is not None and (job.driver.gpus or job.driver.trouble):
        job = job._replace(cuda=start_cuda())
    try:
        return _planned(job)
    except EnvironmentFault as fault:
        return job._replace(fault=str(fault))


def _planned(job: CheckedJob) -> CheckedJob:
    """Complete JOB with its plan; raises EnvironmentFault if it cannot be planned."""
    request, environ = job.request, job.environ
    dry = request._replace(dry_run="table")
    engine = Engine.find(request, environ, planner.places(request))
    facts = probe.read(request, environ, engine.hosts)
    share = planner.share(request, facts)
    slots = planner.slots(request, facts, share)
    if len(engine.hosts) > 1:
        # A dry run accepts any place among the hosts.
        hosts.place(engine.places, request, facts)
    guessed = Engine.find(dry, environ, planner.places(dry))
    roster = guessed.assign(guessed.ports(facts.pid), dry, facts, slots)
    if not engine.hosts:
        # Only the meeting knows the others.
        roster = roster._replace(members=(roster.members[roster.me],), me=0)
    plan = planner.plan(request, facts, share, roster)
    return job._replace(facts=facts, plan=plan, roster=roster, kind=share.kind)


def check(job: CheckedJob) -> Iterator[Finding]:
    """Check that the job can be planned here, and name the devices of Paddle's plug-ins."""
    if job.fault:
        means = "a launch with this command line fails with that message"
        yield error("job", job.fault, means, "fleetrun --dry-run ...")
    if job.facts is None or job.plan is None:
        return
    count = counted(len(job.plan.ranks), "process")
    on_hosts = f" on {len(job.members)} hosts" if job.has_peers else ""
    yield ok("job", f"{count}{on_hosts}, {job.ranks} here")
    yield from plugins(job.facts.paddle_counts, job.facts.absent)


def plugins(counts: Mapping[str, int], absent: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the devices in COUNTS, by kind, and why others are ABSENT."""
    for kind, count in counts.items():
        if count:
            seen = f"{count} of Paddle's kind {kind}; ranks talk to each other by xccl"
            yield ok(f"{kinds.label(kind)}s", seen)
    for kind, why in absent.items():
        if kind != "gpu":
            vendor = kinds.VENDORS.get(kind, kinds.Vendor())
            fix = f"pip install {vendor.package or 'the plug-in'}  # of Paddle's own version"
            if kind in counts:
                masks = ", ".join(kinds.masks(kind))
                fix = f"ls /dev/{vendor.file}*  # are they there, and does {masks} hide them?"
            yield warning(f"{kinds.label(kind)}s", why, "ranks do not use them", fix)
