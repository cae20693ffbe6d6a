"""How ranks reach each other: the NCCL and gloo variables that the user has not set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.model import Facts, Request, Roster
from fleetrun.plan import hosts
from fleetrun.plan.devices import Share

# Prefixes of interfaces that NCCL uses as a last resort.
_NCCL_AVOIDS = ("docker", "lo")
# The prefix that it prefers: IP over InfiniBand.
_NCCL_PREFERS = "ib"

_LOOPBACK = "lo"

NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def variables(request: Request, facts: Facts, share: Share, roster: Roster) -> dict[str, str]:
    """Return the variables that select the ranks' interfaces, and InfiniBand."""
    env: dict[str, str] = {}
    several = len(roster.members) > 1
    own_interface = _own_interface(facts, roster) if several else _LOOPBACK
    if own_interface is not None:
        # By default gloo uses the address that our host name resolves to.
        env[GLOO] = own_interface
    if share.kind == "gpu":
        env["NCCL_DEBUG"] = "WARN"
        sockets = _nccl_sockets(request, facts, own_interface) if several else None
        if sockets is not None:
            env[NCCL] = sockets
        if not facts.hcas and not facts.rdma:
            env["NCCL_IB_DISABLE"] = "1"
        elif several and facts.hcas:
            env["NCCL_IB_HCA"] = _exactly(facts.hcas, set(facts.rdma))
    return env


def named(request: Request, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables by which the user has named interfaces for ranks."""
    of_strategy = {} if request.strategy is None else request.strategy.variables
    chosen = {*dict(request.env), *of_strategy}
    return tuple(name for name in (NCCL, GLOO) if name in chosen or environ.get(name))


def suspects(
    request: Request, facts: Facts, roster: Roster, env: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a sentence about each interface in ENV that the user has named and that cannot work.

    Ranks have ENV over the variables of FACTS.
    """
    own = tuple(dict.fromkeys(address.interface for address in facts.addresses))
    is_far = len(roster.members) > 1 and not hosts.is_loopback(roster.members[roster.me].host)
    sentences = []
    for name in named(request, facts.environ):
        value = env.get(name, facts.environ.get(name, ""))
        usable = nccls(value, own) if name == NCCL else tuple({value}.intersection(own))
        if value and own and not usable:
            wrong = f"this host has no interface {value} with an address"
        elif is_far and usable == (_LOOPBACK,):
            wrong = "no other host comes by the loopback"
        else:
            continue
        others = " or ".join(name for name in own if name != _LOOPBACK or not is_far)
        sentences.append(f"{name}={value}: {wrong}; leave it out, or name {others}.")
    return tuple(sentences)


def nccls(setting: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the interfaces NAMES that NCCL_SOCKET_IFNAME=SETTING allows.

    A leading `^` excludes, `=` makes names exact; otherwise names are prefixes.

    >>> nccls("eth", ("lo", "eth0", "eth1")), nccls("^=lo,eth0", ("lo", "eth0", "eth1"))
    (('eth0', 'eth1'), ('eth1',))
    """
    excludes, text = setting.startswith("^"), setting.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    asked = tuple(name.partition(":")[0] for name in text.split(",") if name)

    def fits(name: str) -> bool:
        return name in asked if is_exact else name.startswith(asked)

    return tuple(name for name in names if fits(name) != excludes)


def _own_interface(facts: Facts, roster: Roster) -> str | None:
    """Return the interface that leads to the peers, or has the address that they use for us.

    Only hosts that all are this one meet on `lo`; elsewhere it has addresses that are announced.
    """
    host = roster.members[roster.me].host
    if hosts.is_loopback(host):
        return _LOOPBACK
    network = None if facts.network is None else facts.network.interface
    known = (network, facts.peer_interface, _interface_of(host, facts))
    return next((name for name in known if name not in {None, _LOOPBACK}), None)


def _interface_of(host: str | None, facts: Facts) -> str | None:
    """Return the interface that has the address HOST, if it is one of ours."""
    return next((address.interface for address in facts.addresses if address.ip == host), None)


def _nccl_sockets(request: Request, facts: Facts, own_interface: str | None) -> str | None:
    """Return the interfaces for NCCL; None if its own choice is as good.

    NCCL uses all interfaces that it finds: naming one would exclude the others, which may be
    faster.
    """
    names = tuple(dict.fromkeys(address.interface for address in facts.addresses))
    named = _interface_of(request.host, facts)
    if facts.network is not None:
        named = facts.network.interface
    named = own_interface if named == _LOOPBACK else named
    choice = [name for name in names if not name.startswith(_NCCL_AVOIDS)]
    good = [name for name in choice if name == own_interface or name not in facts.dead_ends]
    has_rdma = facts.hcas or any(name.startswith(_NCCL_PREFERS) for name in names)
    if named is None and (has_rdma or (good and good == choice)):
        return None
    if named is None and good:
        return "^=" + ",".join(name for name in names if name not in good)
    named = named or own_interface
    return None if named is None else _exactly((named,), set(names))


def _exactly(names: tuple[str, ...], among: set[str]) -> str:
    """Write NAMES for NCCL, which reads `eth1` as a prefix unless a `=` precedes it."""
    ambiguous = any(
        neighbour.startswith(name)
        for name in names
        for neighbour in among
        if neighbour not in names
    )
    return ("=" if ambiguous else "") + ",".join(names)
