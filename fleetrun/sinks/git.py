"""The commit of a folder: read from .git at once, then from `git status` in a child process."""

from __future__ import annotations

import os
from typing import NamedTuple

from fleetrun.run.isolation import IsolatedCall, run_program

# No locks, which would disturb the user's git; no programs from the repository's configuration; no
# daemon. A folder owned by another user, as in containers, is allowed.
_COMMAND = (
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"),
    *("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--no-ahead-behind"),
    "--ignore-submodules=dirty",
)
# These would make git read another repository.
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")


class Revision(NamedTuple):
    """A commit; `is_dirty`: a tracked file differs from it (None: unknown)."""

    commit: str | None
    branch: str | None
    is_dirty: bool | None = None


def read(folder: str) -> Revision | None:
    """Return the commit of FOLDER according to .git; None outside a repository."""
    git = _find(os.path.abspath(folder))
    head = "" if git is None else _text(os.path.join(git, "HEAD"))
    if git is None or not head:
        return None
    if not head.startswith("ref: "):
        return Revision(head, None)
    ref = head[5:]
    # A linked work tree has its branches in the main repository.
    common = os.path.join(git, _text(os.path.join(git, "commondir")) or ".")
    for folder_ in (git, common):
        commit = _text(os.path.join(folder_, ref))
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
    branch_lines: dict[str, str] = {"oid": "", "head": ""}
    is_dirty = False
    for line in output.splitlines():
        words = line.split(" ", 2)
        if words[0] != "#":
            is_dirty = True
        elif len(words) > 2 and words[1].startswith("branch."):  # branch.NAME VALUE
            branch_lines[words[1].removeprefix("branch.")] = words[2]
    if not branch_lines["oid"]:
        return None
    commit, branch = branch_lines["oid"], branch_lines["head"]
    return Revision(
        None if commit == "(initial)" else commit,
        None if branch == "(detached)" else branch,
        is_dirty,
    )


def ask(folder: str) -> IsolatedCall:
    """Ask git for the status of FOLDER, for `parse`."""
    environ = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    return run_program((_COMMAND[0], "-C", folder, *_COMMAND[1:]), environ)
