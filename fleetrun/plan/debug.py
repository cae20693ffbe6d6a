"""`--debug`: which ranks wait for debugpy at which port, and how long others wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.errors import UsageError
from fleetrun.model import Facts, RankSpec, Request
from fleetrun.plan import command, origin
from fleetrun.plan.layout import LAST_PORT

# debugpy's own port is that of rank 0.
FIRST_PORT = 5678
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
    held = [spec for spec in specs if spec.is_among(request.debug)]
    taken = facts.used_ports | {spec.endpoint.port for spec in specs}
    before: dict[int, tuple[str, ...]] = {}
    for spec in held:
        free = (port for port in range(FIRST_PORT + spec.rank, LAST_PORT) if port not in taken)
        port = next(free)
        taken |= {port}
        # A debugger cannot stop in Python's frozen modules, and would print a warning.
        words = ("-X", "frozen_modules=off", *_LISTEN, f"{_LOOPBACK}:{port}", "--wait-for-client")
        before[spec.rank] = words
    if not before:
        return {}, ()
    places = ", ".join(f"{rank} at {words[-2]}" for rank, words in before.items())
    how = "attach with debugpy, as VS Code's Remote Attach does"
    return before, (f"Ranks waiting for a debugger ({how}): {places}.",)
