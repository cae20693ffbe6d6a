"""The commit of a folder: read from .git at once, then from `git status` in a child process."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from fleetrun.namedtuples import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fleetrun.run.loop import Waiting

_TIMEOUT_S = 20.0
_CHUNK = 64 * 1024
# Enough for the two lines about the commit, and for one changed file.
_MOST = 1024 * 1024
# Without locks, which would disturb the user's git, without programs from the repository's
# configuration, without a daemon; a folder of another user, as in containers, is allowed.
_COMMAND = (
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"),
    *("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--no-ahead-behind"),
    "--ignore-submodules=dirty",
)
# These would make git read another repository.
_MISLEADING = (b"GIT_DIR", b"GIT_WORK_TREE", b"GIT_INDEX_FILE", b"GIT_COMMON_DIR")


class Revision(NamedTuple):
    """A commit; `is_dirty`: a tracked file differs from it (None: unknown)."""

    commit: str | None
    branch: str | None
    is_dirty: bool | None = None


def read(folder: str) -> Revision | None:
    """Return the commit that FOLDER is at as .git says; None outside of any repository."""
    git = _find(os.path.abspath(folder))
    head = "" if git is None else _text(os.path.join(git, "HEAD"))
    if git is None or not head:
        return None
    if not head.startswith("ref: "):
        return Revision(head, None)
    ref = head[5:]
    # A work tree of its own shares branches with the repository that it belongs to.
    common = os.path.join(git, _text(os.path.join(git, "commondir")) or ".")
    for place in (git, common):
        commit = _text(os.path.join(place, ref))
        if commit:
            return Revision(commit, ref.removeprefix("refs/heads/"))
    for line in _text(os.path.join(common, "packed-refs")).splitlines():
        commit, _, name = line.partition(" ")
        if name == ref:
            return Revision(commit, ref.removeprefix("refs/heads/"))
    return Revision(None, ref.removeprefix("refs/heads/"))


def _find(folder: str) -> str | None:
    """Return the .git folder that FOLDER belongs to."""
    while True:
        path = os.path.join(folder, ".git")
        if os.path.isdir(path):
            return path
        if os.path.isfile(path):
            return os.path.join(folder, _text(path).removeprefix("gitdir: "))
        above = os.path.dirname(folder)
        if above == folder:
            return None
        folder = above


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def parse(output: str) -> Revision | None:
    r"""Parse the output of `git status --porcelain=v2 --branch`; None if it is anything else.

    >>> parse("# branch.oid 1f3a\n# branch.head main\n1 .M N... 100644 100644 train.py\n")
    Revision(commit='1f3a', branch='main', is_dirty=True)
    >>> parse("fatal: not a git repository")
    """
    said: dict[str, str] = {"oid": "", "head": ""}
    is_dirty = False
    for line in output.splitlines():
        words = line.split(" ", 2)
        if words[0] != "#":
            is_dirty = True
        elif len(words) > 2 and words[1].startswith("branch."):  # branch.NAME VALUE
            said[words[1].removeprefix("branch.")] = words[2]
    if not said["oid"]:
        return None
    commit, branch = said["oid"], said["head"]
    return Revision(
        None if commit == "(initial)" else commit,
        None if branch == "(detached)" else branch,
        is_dirty,
    )


class GitStatus:
    """One `git status` that runs beside everything else; ANSWER gets what it said, if anything."""

    def __init__(
        self,
        folder: str,
        waiting: Waiting,
        answer: Callable[[Revision | None], None],
        *,
        marker: Mapping[str, str],
        default_signals: Sequence[int],
    ) -> None:
        self._waiting = waiting
        self._answer = answer
        self._output = b""
        self._pid = 0
        self._fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            env = {name: value for name, value in os.environb.items() if name not in _MISLEADING}
            # The marker lets a clean-up of the job find this process, too.
            env |= {os.fsencode(name): os.fsencode(value) for name, value in marker.items()}
            self._pid = os.posix_spawnp(
                _COMMAND[0],
                (_COMMAND[0], "-C", folder, *_COMMAND[1:]),
                env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, write_fd, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=default_signals,
            )
            self._pidfd = os.pidfd_open(self._pid)
        except OSError:
            # There is no git: what was read from .git has to do.
            self._pidfd = -1
        finally:
            os.close(write_fd)
        waiting.watch(self._fd, self._on_output)
        waiting.timer("git", time.monotonic() + _TIMEOUT_S, self.close)

    def _on_output(self) -> None:
        piece = os.read(self._fd, _CHUNK)
        self._output += piece
        if piece and len(self._output) < _MOST:
            return
        self.close()
        # Cut off in the middle it says enough: something has changed.
        self._answer(parse(self._output.decode(errors="replace")))

    def close(self) -> None:
        """Stop asking."""
        if self._fd < 0:
            return
        self._waiting.unwatch(self._fd)
        self._waiting.timer("git", None, self.close)
        os.close(self._fd)
        self._fd = -1
        if self._pidfd >= 0:
            _kill(self._pidfd)
            os.close(self._pidfd)


def _kill(pidfd: int) -> None:
    """Kill it; the supervisor reaps it, or has done so."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
