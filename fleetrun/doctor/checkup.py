"""Checks this host for one job: reads, meets the job's other hosts, measures and judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fleetrun import engines, printing
from fleetrun.doctor import (
    findings,
    gpu_check,
    gpus,
    machine,
    network,
    nvidia,
    peers,
    software,
    transfers,
)
from fleetrun.doctor.findings import Finding
from fleetrun.doctor.gpu_check import GpuProof
from fleetrun.doctor.nvidia import CudaStart, Gpus
from fleetrun.doctor.software import Software
from fleetrun.doctor.transfers import Transfer, Transfers
from fleetrun.engines.ports import Ports
from fleetrun.errors import EnvironmentFault
from fleetrun.host import addresses, probe, tcp
from fleetrun.model import Request, Roster
from fleetrun.plan import devices, hosts, kinds, modes, planner
from fleetrun.rundir import secrets
from fleetrun.rundir.variables import TOKEN
from fleetrun.session.authentication import Key
from fleetrun.session.introductions import HostDescription, PeerCheck
from fleetrun.text import counted

# Importing Paddle takes a busy host half a minute; longer means a hang.
_ALLREDUCE_S = 180.0
_LAST_LINES = 3
# Launches by hand on several hosts start some seconds apart.
_PREFLIGHT_S = 20.0


class Checkup(NamedTuple):
    """The findings of a check-up, and the allreduces that it measured."""

    findings: tuple[Finding, ...]
    measured: Transfers | None = None


class _JobChecks(NamedTuple):
    """The job on this host: its roster, its ranks here, and the interface to the other hosts."""

    roster: Roster | None = None
    ranks: int = 1
    # The kind of devices of its ranks here, and the devices, by the user's names.
    kind: str = "cpu"
    devices: tuple[str, ...] = ()
    peer_interface: str | None = None
    findings: tuple[Finding, ...] = ()


def examine(
    request: Request,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    allreduce: bool = False,
    log: Callable[[str], None] | None = None,
) -> Checkup:
    """Check this host for the job of REQUEST; with other hosts, wait TIMEOUT_S seconds for theirs.

    LOG gets a line about what takes longer than a second. Raises UsageError if the request is
    invalid, EnvironmentFault if the current folder is gone.
    """
    probe.current_folder()
    programs = software.read(environ)
    cards = nvidia.read()
    job = _job(request, environ, cards)
    members = job.roster.members if job.roster is not None else ()
    me = job.roster.me if job.roster is not None else 0
    has_peers = len(members) > 1
    feature = modes.BY_WORD[request.run_mode].feature
    proof = _proof(request, environ, programs, job, start=cards.cuda_start, log=log)
    is_alike = len({gpu.name for gpu in cards.gpus}) == 1
    is_proven = is_alike and proof is not None and not proof.failure and not proof.trouble
    results = [
        *job.findings,
        *gpus.judge(cards, has_others=job.kind not in {"cpu", "gpu"}),
        *software.judge(
            programs,
            cards,
            feature=None if feature is None else feature.name,
            is_proven=is_proven,
        ),
        *(
            gpu_check.judge(proof, programs.build, programs.python)
            if proof is not None and programs.build is not None
            else ()
        ),
        *machine.check(
            request.log_dir,
            ranks=job.ranks,
            has_peers=has_peers,
            has_rdma=bool(addresses.rdma_ports("/")),
        ),
        *_network(request, environ, job),
    ]
    if has_peers:
        card = _card(os.uname().nodename, programs, cards)
        address = members[me].host if hosts.is_loopback(members[me].host) else None
        key = Key(request.job_id, environ.get(TOKEN))
        check = PeerCheck(members, me, card, key=key, timeout_s=timeout_s)
        results += peers.judge(check.run(address, log), card)
    measured = None
    if allreduce:
        if log is not None:
            log("Measuring allreduces: ranks import Paddle, which takes some seconds.")
        measured = _allreduce(request, job, environ)
        results += transfers.judge(measured, cards)
    return Checkup(tuple(results), measured)


def _network(request: Request, environ: Mapping[str, str], job: _JobChecks) -> Iterator[Finding]:
    """Yield the findings about how this host reaches the others."""
    members = job.roster.members if job.roster is not None else ()
    has_peers = len(members) > 1
    others = [member.host for member in members if not hosts.is_address(member.host)]
    names = dict.fromkeys((os.uname().nodename, *(others if has_peers else ())))
    is_nccl = job.kind == "gpu" and request.backend in {"auto", "nccl"}
    yield from network.host_names(tuple(names))
    yield network.interface(
        network.interfaces(),
        job.peer_interface,
        {**environ, **dict(request.env), **_nccl(request)},
        has_peers=has_peers,
        has_rdma=bool(addresses.rdma_ports("/")),
        is_nccl=is_nccl,
    )
    yield from network.rdma(is_nccl=is_nccl)
    yield from network.ports(_ports(request, job.roster), has_peers=has_peers)


def _proof(
    request: Request,
    environ: Mapping[str, str],
    programs: Software,
    job: _JobChecks,
    *,
    start: CudaStart | None,
    log: Callable[[str], None] | None,
) -> GpuProof | None:
    """Let Paddle compute on at most two of the job's GPUs; None if it cannot use any."""
    if job.kind != "gpu" or not job.devices or programs.build is None or not programs.build.cuda:
        return None
    if start is None or start.trouble or start.code:
        return None
    if log is not None:
        log("Trying Paddle on the GPUs, which takes some seconds.")
    # With several instances (MIG) CUDA shows only one to a process.
    gpus = job.devices[: 1 if any(gpu.startswith("MIG-") for gpu in job.devices) else 2]
    environ_of_proof = {
        devices.ORDER: devices.DRIVERS_ORDER,
        **environ,
        **dict(request.env),
        **_nccl(request),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    return gpu_check.read(
        programs.python, [str(number) for number in range(len(gpus))], environ_of_proof
    )


def remark(environ: Mapping[str, str]) -> Callable[[str], None] | None:
    """Return a function that shows progress on a terminal; None in pipes and CI."""
    if environ.get("CI") or sys.stderr is None or not sys.stderr.isatty():
        return None
    return printing.remark


def preflight(request: Request, environ: Mapping[str, str]) -> None:
    """Print findings on standard error; EnvironmentFault if any would end the job."""
    results = examine(request, environ, timeout_s=_PREFLIGHT_S, log=remark(environ)).findings
    redact = secrets.of_launch(request, environ)
    grave = [finding for finding in results if finding.level == findings.ERROR]
    shown = (
        grave if request.quiet else [result for result in results if result.level != findings.OK]
    )
    for finding in shown:
        seen = finding.seen.removesuffix(".")
        text = redact(f"{finding.check}: {seen}; {finding.means}; fix: {finding.fix}")
        printing.remark(f"{finding.level}: {text}")
    if grave:
        count = "one thing" if len(grave) == 1 else f"{len(grave)} things"
        raise EnvironmentFault(
            f"--preflight: {count} would end the job, so nothing was started; "
            "`fleetrun doctor` shows all."
        )


def _job(request: Request, environ: Mapping[str, str], cards: Gpus) -> _JobChecks:
    """Return the job on this host; a reason why it cannot be planned becomes a finding."""
    if cards.is_stuck:
        # Another query would hang, too; there is a finding about it already.
        return _JobChecks()
    dry = request._replace(dry_run="table")
    try:
        engine = engines.find(request, environ, planner.places(request))
        facts = probe.read(request, environ, engine.hosts)
        share = planner.share(request, facts)
        slots = planner.slots(request, facts, share)
        if len(engine.hosts) > 1:
            # A dry run accepts any place among the hosts.
            hosts.place(engine.hosts, request, facts, options=engine.places.options)
        guessed = engines.find(dry, environ, planner.places(dry))
        roster = guessed.assign(guessed.ports(facts.pid), dry, facts, slots)
        if not engine.hosts:
            # Only the meeting knows the others.
            roster = roster._replace(members=(roster.members[roster.me],), me=0)
        plan = planner.plan(request, facts, share, roster)
    except EnvironmentFault as fault:
        words = str(fault)
        means = "a launch with this command line fails with that message"
        return _JobChecks(findings=(findings.error("job", words, means, "fleetrun --dry-run ..."),))
    ranks = [process.rank for process in plan.processes if process.rank is not None]
    on_hosts = f" on {len(roster.members)} hosts" if len(roster.members) > 1 else ""
    count = counted(len(plan.ranks), "process")
    seen = f"{count}{on_hosts}, {len(plan.processes)} here"
    return _JobChecks(
        roster=roster,
        ranks=len(plan.processes),
        kind=share.kind,
        devices=tuple(device.id for rank in ranks for device in rank.devices),
        peer_interface=facts.peer_interface,
        findings=(
            findings.ok("job", seen),
            *(
                findings.warning("job", note, "it changes what the job uses", "fleetrun --dry-run")
                for note in facts.notes
            ),
            *gpus.judge_plugins(facts.paddle_counts, facts.absent),
        ),
    )


def _nccl(request: Request) -> dict[str, str]:
    """Return the NCCL variables that REQUEST sets for the ranks."""
    return {f"NCCL_{name.removeprefix('NCCL_')}": value for name, value in request.nccl}


def _ports(request: Request, roster: Roster | None) -> list[tuple[int, str]]:
    """Return the job's ports here, each with the process that occupies it, if any."""
    if roster is None or (len(roster.members) == 1 and request.start_port is None):
        return []
    me = roster.members[roster.me]
    address = me.host if len(roster.members) > 1 and hosts.is_loopback(me.host) else None
    ports = []
    for port in me.ports:
        held = Ports(os.getpid())
        try:
            held.take((port,), address)
        except EnvironmentFault:
            ports.append((port, tcp.holder(port) or "a process that only root can identify"))
        else:
            ports.append((port, ""))
        finally:
            held.close()
    return ports


def _card(hostname: str, programs: Software, cards: Gpus) -> HostDescription:
    """Return this host's description for the other hosts."""
    build = programs.build
    return HostDescription(
        host=hostname,
        fleetrun=programs.fleetrun,
        python=programs.python_version,
        paddle="" if build is None else build.version,
        cuda="" if build is None else build.cuda,
        nccl="" if build is None else build.nccl,
        driver=cards.driver,
    )


def _allreduce(request: Request, job: _JobChecks, environ: Mapping[str, str]) -> Transfers:
    """Let two ranks here, or one on each host, sum numbers; return their measurements."""
    ranks = 2 if job.roster is None else max(len(job.roster.members), 2)
    backend = kinds.backends(job.kind)[0]
    if job.roster is None:
        return Transfers(backend, ranks, trouble="the job cannot be planned; see above")
    with tempfile.TemporaryDirectory(prefix="fleetrun-doctor-") as folder:
        out = Path(folder) / "measured.json"
        checker = Path(__file__).parents[1] / "inject" / "allreduce_check.py"
        words = [
            *_launch_options(request, job.roster, job),
            f"--log_dir={folder}/log",
            "--quiet",
            str(checker),
            str(out),
        ]
        variables = dict(environ)
        return _measured(words, variables, out, Transfers(backend, ranks))


def _launch_options(request: Request, roster: Roster, job: _JobChecks) -> Sequence[str]:
    """Return the launch options of the measuring ranks, which resemble JOB's."""
    words = [f"--env={name}={value}" for name, value in request.env]
    words += [f"--nccl={name}={value}" for name, value in request.nccl]
    if len(roster.members) > 1:
        words.append(f"--ips={','.join(member.host for member in roster.members)}")
        words.append(f"--start_port={min(roster.members[roster.me].ports)}")
        words.append(f"--host={roster.members[roster.me].host}")
        words.append("--nproc_per_node=1")
        return [*words, f"--{job.kind}s={job.devices[0]}"] if job.devices else words
    if len(job.devices) > 1:
        return [*words, f"--{job.kind}s={','.join(job.devices[:2])}"]
    # NCCL does not connect two ranks on one GPU.
    return [*words, "--nproc_per_node=2", "--device_kind=cpu"]


def _measured(
    words: Sequence[str], variables: Mapping[str, str], out: Path, planned: Transfers
) -> Transfers:
    """Launch WORDS; return PLANNED with the results in the file OUT, or why there are none."""
    with subprocess.Popen(
        [sys.executable, "-m", "fleetrun", *words],
        # A folder without a config file.
        cwd=out.parent,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as launcher:
        try:
            output = launcher.communicate(timeout=_ALLREDUCE_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            # The launcher ends its ranks.
            launcher.terminate()
            output = launcher.communicate()[0].decode(errors="replace")
            return planned._replace(trouble=f"no result within {_ALLREDUCE_S:g} s")
        except BaseException:
            launcher.terminate()
            launcher.wait()
            raise
    lines = [line for line in output.splitlines() if line.startswith("fleetrun: ")]
    if launcher.returncode:
        last = "; ".join(line.removeprefix("fleetrun: ") for line in lines[:_LAST_LINES])
        return planned._replace(trouble=f"exit code {launcher.returncode} ({last})")
    try:
        reported = json.loads(out.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # Rank 0 is on another host.
        return planned
    rows = tuple(Transfer(*row) for row in reported["rows"])
    return Transfers(reported["backend"], reported["ranks"], rows, reported["link"])
