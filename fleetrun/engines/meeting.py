"""Several hosts that meet at the address of --master; each knows only itself at first."""

from __future__ import annotations

import os

from fleetrun.engines.local import alone
from fleetrun.plan import hosts
from fleetrun.records.variables import TOKEN
from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.engines import SelectedEngine
    from fleetrun.engines.ports import Ports
    from fleetrun.model import Facts, Request, Roster
    from fleetrun.plan.layout import ModeHosts, Slots

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
    from fleetrun.engines.ports import Ports  # only on the first of the hosts
    from fleetrun.probe import addresses

    port = hosts.own_port(request.master)
    if not port:
        # Far from those that the ranks will get.
        held = Ports(os.getpid() + _APART, within=request.port_range)
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
    from fleetrun import argv  # only on the first of the hosts
    from fleetrun.plan import shell
    from fleetrun.records import arguments

    scanned = argv.scan(request.typed)
    named = [setting for setting in scanned.settings if setting.option.target not in _OWN]
    words = ["fleetrun", f"--master={request.master}"]
    if not any(setting.option.target == "nnodes" for setting in named):
        words.append(f"--nnodes={request.nnodes}")
    words += [
        setting.typed if setting.raw == setting.option.bare else f"{setting.typed}={setting.raw}"
        for setting in named
    ]
    script = () if scanned.script_at is None else request.typed[scanned.script_at :]
    shown, hidden = arguments.conceal((*words, *script))
    line = " ".join(map(shell.quoted, shown))
    notes = [f"with the same {TOKEN}"] if os.environ.get(TOKEN) else []
    notes += ["with what *** stands for"] if hidden else []
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
    notes: tuple[str, ...] = ()
    if engine.dry:
        host = host or facts.hostname
        notes = ("a dry run meets nobody: this host is shown as if it were alone.",)
    return alone(held, slots, request, host, several=True)._replace(engine=NAME, notes=notes)
