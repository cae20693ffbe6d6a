"""Every exception fleetrun raises for the user, each with its exit code."""

from __future__ import annotations


class FleetrunError(Exception):
    """Something the user can act on; the message is a full sentence, or several."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the sentences, one on each line."""
        return "\n".join(self.args)


class UsageError(FleetrunError):
    """An invalid option or file: says which one, where it came from, and what is allowed."""

    exit_code = 2


class EnvironmentFault(FleetrunError):  # a fault of the machine, not of the command
    """The machine lacks what the command needs: no such device, port taken, script missing."""

    exit_code = 3


class StrangerFault(EnvironmentFault):
    """The job does not have this host."""


class NotExecutable(EnvironmentFault):
    """The program may not be executed; the code is a shell's."""

    exit_code = 126


class MissingProgram(EnvironmentFault):
    """There is no such program; the code is a shell's."""

    exit_code = 127


class RendezvousError(FleetrunError):
    """Peers did not join, or disagree about the job."""

    exit_code = 4


def shell_code(code: int) -> int:
    """Return the exit code that a shell reports for Python's return CODE; -N means signal N.

    >>> shell_code(7), shell_code(-15)
    (7, 143)
    """
    return code if code >= 0 else 128 - code
