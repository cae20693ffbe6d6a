"""Launchers of one job, all on this machine: several hosts without namespaces."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import TYPE_CHECKING

import ports
from commandline import Command
from waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from commandline import Ended


class Job:
    """Launchers of one job, each with its command in a folder of its own."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        for command in commands:
            command.argv.remove("--quiet")
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start_all(self) -> Job:
        """Start them all."""
        self.launchers = [command.start() for command in self.commands]
        return self

    def wait_for(self, *names: str) -> None:
        """Wait until the ranks of all hosts have made these files."""
        for command in self.commands:
            command.wait_for(*names)

    def finish(self) -> list[Ended]:
        """Wait for all launchers; no process may be left."""
        return list(map(Command.finish, self.commands, self.launchers))

    def ends(self) -> list[int]:
        """Wait for all launchers, check that no process is left, and return the exit codes."""
        return [ended.code for ended in self.finish()]


class Meeting(Job):
    """Launchers that meet at --master, each with one rank."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *options: str,
        token: str = "known to this test alone",  # noqa: S107 - as it says
        make: Callable[..., Command] = Command,
        **env: str,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.env = {"FLEETRUN_TOKEN": token, **env} if token else env
        self._make = make
        self.script = script
        self.port = ports.free(1)[0]
        own = (f"--master=127.0.0.1:{self.port}", "--host=127.0.0.1")
        self.options: tuple[str, ...] = (*own, *options)

    def start(self, *more: str, host: int | None = None) -> subprocess.Popen[bytes]:
        """Start one more launcher; the first one serves, and this waits until it listens.

        It has a folder of its own, or that of an earlier one, HOST.
        """
        number = len(self.launchers)
        own = self.folder / f"host{number if host is None else host}"
        own.mkdir(parents=True, exist_ok=True)
        command = self._make(own, self.script, *self.options, *more, ranks=1)
        command.argv.remove("--quiet")
        with (own / "output").open("wb") as output:
            self.launchers.append(command.start(env=self.env, stdout=output, stderr=output))
        self.commands.append(command)
        if not number:
            until(self.is_served)
        return self.launchers[-1]

    def is_served(self) -> bool:
        """Whether a launcher listens at the port."""
        with closing(socket.socket()) as call:
            return call.connect_ex(("127.0.0.1", self.port)) == 0

    def output(self, number: int) -> str:
        """Return the output of launcher NUMBER so far."""
        return (self.folder / f"host{number}" / "output").read_text(errors="replace")
