"""The hosts of a job by ssh, and the arguments of the launcher on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.engines import detect
from fleetrun.errors import UsageError
from fleetrun.model import COMMAND_LINE, Request, flag
from fleetrun.plan import hostfile, kinds, origin
from fleetrun.plan.environment import is_identity
from fleetrun.plan.hostfile import HostEntry
from fleetrun.plan.hosts import bounds
from fleetrun.rundir.variables import JOB, STOP_AFTER, STRATEGY, TOKEN, VERIFY

# Options of the head alone; the others go to each launcher.
_OURS = ("hosts", "hostfile", "ssh", "nnodes")
# Options that the head sets for each launcher.
_GIVEN = ("ips", "host", "rank", "master")
# Variables to forward to the hosts.
_SENT = ("PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "OMP_")
_SENT_TOO = ("PYTHONPATH", "LD_LIBRARY_PATH", kinds.ROOT, STRATEGY, STOP_AFTER, VERIFY)


def listed(request: Request) -> tuple[HostEntry, ...]:
    """Return the hosts of REQUEST."""
    if request.hosts and request.hostfile:
        raise UsageError(f"--hosts and --hostfile={request.hostfile}: give one of them.")
    option = "--hosts" if request.hosts else "--hostfile"
    for given in request.given:
        if given.source == COMMAND_LINE and given.name in _GIVEN:
            raise UsageError(
                f"{option} names the hosts to start launchers on, and determines {given.typed} "
                f"itself: omit {given.typed}, or {option} (--host is the address of this host)."
            )
    if request.hostfile:
        try:
            with open(request.hostfile, encoding="utf-8") as file:
                hosts = hostfile.read(file.read(), request.hostfile)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"--hostfile={request.hostfile} cannot be read ({why}).") from None
    else:
        hosts = hostfile.parse(request.hosts or "")
    least, most = bounds(request.nnodes)
    if not least <= len(hosts) <= most and request.nnodes != "1":
        raise UsageError(
            f"{origin.option(request, 'nnodes')}: {option} names {len(hosts)} "
            f"host{'s' * (len(hosts) > 1)}; their number must be within MIN:MAX."
        )
    return hosts


def least(request: Request, hosts: int) -> int:
    """Return how many of HOSTS the job of REQUEST needs at least."""
    return hosts if request.nnodes == "1" else bounds(request.nnodes)[0]


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ENVIRON to forward to the hosts: those that training reads."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_SENT) and not is_identity(name) and detect.is_remembered(name))
        or (name in _SENT_TOO and JOB not in environ)
        # Ranks have none; processes that they start on other hosts have their own.
        or name == TOKEN
    }


def arguments(
    request: Request, host: HostEntry, addresses: Sequence[str], index: int
) -> tuple[str, ...]:
    """Return the arguments of the launcher on HOST, at INDEX of ADDRESSES."""
    typed = [given for given in request.given if given.source == COMMAND_LINE]
    words: list[str] = []
    if len(addresses) > 1:
        words += [f"--ips={','.join(addresses)}", f"--host={addresses[index]}"]
        needed = least(request, len(addresses))
        if needed < len(addresses):
            words.append(f"--nnodes={needed}:{len(addresses)}")
    if host.slots is not None and "nproc_per_node" not in {given.name for given in typed}:
        words.append(f"--nproc_per_node={host.slots}")
    words += [f"{flag(given.spelling)}={given.raw}" for given in typed if given.name not in _OURS]
    return (*words, "--", *request.script.words)
