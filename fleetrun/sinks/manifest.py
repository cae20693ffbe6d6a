"""Writes `manifest.json`: when the ranks have started, and once more when git has answered."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from fleetrun.records import variables
from fleetrun.records.folder import Folder
from fleetrun.run.observers import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleetrun.model import LaunchPlan, Request
    from fleetrun.run.loop import Waiting
    from fleetrun.sinks.git import GitStatus, Revision

# When the ranks have begun to load their programs; a short job would wait for it at its end.
_AFTER_S = 0.04
# As the other chores of the run directory: git takes longer than a short job.
_GIT_AFTER_S = 0.4


class ManifestFile(Sink):
    """Writes the manifest of the launch of REQUEST, made in ENVIRON."""

    def __init__(
        self,
        plan: LaunchPlan,
        request: Request,
        environ: Mapping[str, str],
        folder: Folder | None = None,
        hide: Callable[[str], str] = str,
    ) -> None:
        self._plan = plan
        self._hide = hide
        self._folder = folder or Folder(os.path.join(plan.cwd, plan.run_dir))
        self._request = request
        self._environ = environ
        self._started = time.time()
        self._is_written = False
        self._question: GitStatus | None = None

    def open(self, waiting: Waiting) -> None:
        """Write a little after the ranks have started."""
        self._waiting = waiting
        waiting.alarm("manifest", time.monotonic() + _AFTER_S, self._begin)

    def close(self) -> None:
        """Write now what a short launch has not written yet."""
        if self._question is not None:
            self._question.close()
        if not self._is_written:
            self._write(self._read_revision())

    # Git ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        revision = self._read_revision()
        self._write(revision)
        if revision is not None:
            self._waiting.alarm("git", time.monotonic() + _GIT_AFTER_S, self._ask)

    def _ask(self) -> None:
        from fleetrun.run.signals import defaults_for_children  # after the start
        from fleetrun.sinks.git import GitStatus

        own = self._plan.processes[0].env.get(variables.JOB) if self._plan.processes else None
        self._question = GitStatus(
            self._place(),
            self._waiting,
            self._on_answer,
            marker={} if own is None else {variables.JOB: own},
            default_signals=defaults_for_children(),
        )

    def _on_answer(self, revision: Revision | None) -> None:
        if revision is not None:
            self._write(revision)

    def _read_revision(self) -> Revision | None:
        from fleetrun.sinks import git  # the start is over when this runs

        return git.read(self._place())

    def _place(self) -> str:
        """Return the script's folder; ours for a module or a program of the system."""
        script = self._request.script
        is_here = script.form == "file" and ("/" in script.target or script.target.endswith(".py"))
        own = os.path.dirname(script.target) if is_here else ""
        return os.path.normpath(os.path.join(self._plan.cwd, own))

    def _write(self, revision: Revision | None) -> None:
        from fleetrun import replay  # the start is over when this runs
        from fleetrun.records import manifestfile

        remembered = {
            name: value for name, value in self._environ.items() if replay.is_remembered(name)
        }
        git = (
            None
            if revision is None
            else {
                "folder": self._place(),
                "commit": revision.commit,
                "branch": revision.branch,
                "dirty": revision.is_dirty,
            }
        )
        document = manifestfile.document(self._plan, self._request, self._started, git)
        document["environment"] = manifestfile.environment(self._environ, remembered)
        manifestfile.write(self._folder, document, self._hide)
        self._is_written = True
