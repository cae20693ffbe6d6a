"""Writes where a result comes from: `manifest.json`, and `launch.txt` for people.

`launch.txt` has the settings, processes and remarks as of a dry run; each later attempt adds its
processes. Only the owner may read the files (mode 0600).
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from typing import Any

from fleetrun.engines import detect
from fleetrun.plan import render
from fleetrun.run.events import Gathered, Happening
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import manifestfile, names

_GIT_S, _END_S = 20.0, 1.0
_PIECE = 1 << 16
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
        self._git: subprocess.Popen[bytes] | None = None
        self._answer = b""

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
        git, self._git = self._git, None
        if git is None or git.stdout is None:
            return
        self._waiting.unwatch(git.stdout.fileno())
        git.stdout.close()
        git.kill()
        with suppress(subprocess.TimeoutExpired):
            git.wait(_END_S)

    def _append(self, text: str) -> None:
        self._job.folder.add(names.LAUNCH, self._job.redact(text))

    def _ask(self) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = ("git", "-C", self._folder(), *_STATUS)
        try:
            git = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, **streams)
        except OSError:
            # Without git, the manifest has no commit.
            return
        assert git.stdout is not None
        self._git = git
        self._waiting.watch(git.stdout.fileno(), self._read)
        self._waiting.timer("git", time.monotonic() + _GIT_S, self.close)

    def _read(self) -> None:
        assert self._git is not None
        assert self._git.stdout is not None
        part = os.read(self._git.stdout.fileno(), _PIECE)
        self._answer += part
        if part:
            return
        self.close()
        commit = revision(self._answer.decode(errors="replace"))
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
