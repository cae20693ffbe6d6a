"""Every exception fleetrun raises for the user, each with its exit code."""

from __future__ import annotations

OLDEST_PYTHON = (3, 10)


class FleetrunError(Exception):
    """Something the user can act on; the message is a full sentence."""

    exit_code = 1


class UsageError(FleetrunError):
    """An invalid option or file: says which one, where it came from, and what is allowed."""

    exit_code = 2


class SeveralErrors(UsageError):
    """Several mistakes of one file, each with a sentence of its own."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(sentences))
        self.sentences = sentences


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


class JobError(FleetrunError):
    """The job failed, which `fleetrun.launch(..., check=True)` raises."""

    def __init__(self, verdict: str, exit_code: int, run_dir: str | None) -> None:
        super().__init__(f"{verdict} (exit code {exit_code}).")
        self.exit_code = exit_code
        self.run_dir = run_dir


def shell_code(code: int) -> int:
    """Return the exit code that a shell reports for Python's return CODE; -N means signal N.

    >>> shell_code(7), shell_code(-15)
    (7, 143)
    """
    return code if code >= 0 else 128 - code


def unfit(platform: str, version: tuple[int, ...]) -> str | None:
    """Return why fleetrun cannot run here; None if it can.

    >>> unfit("linux", (3, 9, 2))
    'Python 3.10 or newer is required; this is 3.9.2.'
    """
    if platform != "linux":
        return f"Linux is required to supervise processes; this is {platform}."
    if version < OLDEST_PYTHON:
        oldest, actual = (".".join(map(str, numbers)) for numbers in (OLDEST_PYTHON, version))
        return f"Python {oldest} or newer is required; this is {actual}."
    return None
