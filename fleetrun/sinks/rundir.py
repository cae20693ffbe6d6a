"""The run directory with all files of one launch, and the links to it in `log/`.

`log/workerlog.N`, `log/endpoints.log` and `log/latest` are links into `log/runs/<launch>/`. They
are replaced atomically, so `tail -F` continues with the next launch.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Gathered, Happening, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import lockfile, names, planfile, reading
from fleetrun.rundir.folder import SHARED

# Longer than hosts wait for each other, unless the timeout was raised.
_MARKED_S = 86400.0


class RunDirectory(Sink):
    """Creates the run directory of JOB, and deletes the oldest ones beyond --log_keep."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        plan, request = job.plan, job.request
        self._keep = 1 if request.log_overwrite else max(1, request.log_keep)
        self._log_dir = _join(plan.cwd, plan.log_dir)
        self._runs = os.path.join(self._log_dir, names.RUNS)
        self._folder, self._run_dir = job.folder, job.folder.path
        # As links in the log folder have it.
        self._own = os.path.relpath(self._run_dir, self._log_dir)
        self._lock_fd = -1
        # What `withdraw` has to remove, the outermost first.
        self._made: list[str] = []
        shared = plan.shared_logs
        # The first of the hosts that share the run directory makes links, and removes old runs.
        self._is_first = shared is None or not shared.own
        self._has_complained = False

    def prepare(self) -> None:
        """Create the folder and the files that ranks need; a full or read-only disk fails here."""
        is_shared = self._job.plan.shared_logs is not None
        whole = os.path.dirname(self._run_dir) if not self._is_first else ""
        try:
            for folder in filter(None, (self._log_dir, self._runs, whole, self._run_dir)):
                # The lock, which must be new, tells whether another launch had a shared one.
                may_exist = folder != self._run_dir or is_shared
                if not (may_exist and os.path.isdir(folder)):
                    os.makedirs(folder, exist_ok=may_exist)
                    self._made.append(folder)
            self._lock_fd = lockfile.hold(self._folder, self._job.pid)
            if self._run_dir not in self._made:
                self._made.append(self._run_dir)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.isdir(self._run_dir):
                raise EnvironmentFault(
                    f"{self._run_dir} is of a launch that began in the same second with the same "
                    "process id, in another container or on another host: start this one again, or "
                    "choose another --log_dir."
                ) from None
            raise EnvironmentFault(names.unwritable(self._run_dir, error.strerror)) from None

    def withdraw(self) -> None:
        """Leave no trace of a launch that never began."""
        with suppress(OSError):
            for name in os.listdir(self._run_dir) if self._run_dir in self._made else ():
                path = os.path.join(self._run_dir, name)
                # Those of other hosts that share it stay.
                if not os.path.isdir(path):
                    os.unlink(path)
                elif not names.is_node_folder(name):
                    shutil.rmtree(path)
            for folder in reversed(self._made):
                os.rmdir(folder)
        self._unlock()

    def open(self, waiting: Waiting) -> None:
        """Write plan.json, and create the well-known links."""
        planfile.write(self._folder, self._job.plan, self._job.redact)
        if self._is_first:
            self._name_previous()
            self._link(names.LATEST)
            if self._job.plan.ranks:
                self._write_endpoints()
                self._link(names.ENDPOINTS, names.ENDPOINTS)
            self._link_others(0)
            # When the ranks are started: old logs may be many.
            waiting.timer("old runs", time.monotonic(), self._prune)

    def on_event(self, happening: Happening) -> None:
        """Point a process's well-known log name to the log of the current attempt."""
        if isinstance(happening, Started) and self._is_first:
            spec = self._job.plan.processes[happening.process]
            logs = zip((spec.log, spec.error_log), self._job.logs(happening), strict=False)
            for log, path in logs:
                self._link(log, os.path.basename(path))
        elif isinstance(happening, Gathered) and happening.attempt:
            # The same run with other ports, and maybe other ranks.
            if self._job.plan.ranks:
                self._write_endpoints()
            if self._is_first:
                self._link_others(happening.attempt)

    def close(self) -> None:
        """Release the lock."""
        shared = self._job.plan.shared_logs
        if self._is_first and shared is not None:
            with suppress(OSError):
                os.unlink(os.path.join(self._log_dir, shared.marker))
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _write_endpoints(self) -> None:
        """Write endpoints.log exactly as Paddle does: with a blank, and no final newline."""
        lines = "\n".join(str(rank.endpoint) for rank in self._job.plan.ranks if rank.is_trainer)
        self._folder.write(names.ENDPOINTS, f"PADDLE_TRAINER_ENDPOINTS: \n{lines}", SHARED)

    # Names ----------------------------------------------------------------------------------------

    def _link(self, name: str, file: str = "") -> None:
        """Point NAME in the log folder to FILE of the run directory ("": to this itself).

        Atomically; a file of that name, which Paddle's own launcher has left, is kept.
        """
        path = os.path.join(self._log_dir, name)
        try:
            if os.path.isfile(path) and not os.path.islink(path):
                spare, number = f"{path}.old", 1
                while os.path.lexists(spare):
                    number += 1
                    spare = f"{path}.old.{number}"
                os.rename(path, spare)
            # At once, whatever had that name.
            draft = os.path.join(self._log_dir, f".{name}.{os.getpid()}")
            os.symlink(f"{self._own}/{file}" if file else self._own, draft)
            os.replace(draft, path)
        except OSError as error:
            # Only once: a full disk, or one without links, affects every rank.
            if not self._has_complained:
                self._has_complained = True
                target = _join(self._run_dir, file)
                self._job.log(f"{path} could not be linked to {target} ({error.strerror}).")

    def _name_previous(self) -> None:
        """Report the launch that owned the well-known names, if it still runs."""
        run_dir = os.path.realpath(os.path.join(self._log_dir, names.LATEST))
        if run_dir != os.path.realpath(self._run_dir) and lockfile.is_running(run_dir):
            self._job.log(
                f"{os.path.basename(run_dir)} (process {lockfile.launcher_of(run_dir)}) still runs "
                f"in this folder: {self._log_dir}/latest and workerlog.N now belong to this "
                f"launch; the older job's logs are in {run_dir}."
            )

    def _link_others(self, attempt: int) -> None:
        """Link the logs of the other hosts that share the folder."""
        shared = self._job.plan.shared_logs
        if shared is None:
            return
        has_error_logs = any(spec.error_log for spec in self._job.plan.processes)
        for rank in self._job.plan.ranks:
            folder = shared.folders.get(rank.node_rank)
            if folder is None:
                continue
            shared_log = names.shared_log(rank)
            for name in (shared_log, names.error_log(shared_log))[: 1 + has_error_logs]:
                log = names.log_name(name, attempt)
                their_log = names.log_name(name, shared.attempts.get(rank.node_rank, attempt))
                with suppress(OSError):
                    os.symlink(_join(folder, their_log), os.path.join(self._run_dir, log))
                    self._link(name, log)

    # Old runs -------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Remove the oldest launches beyond --log_keep, and links into launches that are over."""
        earlier = [path for path in lockfile.listed(self._log_dir) if self._is_earlier(path)]
        over = {path for path in earlier if _is_over(path)}
        for path in earlier[self._keep - 1 :]:
            if path in over:
                # The next launch tries again to remove what is left.
                shutil.rmtree(path, ignore_errors=True)
        for name in os.listdir(self._log_dir):
            path = os.path.join(self._log_dir, name)
            # Another launch in this folder may do the same at the same moment.
            with suppress(OSError):
                if name.startswith(names.marker("")):
                    if os.stat(path).st_mtime + _MARKED_S < time.time():
                        os.unlink(path)
                elif os.path.islink(path):
                    run_dir, log = os.path.split(_join(self._log_dir, os.readlink(path)))
                    is_old = run_dir in over or not os.path.exists(run_dir)
                    is_log = os.path.dirname(run_dir) == self._runs and log.startswith(name)
                    if is_log and is_old and run_dir != self._run_dir:
                        os.unlink(path)

    def _is_earlier(self, path: str) -> bool:
        """Whether PATH is an earlier launch, under the name with which a launcher created it."""
        began, ours = (
            reading.written_at(os.path.join(p, names.LOCK)) for p in (path, self._run_dir)
        )
        is_launch = path != self._run_dir and lockfile.launcher_of(path) is not None
        return is_launch and began <= ours


def _is_over(path: str) -> bool:
    try:
        parts = [os.path.join(path, n) for n in os.listdir(path) if names.is_node_folder(n)]
    except OSError:
        # Another launch removes it.
        return False
    return not any(map(lockfile.is_running, (path, *parts)))


def _join(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))
