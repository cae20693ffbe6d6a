"""Turns the variables of a cluster's engine into options, and refuses contradictory ones.

Pure. In a Slurm step `fleetrun train.py` equals `fleetrun --ips=n1,n2 --host=n1 train.py`.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Iterator, Mapping

from fleetrun.engines import detect
from fleetrun.engines.detect import Detected
from fleetrun.errors import UsageError
from fleetrun.model import DEFAULT, Given, flag

# Jobs that share a host get different port ranges without coordination: _PORTS ports each, above
# those of services and below Kubernetes' NodePorts (30000).
_FIRST_PORT, _LAST_PORT, _PORTS = 10240, 29999, 128
# Separates the steps of a job from the jobs with the next numbers.
_STRIDE = 37
# A range of numbers of hosts is shorter.
_LONGEST = 40


def detected_options(
    explicit: Mapping[str, Given], detected: Detected, notes: list[str], *, is_dry: bool
) -> tuple[Given, ...]:
    """Return the options that DETECTED implies besides EXPLICIT ones; remarks go to NOTES.

    Raises UsageError if it contradicts them, or the engine has started too many or too few tasks.
    """
    problem = detect.unspread(detected)
    if problem is not None and not is_dry and not detected.can_spread:
        raise UsageError(problem)
    _check(explicit, detected)
    if problem is not None and not is_dry:
        # The launchers to be started will ask for themselves.
        return ()
    implied: list[Given] = []
    if detect.has_tasks(detected):
        _check_tasks(explicit, detected, notes)
        implied.append(_given(detected, "nproc_per_node", detected.here, "here"))
    if not explicit["ips"].is_set:
        implied += _hosts(explicit, detected, notes)
    return tuple(option for option in implied if not explicit[option.name].is_set)


def _hosts(explicit: Mapping[str, Given], detected: Detected, notes: list[str]) -> Iterator[Given]:
    """Yield the options about hosts that DETECTED implies."""
    if len(detected.hosts) > 1:
        notes.append(f"{detected.engine} names the hosts: {detected.sources['hosts']}.")
        yield _given(detected, "ips", ",".join(detected.hosts), "hosts")
        if detected.node is not None:
            yield _given(detected, "host", detected.hosts[detected.node], "node")
        job = detected.sources.get("job")
        port = None if job is None else first_port(job.value, detected.step)
        if port is not None:
            yield _given(detected, "start_port", port, "job")
    elif not detected.hosts:
        is_several = (detected.nnodes or 1) > 1
        if is_several:
            yield _given(detected, "nnodes", detected.nnodes, "nnodes")
        if detected.node is not None and (is_several or explicit["nnodes"].is_set):
            yield _given(detected, "rank", detected.node, "node")


def _given(detected: Detected, name: str, raw: object, field: str) -> Given:
    """Return the option NAME with the value RAW, which the variable of FIELD has set."""
    source = detected.sources.get(field)
    return Given(name, str(raw), flag(name), f"${source.source}" if source else DEFAULT)


def _check_tasks(explicit: Mapping[str, Given], detected: Detected, notes: list[str]) -> None:
    """Raise UsageError for EXPLICIT options that do not fit a task for each rank."""
    tasks = f"{detected.here} tasks here ({detected.sources['here']})"
    started = f"{detected.engine} has started {tasks}, one a rank"
    for name in ("server_num", "trainer_num", "detach", "hosts", "hostfile"):
        if explicit[name].is_set:
            problem = f"{started}; start one on each host instead: `{detected.spread}`."
            raise UsageError(explicit[name].blame(problem))
    ranks = explicit["nproc_per_node"]
    if not ranks.is_set:
        notes.append(f"{started}.")
    elif ranks.raw.strip() != str(detected.here):
        problem = f"{started}; leave it out, or start one: `{detected.spread}`."
        raise UsageError(ranks.blame(problem))


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


def is_left_out(explicit: Mapping[str, Given]) -> bool:
    """Whether to ignore the engine: the job has one host, or lists its processes."""
    nnodes, ips = explicit["nnodes"], explicit["ips"]
    if (nnodes.is_set and nnodes.raw.strip() == "1") or (ips.is_set and len(_listed(ips)) == 1):
        return True
    return explicit["servers"].is_set or explicit["trainers"].is_set


def _check(explicit: Mapping[str, Given], detected: Detected) -> None:
    """Raise UsageError for EXPLICIT options about hosts that contradict DETECTED."""
    ips, nnodes, rank = explicit["ips"], explicit["nnodes"], explicit["rank"]
    if detected.nnodes is not None:
        hosts = f"{detected.nnodes} hosts ({detected.sources['nnodes']})"
        allocation = f"{detected.engine} gives this job {hosts}"
        if ips.is_set and len(_listed(ips)) != detected.nnodes:
            problem = f"{allocation}, and {len(_listed(ips))} are listed; leave the list out."
            raise UsageError(ips.blame(problem))
        if nnodes.is_set and not _allows(nnodes.raw, detected.nnodes):
            problem = f"{allocation}; leave it out, or --nnodes=1 makes each a job of its own."
            raise UsageError(nnodes.blame(problem))
    if detected.node is None or not rank.is_set or ips.is_set:
        return
    if rank.raw.strip() not in {"-1", str(detected.node)}:
        told = f"{detected.engine} says {detected.node} ({detected.sources['node']})"
        raise UsageError(rank.blame(f"{told}; leave it out."))


def _allows(raw: str, count: int) -> bool:
    """Whether RAW, a number of hosts or a range of them, allows COUNT; others judge bad ones."""
    low, colon, high = raw.strip().partition(":")
    if len(raw) > _LONGEST or not (low.isdecimal() and (not colon or high.isdecimal())):
        return True
    return int(low) <= count <= int(high if colon else low)


def _listed(option: Given) -> list[str]:
    return option.raw.replace(",", " ").split()
