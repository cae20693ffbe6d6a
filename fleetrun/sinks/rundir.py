"""The run directory with all files of one launch, and the links to it in `log/`.

`log/workerlog.N`, `log/endpoints.log` and `log/latest` are links into `log/runs/<launch>/`. They
are replaced atomically, so `tail -F` continues with the next launch.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Gathered, Happening, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import lockfile, names, planfile
from fleetrun.rundir.folder import SHARED, Closing, Folder, enter, point, remove

_TRIED = ".link"
# Longer than hosts wait for each other, unless the timeout was raised.
_MARKED_S = 86400.0
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class RunDirectory(Sink):
    """Creates the run directory of JOB, and deletes the oldest ones beyond --log_keep."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        plan, request = job.plan, job.request
        self._keep = 1 if request.log_overwrite else max(1, request.log_keep)
        self._log_dir = _join(plan.cwd, plan.log_dir)
        self._folder, self._run_dir = job.folder, job.folder.path
        # As links in the log folder have it.
        self._own = os.path.relpath(self._run_dir, self._log_dir)
        self._log_fd = self._runs_fd = self._lock_fd = -1
        # What `withdraw` has to remove.
        self._has_made_log = self._has_made_runs = self._is_made = False
        shared = plan.shared_logs
        # The run directory that all hosts with this log folder share; ours may be a part of it.
        self._whole = os.path.dirname(self._run_dir) if shared and shared.own else self._run_dir
        self._is_first = shared is None or not shared.own
        self._has_complained = False

    def prepare(self) -> None:
        """Create the folder and the files that ranks need; a full or read-only disk fails here."""
        try:
            try:
                self._log_fd = enter(self._log_dir)
            except FileNotFoundError:
                os.makedirs(self._log_dir, exist_ok=True)
                self._has_made_log = True
                self._log_fd = enter(self._log_dir)
            with suppress(FileExistsError):
                os.mkdir(names.RUNS, dir_fd=self._log_fd)
                self._has_made_runs = True
            self._runs_fd = enter(names.RUNS, self._log_fd)
            self._make()
            self._is_made = self._job.plan.shared_logs is None
            self._lock_fd = lockfile.hold(self._folder, self._job.pid)
            # On file systems without owners, both are the same.
            if os.fstat(self._lock_fd).st_uid != os.fstat(self._folder.fd).st_uid:
                raise PermissionError(errno.EPERM, "a folder of another user is in its place")
            self._is_made = True
            self._job.has_links = _takes_links(self._folder)
        except OSError as error:
            raise EnvironmentFault(names.unwritable(self._run_dir, error.strerror)) from None

    def _make(self) -> None:
        """Create the run directory; the shared one may exist already."""
        if self._job.plan.shared_logs is None:
            self._folder.make(self._runs_fd)
            return
        name = os.path.basename(self._whole)
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._runs_fd)
        if self._is_first:
            # The lock, which must be new, tells whether another launch had it.
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK
        with Closing(whole := os.open(name, flags, dir_fd=self._runs_fd)):
            self._folder.make(whole)

    def withdraw(self) -> None:
        """Leave no trace of a launch that never began."""
        with suppress(OSError):
            if self._is_made:
                self._empty()
                os.rmdir(self._run_dir)
            if self._whole != self._run_dir:
                os.rmdir(self._whole)
        with suppress(OSError):
            if self._has_made_runs:
                os.rmdir(names.RUNS, dir_fd=self._log_fd)
            if self._has_made_log:
                os.rmdir(self._log_dir)
        for fd in (self._lock_fd, self._runs_fd, self._log_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._runs_fd = self._log_fd = -1

    def _empty(self) -> None:
        """Remove our files from the run directory, which other hosts may share."""
        with os.scandir(self._folder.fd) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=self._folder.fd)
                elif not names.is_node_folder(entry.name):
                    remove(entry.name, self._folder.fd)

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
        if self._is_first and self._job.plan.shared_logs is not None:
            with suppress(OSError):
                os.unlink(self._job.plan.shared_logs.marker, dir_fd=self._log_fd)
        for fd in (self._lock_fd, self._runs_fd, self._log_fd):
            os.close(fd)

    def _write_endpoints(self) -> None:
        """Write endpoints.log exactly as Paddle does: with a blank, and no final newline."""
        lines = "\n".join(str(rank.endpoint) for rank in self._job.plan.ranks if rank.is_trainer)
        self._folder.write(names.ENDPOINTS, f"PADDLE_TRAINER_ENDPOINTS: \n{lines}", SHARED)

    # Names --------------------------------------------------------------------------------------

    def _link(self, name: str, file: str = "") -> None:
        """Point NAME in the log folder to FILE of the run directory ("": to this itself).

        Atomically; a file of that name is kept.
        """
        try:
            self._keep_old(name)
            point(name, f"{self._own}/{file}" if file else self._own, self._log_fd)
        except OSError as error:
            # Only once: a full disk affects every rank.
            if not self._has_complained:
                self._has_complained = True
                path, target = _join(self._log_dir, name), _join(self._run_dir, file)
                self._job.log(f"{path} could not be linked to {target} ({error.strerror}).")

    def _name_previous(self) -> None:
        """Report the launch that owned the well-known names, if it still runs."""
        try:
            name = os.path.basename(os.readlink(names.LATEST, dir_fd=self._log_fd))
        except OSError:
            return
        if name == os.path.basename(self._run_dir):
            return
        with Closing(fd := self._open_lock(name)):
            pid = None if fd is None else lockfile.launcher(fd, name)
            if fd is not None and pid is not None and lockfile.is_locked(fd):
                self._job.log(
                    f"{name} (process {pid}) still runs in this folder: {self._log_dir}/latest and "
                    f"workerlog.N now belong to this launch; the older job's logs are in "
                    f"{self._log_dir}/runs/{name}."
                )

    def _link_others(self, attempt: int) -> None:
        """Link the logs of the other hosts that share the folder."""
        shared = self._job.plan.shared_logs
        if shared is None or not self._job.has_links:
            return
        has_error_logs = any(spec.error_log for spec in self._job.plan.processes)
        for rank in self._job.plan.ranks:
            folder = shared.folders.get(rank.node_rank)
            if folder is None:
                continue
            shared_log = names.shared_log(rank)
            for name in (
                (shared_log, names.error_log(shared_log)) if has_error_logs else (shared_log,)
            ):
                log = names.log_name(name, attempt)
                their_log = names.log_name(name, shared.attempts.get(rank.node_rank, attempt))
                with suppress(OSError):
                    os.symlink(_join(folder, their_log), log, dir_fd=self._folder.fd)
                    self._link(name, log)

    def _keep_old(self, name: str) -> None:
        """Keep the file NAME, which Paddle's own launcher leaves, under an unused name."""
        fd = self._log_fd
        try:
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                return
        except FileNotFoundError:
            return
        for number in range(1, 10_000):
            spare = f"{name}.old" if number == 1 else f"{name}.old.{number}"
            try:
                # Unlike a rename, a link cannot overwrite what another launch has just saved.
                os.link(name, spare, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
            except FileExistsError:
                continue
            return

    # Old runs ------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Remove the oldest launches beyond --log_keep, and links into launches that are gone."""
        current = os.path.basename(self._run_dir)
        earlier = sorted(
            (
                name
                for name in os.listdir(self._runs_fd)
                if name != current and self._is_launch(name)
            ),
            reverse=True,
        )
        for name in earlier[self._keep - 1 :]:
            self._remove(name)
        for name in os.listdir(self._log_fd):
            if names.is_marker(name):
                self._forget_marker(name)
            else:
                self._forget_name(name)

    def _is_launch(self, name: str) -> bool:
        """Whether fleetrun created the folder NAME under this name and for this user."""
        with Closing(fd := self._open_lock(name)):
            return fd is not None and lockfile.launcher(fd, name) is not None

    def _forget_marker(self, name: str) -> None:
        """Remove the marker of a launcher that was killed before or during its job."""
        fd = self._log_fd
        with suppress(OSError):
            if os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime + _MARKED_S > time.time():
                return
            flags = os.O_RDONLY | os.O_NONBLOCK | _NO_LINK
            with Closing(shown := os.open(name, flags, dir_fd=fd)):
                run = os.fsdecode(os.read(shown, 1000))
            if "/" in run or not self._is_launch(run) or self._is_over(run):
                os.unlink(name, dir_fd=fd)

    def _open_lock(self, name: str) -> int | None:
        """Return the lock of the run directory NAME; None: it is not ours."""
        place = os.O_PATH | os.O_DIRECTORY | _NO_LINK
        with suppress(OSError), Closing(folder := os.open(name, place, dir_fd=self._runs_fd)):
            fd = os.open(names.LOCK, os.O_RDWR | os.O_NONBLOCK | _NO_LINK, dir_fd=folder)
            status, own_status = os.fstat(fd), os.fstat(self._lock_fd)
            if (
                stat.S_ISREG(status.st_mode)
                and status.st_uid == os.fstat(folder).st_uid == own_status.st_uid
                and status.st_dev == own_status.st_dev
            ):
                return fd
            os.close(fd)
        return None

    def _is_over(self, name: str) -> bool:
        """Whether NAME is an earlier launch of ours that has ended."""
        with Closing(fd := self._open_lock(name)):
            if fd is None or lockfile.is_locked(fd) or self._has_others(name):
                return False
            # Within one second names are ordered by process id, and those wrap around.
            began, our_start = os.fstat(fd).st_mtime_ns, os.fstat(self._lock_fd).st_mtime_ns
            return (began, name) < (our_start, os.path.basename(self._run_dir))

    def _has_others(self, name: str) -> bool:
        """Whether another host still runs its part of the shared launch NAME."""
        try:
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK, dir_fd=self._runs_fd)
        except OSError:
            return False
        flags = os.O_RDWR | os.O_NONBLOCK | _NO_LINK
        with Closing(folder):
            for part in filter(names.is_node_folder, os.listdir(folder)):
                with (
                    suppress(OSError),
                    Closing(fd := os.open(f"{part}/{names.LOCK}", flags, dir_fd=folder)),
                ):
                    if lockfile.is_locked(fd):
                        return True
        return False

    def _remove(self, name: str) -> None:
        """Remove the launch NAME, if it is over."""
        # The next launch tries again to remove what is left.
        with suppress(OSError), Closing(fd := self._open_lock(name)):
            if fd is not None and not lockfile.is_locked(fd) and not self._has_others(name):
                remove(name, self._runs_fd)

    def _forget_name(self, name: str) -> None:
        """Remove the link NAME into a launch that is over; this launch has no such file."""
        try:
            target = os.readlink(name, dir_fd=self._log_fd)
        except OSError:
            # It is not a link.
            return
        if target.startswith(f"{self._own}/"):
            return
        runs = os.path.dirname(self._run_dir)
        run_dir, log = os.path.split(_join(self._log_dir, target))
        earlier = os.path.basename(run_dir)
        if run_dir == self._run_dir or os.path.dirname(run_dir) != runs or not log.startswith(name):
            return
        is_gone = not os.path.lexists(run_dir)
        if is_gone or (self._is_launch(earlier) and self._is_over(earlier)):
            # Another launch in this folder may do the same at the same moment.
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._log_fd)


def _join(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))


def _takes_links(folder: Folder) -> bool:
    """Whether FOLDER's file system has symbolic links; FAT and some network shares do not."""
    try:
        os.symlink(names.LOCK, _TRIED, dir_fd=folder.fd)
        os.unlink(_TRIED, dir_fd=folder.fd)
    except OSError:
        return False
    return True
