"""Turns the variables of a cluster's engine into options, and refuses contradictory ones.

Pure. In a Slurm step `fleetrun train.py` equals `fleetrun --ips=n1,n2 --host=n1 train.py`.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Mapping

from fleetrun.engines import detect
from fleetrun.engines.detect import Detected, SourcedValue
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
    ranks = _of_tasks(explicit, detected, notes)
    if explicit["ips"].is_set:
        return ranks
    implied: list[Given] = []
    if len(detected.hosts) > 1:
        notes.append(f"{detected.engine} names the hosts: {detected.hosts_from}.")
        implied += _given("ips", ",".join(detected.hosts), detected.hosts_from)
        if detected.node is not None:
            implied += _given("host", detected.hosts[detected.node], detected.node_from)
        if (port := _port(detected)) is not None:
            implied += _given("start_port", str(port), detected.job)
    elif not detected.hosts:
        if detected.nnodes is not None and detected.nnodes > 1:
            implied += _given("nnodes", str(detected.nnodes), detected.nnodes_from)
        if detected.node is not None and (implied or explicit["nnodes"].is_set):
            implied += _given("rank", str(detected.node), detected.node_from)
    return (*ranks, *(option for option in implied if not explicit[option.name].is_set))


def _of_tasks(
    explicit: Mapping[str, Given], detected: Detected, notes: list[str]
) -> tuple[Given, ...]:
    """Return the number of ranks here if the engine has started a task for each."""
    if not detect.has_tasks(detected):
        return ()
    tasks = f"{detected.here} tasks here ({detected.here_from})"
    started = f"{detected.engine} has started {tasks}, one a rank"
    for name in ("server_num", "trainer_num", "detach", "hosts", "hostfile"):
        if explicit[name].is_set:
            raise UsageError(
                explicit[name].blame(
                    f"{started}; start one on each host instead: `{detected.spread}`."
                )
            )
    ranks = explicit["nproc_per_node"]
    if not ranks.is_set:
        notes.append(f"{started}.")
        return tuple(_given("nproc_per_node", str(detected.here), detected.here_from))
    if ranks.raw.strip() != str(detected.here):
        raise UsageError(
            ranks.blame(f"{started}; leave it out, or start one: `{detected.spread}`.")
        )
    return ()


def _port(detected: Detected) -> int | None:
    return None if detected.job is None else first_port(detected.job.value, detected.step)


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
    if nnodes.is_set and nnodes.raw.strip() == "1":
        return True
    if ips.is_set and len(_listed(ips)) == 1:
        return True
    return explicit["servers"].is_set or explicit["trainers"].is_set


def _check(explicit: Mapping[str, Given], detected: Detected) -> None:
    """Raise UsageError for EXPLICIT options about hosts that contradict DETECTED."""
    if detected.nnodes is not None:
        allocation = (
            f"{detected.engine} gives this job {detected.nnodes} hosts ({detected.nnodes_from})"
        )
        ips, nnodes = explicit["ips"], explicit["nnodes"]
        if ips.is_set and len(_listed(ips)) != detected.nnodes:
            raise UsageError(
                ips.blame(f"{allocation}, and {len(_listed(ips))} are listed; leave the list out.")
            )
        if nnodes.is_set and not _allows(nnodes.raw, detected.nnodes):
            raise UsageError(
                nnodes.blame(
                    f"{allocation}; leave it out, or --nnodes=1 makes each a job of its own."
                )
            )
    rank = explicit["rank"]
    if detected.node is None or not rank.is_set or explicit["ips"].is_set:
        return
    if rank.raw.strip() not in {"-1", str(detected.node)}:
        raise UsageError(
            rank.blame(
                f"{detected.engine} says {detected.node} ({detected.node_from}); leave it out."
            )
        )


def _allows(raw: str, count: int) -> bool:
    """Whether RAW, a number of hosts or a range of them, allows COUNT; others judge bad ones."""
    low, colon, high = raw.strip().partition(":")
    if len(raw) > _LONGEST or not (low.isdecimal() and (not colon or high.isdecimal())):
        return True
    return int(low) <= count <= int(high if colon else low)


def _listed(option: Given) -> list[str]:
    return option.raw.replace(",", " ").split()


def _given(name: str, raw: str, value: SourcedValue | None) -> list[Given]:
    """Return the option NAME with the text RAW, which VALUE has set."""
    return [Given(name, raw, flag(name), f"${value.source}" if value else DEFAULT)]
