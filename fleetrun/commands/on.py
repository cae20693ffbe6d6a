"""`fleetrun on`: one command on all hosts, by ssh, each line of what it prints after its host."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import click

from fleetrun.commands import parser
from fleetrun.errors import EnvironmentFault, UsageError, shell_code
from fleetrun.plan.command import CHECK
from fleetrun.plan.visible import visible
from fleetrun.probe import current_folder
from fleetrun.remote import sshjob
from fleetrun.remote.outlets import Outlets
from fleetrun.remote.sshconnection import OPTIONS, SSH_FAULT, ssh_command
from fleetrun.run.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.plan.hostfile import HostEntry

_CHUNK = 65536
_LONGEST_LINE = 65536
# Runs a command in a folder, if that is there, and ends it when the connection does: without a
# terminal sshd lets it run on. Whatever it has started is in one session; what the shell was just
# forking when that got TERM is killed.
_REMOTE = """\
exec 3<&0
cd "$1" 2>/dev/null || cd
command -v setsid >/dev/null && session=setsid
$session sh -c "$2" </dev/null 3<&- &
child=$!
{
    cat <&3
    trap "" TERM
    kill -TERM -$child || kill -TERM $child
    for second in 1 2 3 4 5; do kill -0 -$child || exit; sleep 1; done
    kill -KILL -$child
} >/dev/null 2>&1 &
watch=$!
wait $child
code=$?
kill $watch 2>/dev/null
exit $code
"""
_HOST_OPTIONS = ("hosts", "hostfile", "include", "exclude", "ssh", "ssh_fanout")


class _HostCommand:
    """The command on one host: its ssh, and what of a line has come of each of its streams."""

    def __init__(self, host: HostEntry, argv: Sequence[str]) -> None:
        self.host = host
        self.last = ""
        self._lines = {1: b"", 2: b""}
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for us, who hang up.
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self.process.pid)

    def stream(self, fd: int) -> int:
        """Return our end of its output (FD 1) or errors (2)."""
        pipe = self.process.stdout if fd == 1 else self.process.stderr
        assert pipe is not None
        return pipe.fileno()

    def take(self, fd: int, part: bytes) -> list[bytes]:
        """Return the lines that PART of its stream FD ends; an empty part ends the last one."""
        *lines, rest = (self._lines[fd] + part).split(b"\n")
        if rest and (not part or len(rest) > _LONGEST_LINE):
            lines, rest = [*lines, rest], b""
        self._lines[fd] = rest
        if fd == 2 and lines:
            self.last = lines[-1].decode(errors="replace").strip()
        return lines

    def hang_up(self) -> None:
        """End its input, which ends the command."""
        if self.process.stdin is not None:
            self.process.stdin.close()


class _Fanout:
    """Runs a command on ENTRIES by ssh, on so many at the same time."""

    def __init__(
        self, entries: Sequence[HostEntry], ssh: Sequence[str], text: str, most: int
    ) -> None:
        self._waiting = list(entries)
        self._ssh = ssh
        command = shlex.join(("sh", "-c", _REMOTE, "sh", current_folder(), text))
        self._command = f"exec {command}"
        self._most = most
        self._has_prefix = len(entries) > 1
        self._running: list[_HostCommand] = []
        self._codes: dict[str, int] = {}
        self._names = [host.name for host in entries]
        self._loop = Loop()
        self._outlets = Outlets(self._loop)
        self._signum = 0

    def run(self) -> int:
        """Run it everywhere, and return the first bad exit code in the order of the hosts."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous_fd = signal.set_wakeup_fd(write_fd)
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {one: signal.signal(one, lambda *_: None) for one in caught}
        self._loop.watch(read_fd, lambda: self._stop(read_fd))
        try:
            self._start()
            while self._running:
                self._loop.turn()
            self._outlets.drain()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            self._loop.close()
            os.close(read_fd)
            os.close(write_fd)
        if self._signum:
            return 128 + self._signum
        return next((code for name in self._names if (code := self._codes.get(name, 0))), 0)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._most and not self._signum:
            host = self._waiting.pop(0)
            one = _HostCommand(host, [*self._ssh, *OPTIONS, host.target, self._command])
            self._running.append(one)
            for fd in (1, 2):
                self._loop.watch(one.stream(fd), partial(self._show, one, fd))
            self._loop.watch(one.pidfd, partial(self._ended, one))

    def _show(self, one: _HostCommand, fd: int) -> None:
        self._read(one, fd)

    def _read(self, one: _HostCommand, fd: int) -> bool:
        """Show what has come; return whether there may be more."""
        stream = one.stream(fd)
        part = os.read(stream, _CHUNK)
        if not part:
            self._loop.unwatch(stream)
        lines = one.take(fd, part)
        prefix = f"[{one.host.name}] ".encode() if self._has_prefix else b""
        shown = b"".join(prefix + line + b"\n" for line in lines)
        if shown:
            self._outlets.put(fd, shown, stream if part else -1, partial(self._show, one, fd))
        return bool(part)

    def _ended(self, one: _HostCommand) -> None:
        self._loop.unwatch(one.pidfd)
        os.close(one.pidfd)
        for fd in (1, 2):
            while self._read(one, fd):
                pass
        one.hang_up()
        code = one.process.wait()
        for pipe in (one.process.stdout, one.process.stderr):
            assert pipe is not None
            pipe.close()
        self._running.remove(one)
        if code and not self._signum:
            said = f"it ended with {code}"
            if code in {SSH_FAULT, -signal.SIGHUP}:
                code, said = EnvironmentFault.exit_code, f"ssh: {one.last or 'it ended with 255'}"
            self._say(f"{one.host.name}  {said.replace('ssh: ssh: ', 'ssh: ')}")
        self._codes[one.host.name] = shell_code(code)
        self._start()

    def _stop(self, read_fd: int) -> None:
        """End the command on all hosts: by hanging up, and when asked again by ending the ssh."""
        for number in os.read(read_fd, 64):
            is_first, self._signum = not self._signum, self._signum or number
            self._waiting.clear()
            for one in self._running:
                if is_first:
                    one.hang_up()
                else:
                    with suppress(ProcessLookupError):
                        one.process.kill()

    def _say(self, text: str) -> None:
        self._outlets.put(2, f"fleetrun: on: {visible(text)}\n".encode(), -1, lambda: None)


def _on(words: tuple[str, ...], **given: object) -> int:
    """Run the command WORDS on the hosts that the options name."""
    if not words:
        raise UsageError("on: give the command to run: `fleetrun on --hosts=a,b -- nvidia-smi`.")
    told = [f"--{name}={given[name]}" for name in _HOST_OPTIONS if given[name] is not None]
    wanted = parser.launch_request([*told, CHECK], os.environ)
    if not (wanted.hosts or wanted.hostfile):
        raise UsageError("on: name the hosts with --hosts or --hostfile.")
    # One word is the shell's, as with ssh: `fleetrun on --hosts=a,b -- 'df -h | tail -1'`.
    text = words[0] if len(words) == 1 else shlex.join(words)
    sys.stdout.flush()
    return _Fanout(sshjob.listed(wanted), ssh_command(wanted), text, wanted.ssh_fanout).run()


command = click.Command(
    "on",
    help="Run one command on all hosts at the same time, by ssh, in this folder where it is there. "
    "Each line that it prints stands after its host. One word is read by the shell there. The exit "
    "code is the first bad one, in the order of the hosts.",
    callback=_on,
    # What follows the first word belongs to the command.
    context_settings={"allow_interspersed_args": False},
    params=[
        click.Argument(["words"], nargs=-1, metavar="[--] COMMAND..."),
        *(parser.launch_option(name) for name in _HOST_OPTIONS),
    ],
)
