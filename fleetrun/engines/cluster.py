"""Turns the variables of a cluster's engine into options, and refuses contradictory ones.

Pure. In a Slurm step `fleetrun train.py` equals `fleetrun --ips=n1,n2 --host=n1 train.py`.
"""

# No `from __future__ import annotations` here, for the reason given in options.py.
from collections.abc import Mapping

from fleetrun import options
from fleetrun.engines import detect
from fleetrun.engines.detect import Detected, SourcedValue
from fleetrun.errors import UsageError
from fleetrun.options import RawOption

# Jobs that share a host have different port ranges, without asking each other: each has _PORTS
# ports, above those of services and below Kubernetes' NodePorts (30000).
_FIRST_PORT, _LAST_PORT, _PORTS = 10240, 29999, 128
# Makes the steps of a job differ from those of the jobs with the next numbers.
_STRIDE = 37
# Two numbers of hosts with a colon are shorter.
_LONGEST = 40


def detected_options(
    said: Mapping[str, RawOption], found: Detected, notes: list[str], *, is_dry: bool
) -> tuple[RawOption, ...]:
    """Return the options that FOUND implies, in addition to those SAID; remarks go to NOTES.

    Raises UsageError where FOUND contradicts what is said, or has started too many or too few.
    """
    problem = detect.unspread(found)
    if problem is not None and not is_dry and not found.can_spread:
        raise UsageError(problem)
    _check(said, found)
    if problem is not None and not is_dry:
        # The launchers that are going to be started ask themselves.
        return ()
    ranks = _of_tasks(said, found, notes)
    if _is_set(said["ips"]):
        return ranks
    given: list[RawOption] = []
    if len(found.hosts) > 1:
        notes.append(f"{found.engine} names the hosts: {found.hosts_from}.")
        given += _given("ips", ",".join(found.hosts), found.hosts_from)
        if found.node is not None:
            given += _given("host", found.hosts[found.node], found.node_from)
        if (port := _port(found)) is not None:
            given += _given("start_port", str(port), found.job)
    elif not found.hosts:
        if found.nnodes is not None and found.nnodes > 1:
            given += _given("nnodes", str(found.nnodes), found.nnodes_from)
        if found.node is not None and (given or _is_set(said["nnodes"])):
            given += _given("rank", str(found.node), found.node_from)
    return (*ranks, *(one for one in given if not _is_set(said[one.option.name])))


def _of_tasks(
    said: Mapping[str, RawOption], found: Detected, notes: list[str]
) -> tuple[RawOption, ...]:
    """Return the number of ranks here if the engine has started a task for each."""
    if not detect.has_tasks(found):
        return ()
    started = f"{found.engine} has started {found.here} tasks here ({found.here_from}), one a rank"
    for name in ("server_num", "trainer_num", "detach", "hosts", "hostfile"):
        if _is_set(said[name]):
            raise UsageError(
                said[name].blame(f"{started}; start one on each host instead: `{found.spread}`.")
            )
    ranks = said["nproc_per_node"]
    if not _is_set(ranks):
        notes.append(f"{started}.")
        return tuple(_given("nproc_per_node", str(found.here), found.here_from))
    if ranks.raw.strip() != str(found.here):
        raise UsageError(ranks.blame(f"{started}; leave it out, or start one: `{found.spread}`."))
    return ()


def _port(found: Detected) -> int | None:
    return None if found.job is None else first_port(found.job.value, found.step)


def first_port(job: str, step: int = 0) -> int | None:
    """Return the first port of a STEP of JOB; None if it has no number.

    >>> first_port("4711.server"), first_port("4712"), first_port("4712", 1), first_port("train")
    (21888, 22016, 26752, None)
    """
    digits = job[: len(job) - len(job.lstrip("0123456789"))]
    if not digits:
        return None
    number = int(digits) + step * _STRIDE
    return _FIRST_PORT + number % ((_LAST_PORT - _FIRST_PORT) // _PORTS) * _PORTS


def is_left_out(said: Mapping[str, RawOption]) -> bool:
    """Whether to ignore the engine: the job has one host, or lists its processes."""
    nnodes, ips = said["nnodes"], said["ips"]
    if _is_set(nnodes) and nnodes.raw.strip() == "1":
        return True
    if _is_set(ips) and len(_listed(ips)) == 1:
        return True
    return _is_set(said["servers"]) or _is_set(said["trainers"])


def _check(said: Mapping[str, RawOption], found: Detected) -> None:
    """Refuse options SAID about hosts that contradict FOUND."""
    if found.nnodes is not None:
        gives = f"{found.engine} gives this job {found.nnodes} hosts ({found.nnodes_from})"
        ips, nnodes = said["ips"], said["nnodes"]
        if _is_set(ips) and len(_listed(ips)) != found.nnodes:
            raise UsageError(
                ips.blame(f"{gives}, and {len(_listed(ips))} are listed; leave the list out.")
            )
        if _is_set(nnodes) and not _allows(nnodes.raw, found.nnodes):
            raise UsageError(
                nnodes.blame(f"{gives}; leave it out, or --nnodes=1 makes each a job of its own.")
            )
    rank = said["rank"]
    if found.node is None or not _is_set(rank) or _is_set(said["ips"]):
        return
    if rank.raw.strip() not in {"-1", str(found.node)}:
        raise UsageError(
            rank.blame(f"{found.engine} says {found.node} ({found.node_from}); leave it out.")
        )


def _allows(raw: str, count: int) -> bool:
    """Whether RAW, a number of hosts or a range of them, allows COUNT; others judge bad ones."""
    low, colon, high = raw.strip().partition(":")
    if len(raw) > _LONGEST or not (low.isdecimal() and (not colon or high.isdecimal())):
        return True
    return int(low) <= count <= int(high if colon else low)


def _is_set(given: RawOption) -> bool:
    return given.source != "default" and bool(given.raw.strip())


def _listed(given: RawOption) -> list[str]:
    return given.raw.replace(",", " ").split()


def _given(name: str, raw: str, said: SourcedValue | None) -> list[RawOption]:
    """Return the option NAME with the text SAID."""
    option = options.find(name)
    source = f"${said.source}" if said else "default"
    return [RawOption(option, raw, option.flag, source)]
