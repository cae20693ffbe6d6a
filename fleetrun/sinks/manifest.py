"""Writes `manifest.json` before the ranks start, and again when git has answered."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import cast

from fleetrun.engines import detect
from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import manifestfile, names
from fleetrun.sinks import git
from fleetrun.sinks.git import Revision

# Git takes longer than a short job, which does without.
_GIT_AFTER_S, _GIT_S = 0.4, 20.0


class ManifestFile(Sink):
    """Writes the manifest of the launch."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._plan = job.plan
        self._question: IsolatedCall | None = None

    def open(self, waiting: Waiting) -> None:
        """Write what is known, and ask git for the rest."""
        self._waiting = waiting
        revision = git.read(self._place())
        self._write(revision)
        if revision is not None:
            waiting.timer("git", time.monotonic() + _GIT_AFTER_S, self._ask)

    def close(self) -> None:
        """Wait no longer for git."""
        if self._question is not None:
            self._question.abandon()

    # Git ----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        # Without a process for git, the manifest has only what .git says.
        with suppress(OSError):
            self._question = git.ask(self._place())
            self._question.watch(self._waiting, self._on_answer, _GIT_S)

    def _on_answer(self, answer: CallResult) -> None:
        self._question = None
        if not answer.is_late:
            revision = git.parse(cast("bytes", answer.value).decode(errors="replace"))
            if revision is not None:
                self._write(revision)

    def _place(self) -> str:
        """Return the script's folder; the current one for a module or a system program."""
        script = self._job.request.script
        is_here = script.form == "file" and ("/" in script.target or script.target.endswith(".py"))
        folder = os.path.dirname(script.target) if is_here else ""
        return os.path.normpath(os.path.join(self._plan.cwd, folder))

    def _write(self, revision: Revision | None) -> None:
        job = self._job
        remembered = {
            name: value for name, value in job.environ.items() if detect.is_remembered(name)
        }
        known = (
            None
            if revision is None
            else {
                "folder": self._place(),
                "commit": revision.commit,
                "branch": revision.branch,
                "dirty": revision.is_dirty,
            }
        )
        document = manifestfile.document(self._plan, job.request, job.began, job.pid, known)
        document["environment"] = manifestfile.environment(job.environ, remembered)
        job.folder.write_json(names.MANIFEST, document, job.redact)
