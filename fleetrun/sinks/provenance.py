"""Writes where a result comes from: `manifest.json`, and `launch.txt` for people.

`launch.txt` has the settings, processes and remarks as of a dry run; each later attempt adds its
processes. Only the owner may read the files (mode 0600).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from fleetrun.engines import detect
from fleetrun.plan import render
from fleetrun.run import isolation
from fleetrun.run.events import Gathered, Happening
from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting, nothing
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import manifestfile, names

_GIT_S = 20.0
# No locks, which would disturb the user's git; no programs from the repository's configuration; no
# daemon. A folder owned by another user, as in containers, is allowed.
_STATUS = (
    *("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"),
    *("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--no-ahead-behind"),
    "--ignore-submodules=dirty",
)
# These would make git read another repository.
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")


class Provenance(Sink):
    """Writes the manifest of the launch, again when git has answered, and its plan."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._plan = job.plan
        self._abandon: Callable[[], object] = nothing

    def open(self, waiting: Waiting) -> None:
        """Write what is known, and ask git for the rest once the ranks have started."""
        super().open(waiting)
        self._write(None)
        waiting.timer("git", time.monotonic(), self._ask)
        self._append(render.overview([self._plan], self._job.request))

    def on_event(self, happening: Happening) -> None:
        """Add the environment of another attempt, which has other ports."""
        if isinstance(happening, Gathered) and happening.attempt:
            self._append(render.attempt(happening.plan))

    def close(self) -> None:
        """Wait no longer for git, which ends now unless the kernel holds it."""
        self._waiting.timer("git", None, self._ask)
        self._abandon()
        self._abandon = nothing

    def _append(self, text: str) -> None:
        self._job.folder.add(names.LAUNCH, self._job.redact(text))

    def _ask(self) -> None:
        call = partial(_become_git, self._folder())
        asking = IsolatedCall(call, decode=lambda output: (output,))
        self._abandon = asking.watch(self._waiting, self._answered, _GIT_S)

    def _answered(self, answer: CallResult) -> None:
        self._abandon = nothing
        # Without git, the manifest has no commit.
        commit = revision(cast("bytes", answer.value or b"").decode(errors="replace"))
        if commit is not None:
            self._write({"folder": self._folder(), **commit})

    def _folder(self) -> str:
        """Return the script's folder; the current one for a module or a system program."""
        script = self._job.request.script
        is_here = script.form == "file" and ("/" in script.target or script.target.endswith(".py"))
        folder = os.path.dirname(script.target) if is_here else ""
        return os.path.normpath(os.path.join(self._plan.cwd, folder))

    def _write(self, git: dict[str, Any] | None) -> None:
        job = self._job
        manifest = manifestfile.of_launch(
            *(self._plan, job.request, job.environ, detect.is_remembered),
            started=job.began,
            pid=job.pid,
            git=git,
        )
        job.folder.write_json(names.MANIFEST, manifest, job.redact)


def _become_git(folder: str) -> None:
    """Become a git that prints the state of FOLDER; OSError if there is none."""
    os.dup2(isolation.PIPE, 1)
    environ = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    os.execvpe("git", ("git", "-C", folder, *_STATUS), environ)  # noqa: S606, S607 - the user's own


def revision(output: str) -> dict[str, Any] | None:
    r"""Parse the output of `git status --porcelain=v2 --branch`; None if it is anything else.

    >>> revision("# branch.oid 1f3a\n# branch.head main\n1 .M N... 100644 100644 train.py\n")
    {'commit': '1f3a', 'branch': 'main', 'dirty': True}
    >>> revision("fatal: not a git repository")
    """
    lines = [line.split(" ", 2) for line in output.splitlines()]
    branch = {words[1]: words[2] for words in lines if words[0] == "#" and len(words) > 2}
    commit, name = branch.get("branch.oid"), branch.get("branch.head")
    if not commit:
        return None
    return {
        "commit": None if commit == "(initial)" else commit,
        "branch": None if name == "(detached)" else name,
        "dirty": any(words[0] != "#" for words in lines),
    }
