"""Several hosts that meet at the address of --master; each knows only itself at first."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from fleetrun.engines.listed import alone
from fleetrun.engines.ports import Ports
from fleetrun.host import addresses
from fleetrun.model import COMMAND_LINE, Endpoint, Facts, Request, Roster
from fleetrun.plan import hosts
from fleetrun.plan.layout import ModeHosts, Slots
from fleetrun.rundir import secrets
from fleetrun.rundir.variables import TOKEN

# Options that are this host's own.
_OWN = ("master", "nnodes", "host", "rank")
# Sets the port where hosts meet far from those that the ranks will get.
_APART = 20011


def find(
    request: Request, _environ: Mapping[str, str], places: ModeHosts
) -> tuple[str, ...] | None:
    """Return no host, as none is known by name; None where they do not meet at --master."""
    is_meeting = hosts.meets_at(request) is not None and not places.hosts
    return () if is_meeting else None


def at_this_host(request: Request) -> Request:
    """Return REQUEST with an address and a port of this host as the rendezvous."""
    port = hosts.own_port(request.master)
    if not port:
        held = Ports(os.getpid() + _APART)
        (port,) = held.free(1)
        held.close()
    master = f"{addresses.own(request)}:{port}"
    settings = [
        setting._replace(value=master) if setting.name == "master" else setting
        for setting in request.settings
    ]
    return request._replace(master=master, settings=tuple(settings))


def invitation(request: Request) -> str:
    """Return the command for the other hosts of REQUEST."""
    is_command = os.path.basename(sys.argv[0]) == "fleetrun"
    own = ["fleetrun"] if is_command else [os.path.basename(sys.executable), "-m", "fleetrun"]
    words = [*own, f"--master={request.master}", f"--nnodes={request.nnodes}"]
    words += [
        given.typed if given.raw == "true" else f"{given.typed}={given.raw}"
        for given in request.given
        if given.source == COMMAND_LINE and given.name not in _OWN
    ]
    line = shlex.join(secrets.conceal((*words, *request.script.words)))
    same = f" with the same {TOKEN}" if os.environ.get(TOKEN) else ""
    return f"This host is the first of {request.nnodes}. Run this on the others{same}:\n{line}"


def assign(_places: ModeHosts, held: Ports, request: Request, facts: Facts, slots: Slots) -> Roster:
    """Return this host alone with its ports, free ones or those from --start_port on.

    `host` is empty where its address for the others is not known; the session finds it. A dry run
    has all hosts, with placeholders for what the meeting decides.
    """
    host = request.host or ("" if facts.network is None else facts.network.ip)
    roster = alone(held, slots, request, host, several=True)._replace(engine="master")
    if request.dry_run is None:
        return roster
    point = hosts.meets_at(request)
    if not host and point is not None and hosts.is_own(point.host, facts):
        host = point.host
    _, most = hosts.bounds(request.nnodes)
    me = min(request.rank or 0, most - 1)
    (own,) = roster.members
    members = [own._replace(host=f"HOST-{place}") for place in range(most)]
    members[me] = own._replace(host=host or f"HOST-{me}")
    note = (
        f"a dry run meets nobody: the meeting at {request.master} decides how many hosts there "
        "are, their addresses, ports and places; HOST-N stands for the address of host N."
    )
    master = Endpoint(members[0].host, roster.master.port)
    return roster._replace(members=tuple(members), me=me, master=master, notes=(note,))
