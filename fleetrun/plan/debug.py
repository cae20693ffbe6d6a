"""`--debug`: which ranks wait for debugpy at which port, and how long others wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Facts, LaunchPlan, RankSpec, Request
from fleetrun.plan import command, origin

# debugpy's own port is that of rank 0.
FIRST_PORT = 5678
_LAST_PORT = 65535
_LOOPBACK = "127.0.0.1"
_LISTEN = ("-m", "debugpy", "--listen")
# Timeouts during debugging: a week.
_TIMEOUT_S = 7 * 24 * 3600
VARIABLES = {
    # Of the store behind paddle.distributed.rpc, in seconds.
    "FLAGS_stop_check_timeout": str(_TIMEOUT_S),
    # Of collectives over NCCL and the like, in milliseconds.
    "PADDLE_PG_TIMEOUT": str(_TIMEOUT_S * 1000),
}


def debugging(
    request: Request, facts: Facts, specs: Sequence[RankSpec]
) -> tuple[Mapping[int, tuple[str, ...]], tuple[str, ...]]:
    """Let each rank of SPECS that REQUEST names wait for debugpy at a port of its own.

    Return the words before the script in the commands of ranks, by rank, and remarks.
    """
    if request.debug is None:
        return {}, ()
    option = origin.option(request, "debug")
    if not command.is_python(request.script):
        raise UsageError(
            f"{option}: {request.script.target} is a program; a debugger can hold scripts that end "
            "in .py, and modules (-m)."
        )
    notes: list[str] = []
    if request.hang_timeout_s:
        notes.append(f"--hang_timeout={request.hang_timeout_s:g} is suspended by {option}.")
    held = [spec for spec in specs if spec.is_among(request.debug)]
    if held and not facts.has_debugpy:
        raise EnvironmentFault(
            f"{option}: debugpy is not installed; `{facts.python} -m pip install debugpy`."
        )
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
    if places:
        subject = "Rank" if len(places) == 1 else "Ranks"
        how = "attach with debugpy, as VS Code's Remote Attach does"
        notes.insert(0, f"{subject} waiting for a debugger ({how}): {', '.join(places)}.")
    return before, tuple(notes)


def ports(plan: LaunchPlan) -> tuple[int, ...]:
    """Return where the debuggers of PLAN will listen."""
    count = len(_LISTEN)
    return tuple(
        int(argv[at + count].rpartition(":")[2])
        for argv in (process.argv for process in plan.processes)
        for at in range(len(argv) - count)
        if argv[at : at + count] == _LISTEN
    )
