"""`--debug`: which ranks start under which debugger, and how long others wait."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Facts, LaunchPlan, RankSpec, Request
from fleetrun.plan import command, origin

# debugpy's own port is that of rank 0.
FIRST_PORT = 5678
_LAST_PORT = 65535
_LOOPBACK = "127.0.0.1"
_LISTEN = ("-m", "debugpy", "--listen")
_UNDER_PDB = os.path.join(os.path.dirname(os.path.dirname(__file__)), "inject", "under_pdb.py")
# Timeouts during debugging: a week.
_TIMEOUT_S = 7 * 24 * 3600
VARIABLES = {
    # Of the store behind paddle.distributed.rpc, in seconds.
    "FLAGS_stop_check_timeout": str(_TIMEOUT_S),
    # Of collectives over NCCL and the like, in milliseconds.
    "PADDLE_PG_TIMEOUT": str(_TIMEOUT_S * 1000),
}


class Debugging(NamedTuple):
    """The words before the script in the commands of ranks, by rank, and remarks."""

    before: Mapping[int, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()


def at_terminal(request: Request, facts: Facts) -> Request:
    """Give the rank under pdb the terminal: it reads it, and its output is shown there."""
    if request.debug is None or facts.has_debugpy or not request.debug.isdigit():
        return request
    tee = request.tee
    if tee not in {None, "all"} and request.debug not in str(tee).split(","):
        tee = f"{tee},{request.debug}"
    return request._replace(stdin=request.stdin or request.debug, tee=tee)


def debugging(request: Request, facts: Facts, specs: Sequence[RankSpec]) -> Debugging:
    """Decide how the ranks of SPECS that REQUEST names start under the debugger."""
    if request.debug is None:
        return Debugging()
    option = origin.option(request, "debug")
    if not command.is_python(request.script):
        raise UsageError(
            f"{option}: {request.script.target} is a program; a debugger can hold scripts that end "
            "in .py, and modules (-m)."
        )
    held = [spec for spec in specs if spec.is_among(request.debug)]
    notes: tuple[str, ...] = ()
    if request.hang_timeout_s:
        notes = (f"--hang_timeout={request.hang_timeout_s:g} is suspended by {option}.",)
    if not held:
        return Debugging(notes=notes)
    if facts.has_debugpy:
        result = _under_debugpy(held, specs, facts)
    else:
        result = _under_pdb(request, facts, held, option)
    return result._replace(notes=(*result.notes, *notes))


def _under_debugpy(held: Sequence[RankSpec], specs: Sequence[RankSpec], facts: Facts) -> Debugging:
    """Make each of the HELD ranks wait at a port of its own."""
    taken = facts.used_ports | {spec.endpoint.port for spec in specs}
    before: dict[int, tuple[str, ...]] = {}
    places = []
    for spec in held:
        first = FIRST_PORT + spec.rank
        port = next((port for port in range(first, _LAST_PORT + 1) if port not in taken), None)
        if port is None:
            raise EnvironmentFault(
                f"No port from {first} on is free for the debugger of rank {spec.rank}."
            )
        taken |= {port}
        endpoint = f"{_LOOPBACK}:{port}"
        # A debugger cannot stop in Python's frozen modules, and would print a warning.
        before[spec.rank] = ("-X", "frozen_modules=off", *_LISTEN, endpoint, "--wait-for-client")
        places.append(f"{spec.rank} at {endpoint}")
    subject = "Rank" if len(places) == 1 else "Ranks"
    how = "attach with debugpy, as VS Code's Remote Attach does"
    return Debugging(before, (f"{subject} waiting for a debugger ({how}): {', '.join(places)}.",))


def ports(plan: LaunchPlan) -> tuple[int, ...]:
    """Return where the debuggers of PLAN will listen."""
    count = len(_LISTEN)
    return tuple(
        int(argv[at + count].rpartition(":")[2])
        for argv in (process.argv for process in plan.processes)
        for at in range(len(argv) - count)
        if argv[at : at + count] == _LISTEN
    )


def _under_pdb(request: Request, facts: Facts, held: Sequence[RankSpec], option: str) -> Debugging:
    """Make the one rank HELD stop at its first line, with pdb at the terminal."""
    install = f"install debugpy (`{facts.python} -m pip install debugpy`)"
    if len(held) > 1:
        raise EnvironmentFault(
            f"{option}: pdb can hold one rank only, as there is one terminal; name it, or "
            f"{install}."
        )
    rank = str(held[0].rank)
    if request.stdin not in {None, rank}:
        raise UsageError(
            f"{option}: pdb needs the terminal, which {origin.option(request, 'stdin')} gives to "
            f"another; leave that out, or {install}."
        )
    if not facts.is_at_terminal:
        raise EnvironmentFault(
            f"{option}: debugpy is not installed, and pdb needs fleetrun in the foreground of a "
            f"terminal; {install}, or start this at a terminal."
        )
    note = f"Rank {rank} stops at its first line, in pdb at this terminal (debugpy is not there)."
    return Debugging({held[0].rank: (_UNDER_PDB,)}, (note,))
