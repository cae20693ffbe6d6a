"""Turns the variables of a cluster's engine into options.

Pure. In a Slurm step `fleetrun train.py` equals `fleetrun --ips=n1,n2 --host=n1 train.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleetrun.engines import detect
from fleetrun.engines.detect import Detected
from fleetrun.errors import UsageError
from fleetrun.model import Given, flag

# Jobs that share a host get different port ranges without coordination: _PORTS ports each, above
# those of services and below Kubernetes' NodePorts (30000).
_FIRST_PORT, _LAST_PORT, _PORTS = 10240, 29999, 128
# Separates the steps of a job from the jobs with the next numbers.
_STRIDE = 37


def detected_options(
    explicit: Mapping[str, Given], detected: Detected, notes: list[str], *, is_dry: bool
) -> tuple[Given, ...]:
    """Return the options that DETECTED implies besides EXPLICIT ones; remarks go to NOTES.

    Raises UsageError if the engine has started too many or too few tasks.
    """
    problem = None if is_dry else detect.unspread(detected)
    if problem is not None and not detected.can_spread:
        raise UsageError(problem)
    implied: list[tuple[str, object, str]] = []
    if detect.has_tasks(detected):
        _check_tasks(explicit, detected)
        implied.append(("nproc_per_node", detected.here, "here"))
    if problem is None and not explicit["ips"].is_set:
        implied += _hosts(detected, is_counted=explicit["nnodes"].is_set)
    # Launchers that are still to be started will ask for themselves.
    if len(detected.hosts) > 1 and implied:
        notes.append(f"{detected.engine} names the hosts: {detected.sources['hosts']}.")
    return tuple(
        Given(name, str(raw), flag(name), f"${detected.sources[field].source}")
        for name, raw, field in implied
        if not explicit[name].is_set
    )


def _hosts(detected: Detected, *, is_counted: bool) -> Iterator[tuple[str, object, str]]:
    """Yield the options about hosts that DETECTED implies, with their fields."""
    is_several = (detected.nnodes or 1) > 1
    if len(detected.hosts) > 1:
        yield "ips", ",".join(detected.hosts), "hosts"
        if detected.node is not None:
            yield "host", detected.hosts[detected.node], "node"
        job = detected.sources.get("job")
        port = None if job is None else first_port(job.value, detected.step)
        if port is not None:
            yield "start_port", port, "job"
    elif not detected.hosts:
        if is_several:
            yield "nnodes", detected.nnodes, "nnodes"
        if detected.node is not None and (is_several or is_counted):
            yield "rank", detected.node, "node"


def _check_tasks(explicit: Mapping[str, Given], detected: Detected) -> None:
    """Raise UsageError for EXPLICIT options that do not fit a task for each rank."""
    for name in ("server_num", "trainer_num", "detach", "hosts", "hostfile", "nproc_per_node"):
        given = explicit[name]
        is_right = name == "nproc_per_node" and given.raw.strip() == str(detected.here)
        if given.is_set and not is_right:
            tasks = f"{detected.here} tasks here ({detected.sources['here']}), one a rank"
            problem = f"{detected.engine} has started {tasks}; leave it out, or start one"
            raise UsageError(given.blame(f"{problem} on each host: `{detected.spread}`."))


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
    is_one = ips.is_set and len(ips.raw.replace(",", " ").split()) == 1
    if is_one or (nnodes.is_set and nnodes.raw.strip() == "1"):
        return True
    return explicit["servers"].is_set or explicit["trainers"].is_set
