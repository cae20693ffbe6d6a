"""Asks NCCL in a hang which ranks lag, through its RAS port.

Since version 2.24 NCCL counts what each rank has launched on each communicator, by Paddle's own
reducer, too, and lists the counts that differ. Written by NVIDIA's guide (Troubleshooting, RAS) and
NCCL's `src/ras/client.cc` and `client_support.cc`; never run on a GPU.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.conversion import counted
from fleetrun.plan.visible import visible
from fleetrun.records import names
from fleetrun.run.isolation import IsolatedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fleetrun.run.isolation import CallResult
    from fleetrun.run.loop import Waiting
    from fleetrun.run.observers import ObservedJob

# `host:port`; NCCL's default.
_ADDRESS = "NCCL_RAS_ADDR"
_HOST, _PORT = "localhost", 28028
# How long NCCL waits for other processes, and we for NCCL.
_NCCL_S, _TIMEOUT_S = 5, 10.0
_MOST_BYTES = 1 << 20
_MOST_FINDINGS = 4

_COMMUNICATOR = re.compile(r"#\d+-\d+ \((\w+)\) MISMATCH")
# Older versions count all operations together.
_DIFFERENT = re.compile(r"Communicator ranks have different (?:(\w+) )?operation counts")
_LAUNCHED = r"(?:launched up to operation (\d+)|not launched any operations)"
_SEVERAL = re.compile(rf"(\d+) ranks have {_LAUNCHED}")
_PROCESS = r" -- (?:GPU .+ managed by process (\d+) on node (\S+)|\[.*\])"
_ONE = re.compile(rf"Rank (\d+) has {_LAUNCHED}{_PROCESS}")
_LISTED = re.compile(rf"Rank (\d+){_PROCESS}")


class _CommunicatorRank(NamedTuple):
    """A rank of a communicator, by its number there; its process, if NCCL knows it."""

    rank: int
    pid: int | None
    node: str


class _Counts(NamedTuple):
    """How many ranks of a communicator have launched how many operations of one kind."""

    communicator: str
    operation: str
    # By the number of operations: of how many ranks it is, and those of them that are listed.
    ranks: dict[int, int]
    members: dict[int, list[_CommunicatorRank]]


class Ras:
    """Asks the RAS of JOB's ranks on this host; PIDS returns the rank label of each process."""

    def __init__(self, job: ObservedJob, pids: Callable[[], Mapping[int, str]]) -> None:
        self._job = job
        self._pids = pids
        self._question: IsolatedCall | None = None
        self._text = ""

    def ask(self, waiting: Waiting, done: Callable[[], None]) -> bool:
        """Ask, and call DONE once there is an answer or none comes; False if nobody can be asked.

        The port may belong to another job: only a process of this one is asked.
        """
        from fleetrun.sources import sockets

        self.abandon()
        self._text = ""
        host, _, port = self._job.environ.get(_ADDRESS, f"{_HOST}:{_PORT}").rpartition(":")
        if not port.isdecimal() or not sockets.inodes(self._pids()) & sockets.listening(int(port)):
            return False
        try:
            self._question = IsolatedCall(partial(_status, host.strip("[]"), int(port)))
        except OSError:
            return False

        def answered(answer: CallResult) -> None:
            self._question = None
            self._text = answer.value if isinstance(answer.value, str) else ""
            if self._text:
                # A full disk must not hide a hang.
                with suppress(OSError):
                    self._job.folder.write(names.NCCL_RAS, self._text)
            else:
                self._job.log(f"NCCL's RAS did not tell which ranks lag: {answer.trouble}.")
            done()

        self._question.watch(waiting, answered, _TIMEOUT_S, callee="NCCL's RAS")
        return True

    def abandon(self) -> None:
        """Stop waiting for the answer."""
        if self._question is not None:
            question, self._question = self._question, None
            question.abandon(lambda _: None)

    def findings(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Return the labels of the ranks that lag, and a sentence, for each communicator."""
        plan, pids = self._job.plan, self._pids()
        trainers = sum(spec.is_trainer for spec in plan.ranks)

        def label(member: _CommunicatorRank, size: int) -> str:
            if size == trainers:
                # Paddle's group of all ranks numbers them as they are.
                return f"rank {member.rank}"
            if len(plan.nodes) == 1 and member.pid is not None and member.pid in pids:
                return pids[member.pid]
            return f"process {member.pid} on {visible(member.node)}"

        lagging = []
        for counts in differences(self._text)[:_MOST_FINDINGS]:
            size, least, most = sum(counts.ranks.values()), min(counts.ranks), max(counts.ranks)
            late = counts.members.get(least, ()) if least < most else ()
            labels = tuple(label(member, size) for member in late)
            who = names.listed(labels) if labels else counted(counts.ranks[least], "rank")
            have = "has" if counts.ranks[least] == 1 else "have"
            text = (
                f"{who} {have} launched {least} {counts.operation} on NCCL's communicator "
                f"{counts.communicator}, {counted(counts.ranks[most], 'other')} {most}"
            )
            lagging.append((labels, text))
        return tuple(lagging)


def differences(text: str) -> list[_Counts]:
    """Return the numbers of operations that differ between ranks, from a STATUS of RAS."""
    different: list[_Counts] = []
    communicator = ""
    # The count whose members follow.
    count = 0
    for line in map(str.strip, text.splitlines()):
        if match := _COMMUNICATOR.match(line):
            communicator = match[1]
        elif line.startswith("#"):
            communicator = ""
        elif not communicator:
            continue
        elif match := _DIFFERENT.match(line):
            operation = f"{match[1]} operations" if match[1] else "operations"
            different.append(_Counts(communicator, operation, {}, {}))
        elif not different or different[-1].communicator != communicator:
            continue
        elif match := _SEVERAL.match(line):
            count = int(match[2] or 0)
            different[-1].ranks[count] = int(match[1])
        elif match := _ONE.match(line):
            count = int(match[2] or 0)
            different[-1].ranks[count] = 1
            different[-1].members[count] = [_member(match[1], match[3], match[4])]
        elif match := _LISTED.match(line):
            member = _member(match[1], match[2], match[3])
            different[-1].members.setdefault(count, []).append(member)
    return [counts for counts in different if counts.ranks]


def _member(rank: str, pid: str | None, node: str | None) -> _CommunicatorRank:
    return _CommunicatorRank(int(rank), None if pid is None else int(pid), node or "a node")


def _status(host: str, port: int) -> str:
    """Return RAS's report of all communicators; OSError or ValueError if it gives none."""
    import socket

    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
        answers = connection.makefile("r", errors="replace")

        def say(words: str, expected: Iterable[str]) -> None:
            connection.sendall(f"{words}\n".encode())
            answer = answers.readline(_MOST_BYTES)
            if not answer.upper().startswith(tuple(expected)):
                raise ValueError(f"it answers {answer[:80]!r} to {words}")

        say("CLIENT PROTOCOL 2", ("SERVER PROTOCOL ",))
        say(f"TIMEOUT {_NCCL_S}", ("OK",))
        connection.sendall(b"VERBOSE STATUS\n")
        return answers.read(_MOST_BYTES)
