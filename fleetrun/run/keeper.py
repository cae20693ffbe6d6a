"""The keeper: the user's own process, which forks the supervisor and outlives it.

It passes signals on, stops and continues with the supervisor, and returns its exit code. If the
supervisor is killed, its ranks become the keeper's children (it is a child subreaper), and it ends
them. If the keeper is killed, the supervisor reads the end of a pipe, and ends the job. The keeper
has no threads and only ever waits for signals.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import time
from contextlib import suppress

from fleetrun.errors import EnvironmentFault, shell_code
from fleetrun.printing import flush
from fleetrun.run import children, libc
from fleetrun.run.loop import poll
from fleetrun.run.terminal import TerminalSettings

# What the user asks for, and how a terminal stops a job.
REQUESTS = frozenset(
    (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
)
STOPS = frozenset((signal.SIGTSTP, signal.SIGTTIN))
_HURRIES = frozenset((signal.SIGINT, signal.SIGTERM))
# Makes the keeper look at the deadline again, and pass this on, too. As the kernel hands out the
# lowest number first, all requests from before have been passed on by then.
_POKE = signal.SIGURG
# Python ignores the first two, and the supervisor the third.
_IGNORED = frozenset((signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU))
# What keys send to the whole foreground group, with this `si_code`, unlike `kill`.
_KEYS = frozenset((signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP))
_SI_KERNEL = 0x80
# In a byte for the supervisor: a key has sent it.
_TYPED = 0x80
# How long a keeper that is not stopped may take to return a poke; how often it kills the ranks of a
# supervisor that is late; and the longest wait: a day.
_ANSWER_S, _AGAIN_S, _LONGEST_S = 0.2, 0.05, 86_400.0
# What is shared: when the keeper kills all, the grace of the ranks, and how the supervisor hears of
# signals: itself, at first as a member of the keeper's group, or through the pipe.
_KILL_AT, _GRACE, _HEARS = range(3)
_IN_GROUP, _BY_PIPE, _ALONE = range(3)


class Keeper:
    """The supervisor's end of the connection with the keeper, the process PID in GROUP."""

    def __init__(self, fd: int, shared: memoryview[float], ignored: frozenset[int]) -> None:
        self.pid, self.group = os.getppid(), os.getpgrp()
        self.fd = fd
        # In ranks. What `nohup` and others want ignored stays so.
        self.default_signals = (REQUESTS | STOPS | _IGNORED) - ignored
        # Of a launch with many ranks; they get back what was allowed before.
        self.open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files[1], self.open_files[1]))
        self._is_alive = True
        self._settings = TerminalSettings()
        self._shared = shared

    def leave(self, *, has_terminal: bool) -> None:
        """Become another target than the keeper for what is killed by its group or its name.

        From now on, signals arrive through `fd`. The parent of a rank that may read the terminal
        stays in its session.
        """
        self._shared[_HEARS] = _BY_PIPE
        for signum in (REQUESTS | {signal.SIGTSTP}) - {signal.SIGQUIT}:
            # A scheduler that signals all processes of a job signals the keeper, too. Caught, not
            # ignored: ranks and helpers would inherit that.
            signal.signal(signum, lambda *_: None)
        for signum in (signal.SIGQUIT, signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(signum, signal.SIG_IGN)
        if has_terminal:
            os.setpgid(0, 0)
        else:
            os.setsid()
        libc.prctl(libc.PR_SET_NAME, b"rank-supervisor")
        libc.set_command(b"rank-supervisor of %d" % self.pid)
        # If it is stopped when the keeper is killed, nobody else would continue it.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGCONT)

    def release(self) -> None:
        """Let signals raise KeyboardInterrupt, as nothing runs any more."""
        if not self._is_alive:
            self._settings.restore(self.group)
        for signum in REQUESTS - {signal.SIGQUIT}:
            signal.signal(signum, signal.default_int_handler)
        self._shared[_HEARS] = _ALONE

    def read(self) -> list[tuple[int, bool]]:
        """Return which signals the keeper has passed on, and whether a key has sent each.

        SIGKILL is the last: the keeper itself was killed.
        """
        if not self._is_alive or not poll(0.0, self.fd):
            return []
        signums = os.read(self.fd, 4096)
        self._is_alive = bool(signums)
        told = [(byte & ~_TYPED, bool(byte & _TYPED)) for byte in signums]
        return told or [(signal.SIGKILL, False)]

    def catch_up(self) -> list[tuple[int, bool]]:
        """Return the same, with all that the keeper was sent before now."""
        self._poke()
        told: list[tuple[int, bool]] = []
        while self._is_alive and (_POKE, False) not in told and poll(_ANSWER_S, self.fd):
            told += self.read()
        return [signal_ for signal_ in told if signal_[0] != _POKE]

    def set_grace(self, grace_s: float) -> None:
        """Have the keeper give the ranks GRACE_S seconds if this process is killed."""
        self._shared[_GRACE] = grace_s

    def kill_at(self, at: float | None) -> None:
        """Have the keeper kill all ranks at AT (monotonic seconds), unless this replaces AT.

        Other hosts go on without a supervisor that is stopped, and its ranks must be gone by then.
        """
        before, self._shared[_KILL_AT] = self._shared[_KILL_AT], at or 0.0
        if at is not None and not 0.0 < before <= at:
            self._poke()

    def _poke(self) -> None:
        # It is our parent, and its id nobody else's, as long as it lives.
        if os.getppid() == self.pid:
            os.kill(self.pid, _POKE)


def hold_standard() -> None:
    """Open closed standard descriptors on /dev/null, so that no other file gets their numbers."""
    # open() returns the lowest free number.
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < 3:
        pass
    os.close(fd)


def keep() -> Keeper:
    """Return in the supervisor, a new process; the caller's own process ends with its exit code.

    Must be called before there are threads. Raises EnvironmentFault if there can be none.
    """
    if os.path.realpath("/proc/self") != f"/proc/{os.getpid()}":
        raise EnvironmentFault(
            "/proc is not mounted, or shows another PID namespace: `mount -t proc proc /proc`, or "
            "`unshare --pid --fork --mount-proc`."
        )
    flush()
    hold_standard()
    ignored = frozenset(s for s in REQUESTS | STOPS if signal.getsignal(s) == signal.SIG_IGN)
    # Ignored, it would reap our children; and who writes in the background is not stopped for it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The kernel drops ignored signals only where they are not blocked. What a script starts with
    # `&` ignores INT and QUIT, and `kill -INT` has to work, and `fleetrun stacks`.
    ignored -= {signal.SIGINT, signal.SIGQUIT}
    heard = {signal.SIGCHLD, signal.SIGCONT, _POKE, *((REQUESTS | STOPS) - ignored)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
    # What a shell had started before it became this process by `exec`.
    others = frozenset(children.pids())
    shared = memoryview(mmap.mmap(-1, 3 * 8)).cast("d")
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = os.fork()
    except OSError as error:
        raise EnvironmentFault(
            f"No process can be started ({error.strerror}): look at `ulimit -u` and the pids limit "
            "of the container."
        ) from None
    if pid == 0:
        os.close(write_fd)
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return Keeper(read_fd, shared, ignored)
    code = 1
    try:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.closerange(3, write_fd)
        os.closerange(write_fd + 1, os.sysconf("SC_OPEN_MAX"))
        code = _Service(pid, write_fd, shared, heard, others).run()
    finally:
        # It must never return into the supervisor's code.
        os._exit(code)


class _Service:
    """Serves the supervisor PID until it has ended, and nothing is left but OTHERS."""

    def __init__(
        self,
        pid: int,
        fd: int,
        shared: memoryview[float],
        heard: set[signal.Signals],
        others: frozenset[int],
    ) -> None:
        self._pid, self._fd, self._heard, self._others = pid, fd, heard, others
        self._shared, self._settings = shared, TerminalSettings()
        self._status: int | None = None
        # The last of what stops the job and what continues it, until the supervisor has stopped.
        self._is_late, self._job_control = False, 0

    def run(self) -> int:
        """Return the supervisor's exit code."""
        while self._status is None:
            kill_at, now = self._shared[_KILL_AT], time.monotonic()
            if 0.0 < kill_at <= now:
                self._kill()
                kill_at = now + _AGAIN_S
            wait_s = kill_at - now if kill_at else _LONGEST_S
            info = signal.sigtimedwait(self._heard, wait_s)
            if info is not None and info.si_signo == signal.SIGCHLD:
                self._reap()
            # After a stop that was longer than the wait, CPython returns any number.
            elif info is not None and info.si_signo in self._heard:
                is_typed = info.si_signo in _KEYS and info.si_code == _SI_KERNEL
                self._pass_on(info.si_signo, is_typed=is_typed)
        code = os.waitstatus_to_exitcode(self._status)
        # One that has ended by itself has left nobody that could be ended, unless it has failed.
        if code < 0:
            self._clean_up("was killed")
        elif code == 1 and set(children.pids()) - self._others:
            self._clean_up("has failed")
        self._settings.restore(os.getpgrp())
        return shell_code(code)

    def _clean_up(self, what: str) -> None:
        """End what a supervisor has left."""
        grace_s = 0.0 if self._is_late else self._shared[_GRACE]
        children.sweep(
            self._others, grace_s=grace_s, stuck_s=30.0, hurried_by=self._heard & _HURRIES
        )
        if self._shared[_HEARS] != _IN_GROUP:
            # Last: a terminal that Ctrl-S has stopped takes no words.
            with suppress(OSError):
                os.write(2, f"fleetrun: the supervisor {what}; its ranks were stopped.\n".encode())

    def _pass_on(self, signum: int, *, is_typed: bool) -> None:
        if signum in STOPS or (self._job_control and signum == signal.SIGCONT):
            self._job_control = signum
        # It may have ended, or be stopped while the pipe is full.
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self._fd, bytes([signum | (_TYPED if is_typed else 0)]))
        if signum in REQUESTS or signum == signal.SIGCONT:
            # Somebody may have stopped it.
            os.kill(self._pid, signal.SIGCONT)
        hears = self._shared[_HEARS]
        has_heard = hears == _BY_PIPE or (is_typed and hears == _IN_GROUP)
        if signum in REQUESTS | STOPS and not has_heard:
            # It has nothing to end yet, or any more.
            os.kill(self._pid, signum)

    def _reap(self) -> None:
        """Reap all children that have ended, as the first process of a container has to."""
        options = os.WNOHANG | os.WUNTRACED
        with suppress(ChildProcessError):
            while self._status is None and (child := os.waitpid(-1, options))[0]:
                pid, status = child
                if pid == self._pid and not os.WIFSTOPPED(status):
                    self._status = status
                elif pid == self._pid and self._job_control:
                    self._stop()

    def _stop(self) -> None:
        """Stop, for the shell to see it, as the supervisor has stopped the ranks and itself."""
        shell, last, self._job_control = os.getppid(), self._job_control, 0
        if signal.SIGCONT in {last, *signal.sigpending()}:
            # `fg` was faster; a stop now would drop it.
            os.kill(self._pid, signal.SIGCONT)
            return
        # The kernel would tell (HUP, CONT) that it is gone, if no rank shared our group.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGSTOP)
        if os.getppid() != shell and signal.SIGHUP in self._heard:
            self._pass_on(signal.SIGHUP, is_typed=False)

    def _kill(self) -> None:
        """Kill the ranks of a supervisor that is stopped, or that the kernel holds."""
        self._is_late = True
        for pid in children.pids(self._pid):
            if children.group(pid) not in {None, os.getpgid(self._pid)}:
                children.send(pid, signal.SIGKILL)
