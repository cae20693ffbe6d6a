"""Several hosts that meet at the address of --master; each knows only itself at first."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from fleetrun.engines import SelectedEngine
from fleetrun.engines.local import alone
from fleetrun.engines.ports import Ports
from fleetrun.host import addresses
from fleetrun.model import COMMAND_LINE, Endpoint, Facts, Request, Roster
from fleetrun.plan import hosts
from fleetrun.plan.layout import ModeHosts, Slots
from fleetrun.rundir import secrets
from fleetrun.rundir.variables import TOKEN

NAME = "master"
# Options that are this host's own.
_OWN = ("master", "host", "rank")
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
        # Far from those that the ranks will get.
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
    named = [
        given for given in request.given if given.source == COMMAND_LINE and given.name not in _OWN
    ]
    is_command = os.path.basename(sys.argv[0]) == "fleetrun"
    own = ["fleetrun"] if is_command else [os.path.basename(sys.executable), "-m", "fleetrun"]
    words = [*own, f"--master={request.master}"]
    if not any(given.name == "nnodes" for given in named):
        words.append(f"--nnodes={request.nnodes}")
    words += [
        given.typed if given.raw == "true" else f"{given.typed}={given.raw}" for given in named
    ]
    shown = secrets.conceal((*words, *request.script.words))
    line = " ".join(map(shlex.quote, shown))
    notes = [f"with the same {TOKEN}"] if os.environ.get(TOKEN) else []
    notes += ["with what *** stands for"] if secrets.HIDDEN in line else []
    conditions = f", {' and '.join(notes)}" if notes else ""
    return (
        f"This host is the first of {request.nnodes}. Run this on the others{conditions}:\n{line}"
    )


def assign(
    engine: SelectedEngine, held: Ports, request: Request, facts: Facts, slots: Slots
) -> Roster:
    """Return this host alone with its ports, free ones or those from --start_port on.

    `host` is empty where its address for the others is not known; the session finds it.
    """
    host = request.host or ("" if facts.network is None else facts.network.ip)
    point = hosts.meets_at(request)
    if engine.dry and not host and point is not None and hosts.is_own(point.host, facts):
        host = point.host
    roster = alone(held, slots, request, host, several=True)._replace(engine=NAME)
    return _guessed(roster, request) if engine.dry else roster


def _guessed(alone_here: Roster, request: Request) -> Roster:
    """Return the roster of a dry run: all hosts, with placeholders for what the meeting decides."""
    least, most = hosts.bounds(request.nnodes)
    decided = f"the meeting at {request.master} decides the hosts' addresses and ports"
    me = min(request.rank or 0, most - 1)
    (own,) = alone_here.members
    members = [own._replace(host=f"HOST-{place}") for place in range(most)]
    members[me] = own._replace(host=own.host or f"HOST-{me}")
    is_placed = request.rank is not None
    stands_for = "HOST-N stands for the address of host N, and ports may differ."
    notes = [f"a dry run meets nobody, and {decided}: {stands_for}"]
    if not is_placed:
        notes.append("The meeting also decides this host's place; it is shown as host 0 (--rank).")
    if least < most:
        notes.append(f"The job starts with {least} to {most} hosts; {most} are shown.")
    master = Endpoint(members[0].host, alone_here.master.port)
    return alone_here._replace(members=tuple(members), me=me, master=master, notes=tuple(notes))
