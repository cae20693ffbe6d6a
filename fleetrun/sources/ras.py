"""Asks NCCL in a hang which ranks lag, through its RAS port.

Since version 2.24 NCCL counts what each rank has launched on each communicator, by Paddle's own
reducer, too, and lists the counts that differ, and the ranks that do not answer it. Written by
NVIDIA's guide (Troubleshooting, RAS) and NCCL's `src/ras/client.cc` and `client_support.cc`;
compared with what 2.28.9 answers for processes that share an H100.
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
    from collections.abc import Callable, Iterable, Iterator, Mapping

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

# In the table: the number of a group of communicators, and the ranks that each of them has.
_GROUP = re.compile(r"(\d+)(?: +\S+){3} +(\d+) +\S+ +[A-Z].*")
_COMMUNICATOR = re.compile(r"#(\d+)-\d+ \((\w+)\) ([A-Z]+)")
_MISMATCH, _INCOMPLETE = "MISMATCH", "INCOMPLETE"
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


class _NcclCommunicator(NamedTuple):
    """A communicator, by NCCL's name of it, and the number of its ranks; 0 if it is not known."""

    name: str
    size: int


class _Counts(NamedTuple):
    """How many ranks of a communicator have launched how many operations of one kind."""

    communicator: _NcclCommunicator
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
        listening = sockets.listening(int(port)) if port.isdecimal() else ()
        if not listening or not sockets.inodes(self._pids()) & listening:
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
        """Return the labels of the ranks that lag, and a sentence, for each communicator.

        Those that do not even answer NCCL, because their processes have ended or stand still, come
        first.
        """
        plan, pids = self._job.plan, self._pids()
        trainers = sum(spec.is_trainer for spec in plan.ranks)

        def label(member: _CommunicatorRank, size: int) -> str:
            if size == trainers:
                # Paddle's group of all ranks numbers them as they are.
                return f"rank {member.rank}"
            if len(plan.nodes) == 1 and member.pid is not None and member.pid in pids:
                return pids[member.pid]
            return f"process {member.pid} on {visible(member.node)}"

        findings = []
        for communicator, members in unanswered(self._text).items():
            labels = tuple(label(member, communicator.size) for member in members)
            text = f"{names.listed(labels)} did not answer NCCL's RAS about communicator "
            findings.append((labels, text + communicator.name))
        for counts in differences(self._text):
            communicator = counts.communicator
            size = communicator.size or sum(counts.ranks.values())
            least, most = min(counts.ranks), max(counts.ranks)
            # NCCL lists those of which there are few. That most ranks lag behind them is no fault.
            shown = next((n for n in (least, most) if n in counts.members), least)
            other = most if shown == least else least
            listed = tuple(label(member, size) for member in counts.members.get(shown, ()))
            who = names.listed(listed) if listed else counted(counts.ranks[shown], "rank")
            have = "has" if counts.ranks[shown] == 1 else "have"
            text = (
                f"{who} {have} launched {shown} {counts.operation} on NCCL's communicator "
                f"{communicator.name}, {counted(counts.ranks[other], 'other')} {other}"
            )
            findings.append((listed if shown == least < most else (), text))
        return tuple(findings[:_MOST_FINDINGS])


def differences(text: str) -> list[_Counts]:
    """Return the numbers of operations that differ between ranks, from a STATUS of RAS."""
    different: list[_Counts] = []
    for communicator, lines in _remarks(text, _MISMATCH):
        # The count whose members follow.
        count = 0
        counts: _Counts | None = None
        for line in lines:
            if match := _DIFFERENT.match(line):
                operation = f"{match[1]} operations" if match[1] else "operations"
                counts = _Counts(communicator, operation, {}, {})
                different.append(counts)
            elif counts is None:
                continue
            elif match := _SEVERAL.match(line):
                count = int(match[2] or 0)
                counts.ranks[count] = int(match[1])
            elif match := _ONE.match(line):
                count = int(match[2] or 0)
                counts.ranks[count] = 1
                counts.members[count] = [_member(match[1], match[3], match[4])]
            elif match := _LISTED.match(line):
                member = _member(match[1], match[2], match[3])
                counts.members.setdefault(count, []).append(member)
    return [counts for counts in different if counts.ranks]


def unanswered(text: str) -> dict[_NcclCommunicator, list[_CommunicatorRank]]:
    """Return the ranks of each communicator that did not answer, from a STATUS of RAS."""
    silent: dict[_NcclCommunicator, list[_CommunicatorRank]] = {}
    for communicator, lines in _remarks(text, _INCOMPLETE):
        members = [_member(*match.groups()) for match in map(_LISTED.match, lines) if match]
        if members:
            silent[communicator] = members
    return silent


def _remarks(text: str, kind: str) -> Iterator[tuple[_NcclCommunicator, list[str]]]:
    """Yield the lines of the remarks of KIND, from a STATUS of RAS, with their communicators."""
    sizes: dict[str, int] = {}
    remark: list[str] | None = None
    communicator = _NcclCommunicator("", 0)
    for line in [*map(str.strip, text.splitlines()), "#"]:
        if match := _GROUP.fullmatch(line):
            sizes[match[1]] = int(match[2])
        elif line.startswith("#"):
            if remark is not None:
                yield communicator, remark
            remark = None
            match = _COMMUNICATOR.match(line)
            if match and match[3] == kind:
                communicator, remark = _NcclCommunicator(match[2], sizes.get(match[1], 0)), []
        elif remark is not None:
            remark.append(line)


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
