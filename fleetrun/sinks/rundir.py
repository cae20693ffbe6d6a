"""The run directory: all of one launch in one place, and the names in `log/` that users know.

`log/workerlog.N`, `log/endpoints.log` and `log/latest` are links into `log/runs/<launch>/`; they
are replaced in one step, so `tail -F` goes on with the next launch.
"""

# pathlib costs start-up time.
# ruff: noqa: PTH102, PTH103, PTH105, PTH106, PTH108, PTH114, PTH115, PTH118, PTH120, PTH208, PTH211

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Restarting, Started
from fleetrun.run.worker import log_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan
    from fleetrun.run.events import Happening
    from fleetrun.run.loop import Waiting

_LOCK = "lock"
_LATEST = "latest"
_ENDPOINTS = "endpoints.log"
_SCHEMA = 1
# What nobody waits for is done when the ranks have had the processors for themselves a while.
_PLAN_AFTER_S = 0.3
_PRUNE_AFTER_S = 1.5


class RunDirectory:
    """Makes the run directory of PLAN and keeps at most KEEP of them."""

    def __init__(
        self, plan: LaunchPlan, *, keep: int, overwrite: bool, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._keep = 1 if overwrite else max(1, keep)
        self._say = say
        self._log_dir = _join(plan.cwd, plan.log_dir)
        self._run_dir = _join(plan.cwd, plan.run_dir)
        self._lock_fd = -1
        self._has_complained = False
        self._chores: list[Callable[[], None]] = []

    def prepare(self) -> None:
        """Make the folder and what the ranks need in it; a full or read-only disk shows here."""
        try:
            os.makedirs(os.path.dirname(self._run_dir), exist_ok=True)
            os.mkdir(self._run_dir, 0o755)
            self._lock_fd = os.open(
                _join(self._run_dir, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            _is_locked(self._lock_fd)
            os.write(self._lock_fd, b"%d\n" % os.getpid())
            self._write_files()
        except OSError as error:
            raise EnvironmentFault(
                f"The logs cannot be written to {self._run_dir} ({error.strerror}): make room or "
                "choose another folder with --log_dir."
            ) from None

    def open(self, waiting: Waiting) -> None:
        """Give the launch its well-known names; the rest can wait."""
        self._waiting = waiting
        self._link(_LATEST, self._run_dir)
        if self._plan.ranks:
            self._link(_ENDPOINTS, self._write_endpoints())
        now = time.monotonic()
        for chore, delay in ((self._write_plan, _PLAN_AFTER_S), (self._prune, _PRUNE_AFTER_S)):
            self._chores.append(chore)
            waiting.alarm(chore.__name__, now + delay, lambda chore=chore: self._do(chore))  # type: ignore[misc]

    def tell(self, happening: Happening) -> None:
        """Let a process's well-known log point to the attempt that runs."""
        if isinstance(happening, Started):
            spec = self._plan.processes[happening.process]
            self._link(spec.log, log_path(self._plan, spec, happening.attempt))
        elif isinstance(happening, Restarting):
            # The same run with other ports.
            self._plan = happening.plan
            self._write_files()
            if self._plan.ranks:
                self._write_endpoints()

    def is_busy(self) -> bool:
        """Leave nothing to wait for: `close` does what is left."""
        return False

    def shows(self, process: int) -> bool:  # noqa: ARG002 - the protocol's
        """Nothing is shown here."""
        return False

    def close(self) -> None:
        """Do what a short launch had no time for, and give up the claim to the folder."""
        for chore in list(self._chores):
            self._do(chore)
        os.close(self._lock_fd)

    def _do(self, chore: Callable[[], None]) -> None:
        if chore in self._chores:
            self._chores.remove(chore)
            chore()

    def _write_files(self) -> None:
        for path, text in self._plan.files.items():
            _write(_join(self._plan.cwd, path), text)

    def _write_endpoints(self) -> str:
        """Write endpoints.log, byte for byte as Paddle does: a blank, and no last newline."""
        lines = "\n".join(str(rank.endpoint) for rank in self._plan.ranks if rank.role == "TRAINER")
        path = _join(self._run_dir, _ENDPOINTS)
        _write(path, f"PADDLE_TRAINER_ENDPOINTS: \n{lines}")
        return path

    # Names --------------------------------------------------------------------------------------

    def _link(self, name: str, target: str) -> None:
        """Let NAME in the log folder be a link to TARGET, in one step, losing nobody's file."""
        path = _join(self._log_dir, name)
        draft = _join(self._log_dir, f".{name}.{os.getpid()}")
        try:
            # Paddle's own launcher leaves a file of this name.
            if not os.path.islink(path) and os.path.lexists(path):
                _keep_old(path)
            os.symlink(os.path.relpath(target, self._log_dir), draft)
            os.replace(draft, path)
        except OSError as error:
            # Once: on a disk that is full it is the same for every rank.
            if not self._has_complained:
                self._has_complained = True
                self._say(f"{path} could not be made to point to {target} ({error.strerror}).")

    # Chores -------------------------------------------------------------------------------------

    def _write_plan(self) -> None:
        """Write plan.json: what was started, without the secrets."""
        import json  # noqa: PLC0415 - 3 ms that a start has no use for

        from fleetrun.plan import arguments, secrets  # noqa: PLC0415 - see above

        plan = self._plan
        envs = [spec.env for spec in plan.processes]
        # Nearly everything is the same for all, and it may be long.
        common = {k: v for k, v in envs[0].items() if all(e.get(k) == v for e in envs)}
        document = {
            "schema": _SCHEMA,
            "job_id": plan.job_id,
            "mode": plan.mode,
            "engine": plan.engine,
            "generation": plan.generation,
            "node_rank": plan.node_rank,
            "nodes": plan.nodes,
            "cwd": plan.cwd,
            "rules": plan.rules._asdict(),
            "notes": plan.notes,
            "env": {name: secrets.redact(name, value) for name, value in common.items()},
            "processes": [
                {
                    "name": spec.name,
                    "rank": None if spec.rank is None else spec.rank.rank,
                    "argv": arguments.conceal(spec.argv)[0],
                    "env": {
                        name: secrets.redact(name, value)
                        for name, value in spec.env.items()
                        if name not in common
                    },
                    "unset": spec.unset,
                    "cpus": spec.cpus,
                    "log": spec.log,
                    "essential": spec.essential,
                    "awaits": [[str(one) for one in group] for group in spec.awaits],
                }
                for spec in plan.processes
            ],
        }
        _write_at_once(_join(self._run_dir, "plan.json"), json.dumps(document, indent=1) + "\n")

    def _prune(self) -> None:
        """Remove the oldest launches beyond what is kept, and names that lead to none of ours."""
        runs, ours = os.path.split(self._run_dir)
        others = sorted((name for name in os.listdir(runs) if name != ours), reverse=True)
        for name in others[self._keep - 1 :]:
            _remove_run(_join(runs, name))
        for name in os.listdir(self._log_dir):
            self._forget_name(name, runs)

    def _forget_name(self, name: str, runs: str) -> None:
        """Remove a link NAME into an earlier launch that is over: this one has no such file."""
        path = _join(self._log_dir, name)
        if not os.path.islink(path):
            return
        run_dir, log = os.path.split(_join(self._log_dir, os.readlink(path)))
        is_earlier = os.path.dirname(run_dir) == runs and run_dir < self._run_dir
        if is_earlier and log.startswith(name) and not _is_alive(run_dir):
            os.unlink(path)


def _join(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        rest = memoryview(os.fsencode(text))
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


def _write_at_once(path: str, text: str) -> None:
    """Let TEXT appear as the file PATH as a whole, or not at all on a disk that is full."""
    draft = f"{path}.new"
    try:
        _write(draft, text)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _keep_old(path: str) -> None:
    """Give the file PATH a second name that nobody has, so that the first can be taken."""
    for number in range(1, 10_000):
        try:
            # Unlike a rename, this cannot hit a file that another launch has just saved.
            os.link(path, f"{path}.old" if number == 1 else f"{path}.old.{number}")
        except FileExistsError:
            continue
        return


def _is_locked(fd: int) -> bool:
    """Lock FD for us; True if somebody alive has it or nobody can tell."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _is_alive(run_dir: str) -> bool:
    """Whether the launch of RUN_DIR goes on."""
    fd = _open_lock(run_dir)
    if fd is None:
        return False
    try:
        return _is_locked(fd)
    finally:
        os.close(fd)


def _open_lock(run_dir: str) -> int | None:
    try:
        return os.open(_join(run_dir, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return None
        raise


def _remove_run(run_dir: str) -> None:
    """Remove the folder of a launch that is over; what is not a launch's folder stays."""
    fd = _open_lock(run_dir)
    if fd is None:
        return
    try:
        if not _is_locked(fd):
            _remove_tree(run_dir)
    finally:
        os.close(fd)


def _remove_tree(folder: str) -> None:
    # Not shutil: it takes longer to import than this takes to run.
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove_tree(entry.path)
            else:
                os.unlink(entry.path)
    os.rmdir(folder)
