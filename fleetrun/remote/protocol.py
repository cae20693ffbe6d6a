"""The messages between the head and the agents over ssh, one line of JSON each; pure.

The head begins with an `Inquiry`. The agent answers with a line `MARK {answer}`, after whatever a
login shell prints. With several hosts, the head then sends the list of them in a `HostOrder`, and
each agent answers with the ones that are `Unreached`. Then come a `HostOrder` with the words of a
launcher, empty lines as heartbeats, and the orders END, STOP and NOW. The end of the head's output,
or silence, means STOP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

Message = TypeVar("Message", "Inquiry", "Answer", "HostOrder", "Unreached")

VERSION = 5
MARK = b"fleetrun-agent "
LAUNCHER = "fleetrun.__main__"
_MAINS = {"agent": "fleetrun.remote.agent", "launcher": LAUNCHER}
# The job has ended elsewhere; end the ranks; kill the ranks.
END, STOP, NOW = b"end\n", b"stop\n", b"now\n"
# How often the head sends a heartbeat, and the silence after which it counts as lost.
HEARTBEAT_S, SILENCE_S = 3.0, 15.0
# A larger difference makes logs hard to compare.
_SKEW_S = 5.0


def start(program: str) -> str:
    """Return the code for `python -c` that runs PROGRAM, agent or launcher.

    With -m the folder it is in would count as a place of modules, and a json.py there as Python's;
    -P is not older than Python 3.11.

    >>> start("launcher").rpartition("; ")[2]
    'run()'
    """
    path = "filter(None, sys.path)"
    return f"import sys; sys.path[:] = {path}; from {_MAINS[program]} import run; run()"


class Inquiry(NamedTuple):
    """The request to the agent: the folder, the script ("": none) and the variables to check."""

    cwd: str
    form: str = "file"
    target: str = ""
    environ: Mapping[str, str] = {}
    # The ports of ranks here, and candidates for the session's; empty: a single host.
    ports: tuple[int, ...] = ()
    reach_ports: tuple[int, ...] = ()
    # The log folder, how much of the logs to send at the end (tail or all), and the nonce; empty:
    # none.
    logs: tuple[str, ...] = ()


class HostEndpoint(NamedTuple):
    """The address of a host of the job, for the others."""

    name: str
    address: str
    port: int


class Answer(NamedTuple):
    """The agent's findings; `fault` is why the job cannot run there, "" if it can."""

    fault: str = ""
    fleetrun: str = ""
    python: str = ""
    paddle: str = ""
    digest: str = ""
    address: str = ""
    # The port to which the others may try to connect; 0: none.
    port: int = 0
    time: float = 0.0
    # How many GPUs a launch there may use; -1: only the driver knows.
    gpus: int = -1


class HostOrder(NamedTuple):
    """An order to the agent: connect to all HOSTS, or run fleetrun with WORDS."""

    hosts: tuple[HostEndpoint, ...] = ()
    words: tuple[str, ...] = ()


class Unreached(NamedTuple):
    """The hosts that are not reached, each with a sentence that says why."""

    hosts: tuple[tuple[str, str], ...]


def line(message: Inquiry | Answer | HostOrder | Unreached) -> bytes:
    """Return MESSAGE as a line; texts may contain any bytes."""
    return json.dumps({"version": VERSION, **message._asdict()}).encode() + b"\n"


def read(text: bytes, kind: type[Message]) -> Message:
    """Return the message of KIND in TEXT; raise ValueError if it is not of this version.

    >>> asked = Inquiry("/work", "file", "train.py", {"A": "b"})
    >>> read(line(asked), Inquiry) == asked
    True
    """
    fields = json.loads(text)
    if not isinstance(fields, dict) or set(fields) != {"version", *kind.__annotations__}:
        fields = {"version": 0}
    if fields.pop("version") != VERSION:
        # Without TEXT, which contains the token: the head prints the agent's last lines.
        raise ValueError("not a message of this version")
    return kind(**{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:  # noqa: ANN401 - JSON
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def skew(time: float, asked_at: float, heard_at: float) -> float:
    """Return by how many seconds at least a clock that showed TIME differs from ours.

    By our clock it was asked after ASKED_AT and heard at HEARD_AT; 0.0 if TIME lies between them.

    >>> skew(8.0, 10.0, 20.0), skew(12.0, 10.0, 20.0), skew(21.0, 10.0, 20.0)
    (-2.0, 0.0, 1.0)
    """
    return min(time - asked_at, 0.0) or max(time - heard_at, 0.0)


def faults(
    answers: Mapping[str, Answer],
    skews: Mapping[str, float],
    wanted: Mapping[str, int | None] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return all faults as pairs of host and sentence; hosts are compared with the first one.

    SKEWS are the seconds by which the hosts' clocks differ from ours. WANTED is how many GPUs each
    host needs, None for any number; without it the job needs none.
    """
    gpu_counts = {name: answer.gpus for name, answer in answers.items() if not answer.fault}
    richest = max(gpu_counts, key=gpu_counts.__getitem__, default="")
    faults_: list[tuple[str, str]] = []
    reference = next((name for name, answer in answers.items() if not answer.fault), None)
    for name, answer in answers.items():
        if answer.fault:
            faults_.append((name, answer.fault))
            continue
        expected = answers[reference or name]
        for subject, own, other in (
            ("fleetrun", answer.fleetrun, expected.fleetrun),
            ("Paddle", answer.paddle, expected.paddle),
            ("Python", _minor(answer.python), _minor(expected.python)),
        ):
            if own != other:
                sentence = (
                    f"{subject} is {own or 'not there'}, and on {reference} {other or 'not there'}."
                )
                faults_.append((name, sentence))
        if answer.digest != expected.digest:
            faults_.append((name, f"the script differs from that on {reference}."))
        if abs(skews[name]) > _SKEW_S:
            faults_.append((name, f"its clock differs by {skews[name]:+.0f} s from the one here."))
        # If no host has any, training runs on CPUs.
        if wanted is not None and gpu_counts[richest] > 0 <= answer.gpus < (wanted[name] or 1):
            ranks = f"{wanted[name]} ranks are requested there, and " if answer.gpus else ""
            comparison = "" if answer.gpus else f", and {richest} has {gpu_counts[richest]}"
            faults_.append((name, f"{ranks}it has {_gpus(answer.gpus)}{comparison}."))
    return tuple(faults_)


def _gpus(count: int) -> str:
    return f"{count or 'no'} GPU{'s' * (count > 1)}"


def _minor(version: str) -> str:
    """Return VERSION without its last part.

    >>> _minor("3.11.7")
    '3.11'
    """
    return ".".join(version.split(".")[:2])
