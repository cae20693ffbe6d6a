"""The only reader of this host before a launch: devices, addresses, ports, the script."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError
from fleetrun.host import (
    addresses,
    devices,
    paddles,
    plugins,
    processors,
    scripts,
)
from fleetrun.host.nvml import Library
from fleetrun.model import Facts, Request
from fleetrun.plan import communication, hosts, modes
from fleetrun.rundir.variables import ASSUME_DEVICES, PYTHON
from fleetrun.text import visible


def _remark(text: str) -> None:
    """Print TEXT to the user at once."""
    if sys.stderr is not None:
        print(f"fleetrun: {visible(text)}", file=sys.stderr, flush=True)


def read(
    request: Request,
    environ: Mapping[str, str],
    names: Sequence[str] = (),
    *,
    root: str = "/",
    nvml: Callable[[], Library] | None = None,
    log: Callable[[str], None] = _remark,
    timeout_s: float = 30.0,
    plugins_timeout_s: float = 300.0,
) -> Facts:
    """Collect the facts about this host that planning REQUEST needs.

    NAMES are the job's hosts that are known by name. NVIDIA's driver is queried in parallel; LOG
    gets a line if it is slow, and after TIMEOUT_S seconds it counts as stuck. Paddle is asked as
    well, for up to PLUGINS_TIMEOUT_S seconds, if it may have plug-ins.
    """
    assumed = environ.get(ASSUME_DEVICES)
    if assumed and request.dry_run is None:
        raise UsageError(
            f"{ASSUME_DEVICES}={assumed}: devices are assumed only for --dry-run; unset it "
            "to start on those that are here."
        )
    cwd = _here(root)
    facts = _identity(environ, cwd)
    facts = facts._replace(
        device_counts=devices.assumed(assumed) if assumed else devices.by_files(root),
        program=scripts.find(request.script, cwd, environ),
    )
    inquiry = None if assumed else devices.ask_driver(request, root, nvml)
    facts = _with_paddle(request, facts)
    if not assumed:
        facts = _with_plugins(request, facts, log, plugins_timeout_s)
    facts = _with_network(request, facts, names, root)
    if inquiry is not None:
        survey = inquiry.result(log, timeout_s=timeout_s)
        facts = devices.with_gpus(facts, survey, root)
    elif not assumed:
        facts = devices.with_amd(facts, request, root, sys.path)
    if facts.device_counts.get("gpu"):
        hcas, rdma = addresses.rdma(root)
        facts = facts._replace(hcas=hcas, rdma=rdma)
    if request.bind != "none":
        facts = facts._replace(processors=processors.read(root, facts.gpus))
    return facts


def reach(request: Request, environ: Mapping[str, str], names: Sequence[str] = ()) -> Facts:
    """Return only the facts that are needed to contact the other hosts.

    For a host with a fault, which it can report to them only there.
    """
    try:
        cwd = current_folder()
    except FleetrunError:
        cwd = "/"
    facts = _identity(environ, cwd)
    try:
        return _with_network(request, facts, names)
    except FleetrunError:
        return _with_network(request._replace(network=None), facts, names)


def _identity(environ: Mapping[str, str], cwd: str) -> Facts:
    """Return what this process knows of itself."""
    return Facts(
        environ=environ,
        cwd=cwd,
        hostname=os.uname().nodename,
        python=environ.get(PYTHON) or sys.executable,
        pid=os.getpid(),
        started_utc=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
        cpus=len(os.sched_getaffinity(0)),
        device_counts={},
    )


def _with_network(request: Request, facts: Facts, names: Sequence[str], root: str = "/") -> Facts:
    """Complete FACTS with the route to the other hosts, if there may be any."""
    rendezvous = hosts.meets_at(request)
    if not names and (request.host is not None or rendezvous is not None):
        # The route to the rendezvous is the route to all hosts.
        peers = () if rendezvous is None else (rendezvous.host,)
        names = peers if request.host is None else (request.host, *peers)
    is_named = bool(communication.named(request, facts.environ))
    if request.network is None and all(map(hosts.is_loopback, names)) and not is_named:
        return facts

    return addresses.with_network(facts, names, request, root)


def _here(root: str) -> str:
    """Return the current folder; raises EnvironmentFault if processes cannot be supervised."""
    if not os.path.isdir(os.path.join(root, "proc/self/fd")):
        raise EnvironmentFault(
            "/proc is not mounted, and without it processes cannot be supervised: "
            "`mount -t proc proc /proc`."
        )
    return current_folder()


def current_folder() -> str:
    """Return the current folder; raises EnvironmentFault if it is gone."""
    try:
        return os.getcwd()
    except OSError as error:
        raise EnvironmentFault(
            f"The current folder cannot be found ({error.strerror}): it may have been removed or "
            "replaced; go to one that is there (`cd`)."
        ) from None


def _with_plugins(
    request: Request, facts: Facts, log: Callable[[str], None], timeout_s: float
) -> Facts:
    """Complete FACTS with the devices that Paddle counts more precisely than device files."""
    signs = plugins.find(request, facts)
    if plugins.is_worth_asking(request, signs):
        facts = plugins.with_devices(facts, request, signs, log=log, timeout_s=timeout_s)
    return facts._replace(has_plugins=signs.root != "" or bool(facts.paddle_counts))


def _with_paddle(request: Request, facts: Facts) -> Facts:
    """Complete FACTS with what this Paddle lacks, if it matters to this job."""
    feature = modes.BY_WORD[request.run_mode].feature
    paddle = None if feature is None else paddles.find(sys.path)
    if feature is None or paddle is None or not paddles.lacks(paddle, feature.symbol):
        return facts
    return facts._replace(paddle_lacking=paddle.version)
