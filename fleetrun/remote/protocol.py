"""What the head and the agents say to each other over ssh, a line of JSON each; pure.

The head begins with an `Inquiry`. The agent answers with a line `MARK {answer}`, after whatever a
login shell prints. With several hosts the head then lists all of them, and each agent answers with
those that it does not reach. Then come the head's orders: the words of a launcher, empty lines as
heartbeats, and the words END, STOP and NOW. The end of its input, or silence, is a STOP, too.
"""

# No `from __future__ import annotations` here, for the reason given in model.py.
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VERSION = 4
MARK = b"fleetrun-agent "
LAUNCHER = "fleetrun.__main__"
_MAINS = {"agent": "fleetrun.remote.agent", "launcher": LAUNCHER}
# Runs the text of `bootstrap`, which comes until the first NUL. It has no quotation mark.
RECEIVE = (
    "import os, sys; sys.path[:] = filter(None, sys.path); "
    "exec(bytes().join(iter(lambda: os.read(0, 1) or bytes(1), bytes(1))))"
)
# The job has ended elsewhere; end the ranks; kill them.
END, STOP, NOW = b"end\n", b"stop\n", b"now\n"
# The head is heard from so often, or counts as lost.
HEARTBEAT_S, SILENCE_S = 3.0, 15.0
# Clocks that differ more make logs hard to compare.
_SKEW_S = 5.0


def start(what: str, lib: str = "") -> str:
    """Return the code for `python -c` that runs the agent or a launcher: WHAT, found in LIB.

    With -m the folder it is in would count as a place of modules, and a json.py there as Python's;
    -P is not older than Python 3.11.

    >>> start("launcher").rpartition("; ")[2]
    'run()'
    """
    path = f"[{lib!r}, *filter(None, sys.path)]" if lib else "filter(None, sys.path)"
    return f"import sys; sys.path[:] = {path}; from {_MAINS[what]} import run; run()"


class Inquiry(NamedTuple):
    """What the agent is to look at: the folder, the script ("": none) and the variables."""

    cwd: str
    form: str = "file"
    target: str = ""
    environ: Mapping[str, str] = {}
    # Ports that are wanted here, and those of which one is for the session; none: a host alone.
    ports: tuple[int, ...] = ()
    reach_ports: tuple[int, ...] = ()
    # Where the logs are that are wanted at the end, how much of them (tail or all), and what comes
    # before them; none: none are.
    logs: tuple[str, ...] = ()
    version: int = VERSION


class HostEndpoint(NamedTuple):
    """Where a host of the job is, for the others."""

    name: str
    address: str
    port: int


class Answer(NamedTuple):
    """What the agent has found; `fault` is why the job cannot run there, "" if it can."""

    fault: str = ""
    fleetrun: str = ""
    python: str = ""
    paddle: str = ""
    digest: str = ""
    address: str = ""
    # Where the others may try to connect to; 0: nowhere.
    port: int = 0
    time: float = 0.0
    # How many GPUs a launch there may use; -1: only their driver knows.
    gpus: int = -1


def line(said: "Inquiry | Answer | str | Sequence[str] | Sequence[tuple[object, ...]]") -> bytes:
    """Write what is SAID as a line; texts of any bytes survive."""
    if isinstance(said, str):
        return json.dumps(said).encode() + b"\n"
    value = said._asdict() if isinstance(said, Inquiry | Answer) else list(said)
    return json.dumps(value).encode() + b"\n"


def inquiry(text: bytes) -> Inquiry:
    """Return the inquiry that the line TEXT is; ValueError if it is none of this version.

    >>> asked = Inquiry("/work", "file", "train.py", {"A": "b"})
    >>> inquiry(line(asked)) == asked
    True
    """
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        # Not TEXT itself: it has the token, and the head shows the agent's last lines.
        raise ValueError("no inquiry of this version")
    environ = {str(name): str(value) for name, value in found["environ"].items()}
    ports, reach_ports = (tuple(map(int, found[name])) for name in ("ports", "reach_ports"))
    where = (str(found["cwd"]), str(found["form"]), str(found["target"]))
    return Inquiry(*where, environ, ports, reach_ports, tuple(map(str, found["logs"])))


def answer(text: bytes) -> Answer:
    """Return the answer that the rest of a marked line is; ValueError if it is none.

    >>> answer(line(Answer(fleetrun="0.1.0"))).fleetrun
    '0.1.0'
    """
    found = json.loads(text)
    like = Answer()._asdict()
    if not isinstance(found, dict) or set(found) != set(like):
        raise ValueError(text)
    if any(not isinstance(found[name], type(value)) for name, value in like.items()):
        raise ValueError(text)
    return Answer(**found)


def places(text: bytes) -> tuple[HostEndpoint, ...] | None:
    """Return the hosts that an order to look for them has; None if it is another order.

    >>> places(line([HostEndpoint("a", "10.0.0.1", 6166)]))
    (HostEndpoint(name='a', address='10.0.0.1', port=6166),)
    >>> places(line(["train.py"]))
    """
    found = json.loads(text)
    if not isinstance(found, list) or not found or not isinstance(found[0], list):
        return None
    return tuple(HostEndpoint(str(name), str(address), int(port)) for name, address, port in found)


def unreached(text: bytes) -> tuple[tuple[str, str], ...]:
    """Return the sentences about hosts that are not reached, each with a host's name.

    Raises ValueError if TEXT, the rest of a marked line, has none.
    """
    found = json.loads(text)
    if not isinstance(found, list) or any(
        not isinstance(one, list) or list(map(type, one)) != [str, str] for one in found
    ):
        raise ValueError("no sentences")
    return tuple((name, why) for name, why in found)


def arguments(text: bytes) -> tuple[str, ...]:
    """Return fleetrun's arguments in an order to go; raises ValueError."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("no words")
    return tuple(found)


def skew(time: float, asked_at: float, heard_at: float) -> float:
    """Return by how many seconds at least a clock that said TIME differs from the one here.

    It was asked after ASKED_AT and heard at HEARD_AT, by the clock here: 0.0 if between these.

    >>> skew(8.0, 10.0, 20.0), skew(12.0, 10.0, 20.0), skew(21.0, 10.0, 20.0)
    (-2.0, 0.0, 1.0)
    """
    return min(time - asked_at, 0.0) or max(time - heard_at, 0.0)


def faults(
    answers: Mapping[str, Answer],
    skews: Mapping[str, float],
    wanted: Mapping[str, int | None] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return all that is wrong, a host and a sentence each; the first host is the measure.

    SKEWS are by how many seconds the hosts' clocks differ from the one here. WANTED is how many
    GPUs each host needs, None where it may be any number; without it the job needs none.
    """
    have = {name: one.gpus for name, one in answers.items() if not one.fault}
    most = max(have, key=have.__getitem__, default="")
    found: list[tuple[str, str]] = []
    first = next((name for name, one in answers.items() if not one.fault), None)
    for name, one in answers.items():
        if one.fault:
            found.append((name, one.fault))
            continue
        like = answers[first or name]
        for what, ours, theirs in (
            ("fleetrun", one.fleetrun, like.fleetrun),
            ("Paddle", one.paddle, like.paddle),
            ("Python", _minor(one.python), _minor(like.python)),
        ):
            if ours != theirs:
                sentence = (
                    f"{what} is {ours or 'not there'}, and on {first} {theirs or 'not there'}."
                )
                found.append((name, sentence))
        if one.digest != like.digest:
            found.append((name, f"the script is another than on {first}."))
        if abs(skews[name]) > _SKEW_S:
            found.append((name, f"its clock differs by {skews[name]:+.0f} s from the one here."))
        # Where no host has one, training runs on CPUs.
        if wanted is not None and have[most] > 0 <= one.gpus < (wanted[name] or 1):
            ranks = f"{wanted[name]} ranks are wanted there, and " if one.gpus else ""
            than = "" if one.gpus else f", and {most} has {have[most]}"
            found.append((name, f"{ranks}it has {_gpus(one.gpus)}{than}."))
    return tuple(found)


def _gpus(count: int) -> str:
    return f"{count or 'no'} GPU{'s' * (count > 1)}"


def _minor(version: str) -> str:
    """Return VERSION without its last part.

    >>> _minor("3.11.7")
    '3.11'
    """
    return ".".join(version.split(".")[:2])
