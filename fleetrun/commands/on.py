"""`fleetrun on`: runs one command on all hosts by ssh, and prefixes its output with the host."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING

import click

from fleetrun.commands import parser
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.plan.command import CHECK
from fleetrun.probe import current_folder
from fleetrun.remote import sshjob
from fleetrun.remote.fanout import Fanout
from fleetrun.remote.sshconnection import SSH_FAULT, SshConnection, ssh_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.plan.hostfile import HostEntry

# Runs a command in a folder, if it exists, and ends it when the connection ends: without a terminal
# sshd lets it run on. Everything that it has started is in one session; what the shell was just
# forking when it got TERM is killed.
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


class _OnHosts(Fanout[SshConnection]):
    """Runs a command on hosts by ssh, on at most MOST of them at the same time."""

    def __init__(
        self, hosts: Sequence[HostEntry], ssh: Sequence[str], text: str, most: int
    ) -> None:
        command = shlex.join(("sh", "-c", _REMOTE, "sh", current_folder(), text))
        super().__init__([SshConnection(host, ssh, command) for host in hosts], most)
        self._codes: dict[SshConnection, int] = {}

    @property
    def code(self) -> int:
        """The first nonzero exit code, in the order of the hosts."""
        codes = [self._codes.get(connection, 0) for connection in self._all]
        return 128 + self.signum if self.signum else next(filter(None, codes), 0)

    def _heard(self, connection: SshConnection, fd: int, part: bytes) -> None:
        self._show(connection, fd, part, has_name=len(self._all) > 1)

    def _ended(self, connection: SshConnection) -> None:
        code, outcome = connection.code or 0, f"it ended with {connection.status}"
        if code == SSH_FAULT or connection.status == -signal.SIGHUP:
            code, outcome = EnvironmentFault.exit_code, connection.why()
        if code and not self.signum:
            self._log(f"on: {connection.host.name}  {outcome}")
        self._codes[connection] = code

    def _interrupted(self, number: int) -> None:  # noqa: ARG002 - each ends the command
        """End the command on all hosts: first by hanging up, then by killing ssh."""
        self._unstarted.clear()
        for connection in self._all:
            if connection.is_open:
                connection.hang_up()
            else:
                connection.give_up("interrupted")


def _on(words: tuple[str, ...], **values: object) -> int:
    """Run the command WORDS on the hosts that the options name."""
    if not words:
        raise UsageError("on: give the command to run: `fleetrun on --hosts=a,b -- nvidia-smi`.")
    options = [f"--{name}={values[name]}" for name in _HOST_OPTIONS if values[name] is not None]
    request = parser.launch_request([*options, CHECK], os.environ)
    if not (request.hosts or request.hostfile):
        raise UsageError("on: name the hosts with --hosts or --hostfile.")
    # One word is for the shell, as with ssh: `fleetrun on --hosts=a,b -- 'df -h | tail -1'`.
    text = words[0] if len(words) == 1 else shlex.join(words)
    sys.stdout.flush()
    fanout = _OnHosts(sshjob.listed(request), ssh_command(request), text, request.ssh_fanout)
    fanout.run()
    return fanout.code


command = click.Command(
    "on",
    help="Run a command on all hosts at once, by ssh, in the current folder if it exists there. "
    "Each line of output is prefixed with its host. A single word is interpreted by the shell "
    "there. The exit code is the first nonzero one, in the order of the hosts.",
    callback=_on,
    # What follows the first word belongs to the command.
    context_settings={"allow_interspersed_args": False},
    params=[
        click.Argument(["words"], nargs=-1, metavar="[--] COMMAND..."),
        *(parser.launch_option(name) for name in _HOST_OPTIONS),
    ],
)
