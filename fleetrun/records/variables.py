"""The table of all variables FLEETRUN_*: who sets and reads each, and its meaning.

The code in the ranks must not import this module, so it repeats the names; a test keeps both in
step, and the pages of docs/ with the public ones.
"""

from __future__ import annotations

import os

from fleetrun.typehints import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

ASSUME_DEVICES = "FLEETRUN_ASSUME_DEVICES"
STRATEGY = "FLEETRUN_STRATEGY"
RUN_DIR = "FLEETRUN_RUN_DIR"
JOB = "FLEETRUN_JOB"
TOKEN = "FLEETRUN_TOKEN"  # noqa: S105 - a name
_TOKEN_BYTES = 32
HEARTBEAT = "FLEETRUN_HEARTBEAT"
ERROR_FILE = "FLEETRUN_ERROR_FILE"
RECORDS = "FLEETRUN_RECORDS"
STACK_SIGNAL_VARIABLE = "FLEETRUN_STACK_SIGNAL"
STRATEGY_FILE = "FLEETRUN_STRATEGY_FILE"
PROFILE = "FLEETRUN_PROFILE"
REPORT_UPDATES = "FLEETRUN_REPORT_UPDATES"
FORK_SERVER = "FLEETRUN_FORK_SERVER"
FLIGHT_RECORDER = "FLEETRUN_FLIGHT_RECORDER"
STOP_AFTER = "FLEETRUN_STOP_AFTER"
VERIFY = "FLEETRUN_VERIFY"
EXEC = "FLEETRUN_EXEC"
EXEC_OPTIONS = "FLEETRUN_EXEC_OPTIONS"
PYTHON = "FLEETRUN_PYTHON"
COMPLETE = "_FLEETRUN_COMPLETE"
# The prefix of variables that restore a secret argument of a command without a better name.
SECRET = "FLEETRUN_"  # noqa: S105 - a name
SECRET_ARGUMENT = "FLEETRUN_ARG_"  # noqa: S105 - see above


def new_token() -> str:
    """Return a new random token."""
    return os.urandom(_TOKEN_BYTES).hex()


def with_token(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return ENVIRON, with a new token for this job if it has none."""
    return environ if environ.get(TOKEN) else {**environ, TOKEN: new_token()}


class Variable(NamedTuple):
    """One variable: `is_public` if users may rely on it."""

    name: str
    set_by: str
    read_by: str
    meaning: str
    is_public: bool = False


# `NAME [WHO SETS IT > WHO READS IT] MEANING`; `NAME!` is public. What begins with blanks goes on.
_TEXT = """
FLEETRUN_ASSUME_DEVICES! [the user > the launcher] Plan as if this host had these devices
    (`gpu:8`, `mlu:4`, `cpu`); only for --dry-run.
FLEETRUN_STRATEGY! [the user > the launcher] Presets and strategy files, as `a:b`, used if
    --strategy is not given.
FLEETRUN_TOKEN! [the user > the launcher] A secret that all launchers of a job on several hosts
    share; ranks do not get it.
FLEETRUN_EXEC! [`fleetrun exec` > Pythons below it] The Python with the fleetrun that launches
    instead of Paddle's launcher; `off` leaves Paddle's launcher alone.
FLEETRUN_EXEC_OPTIONS [`fleetrun exec` > the launcher] The options of `fleetrun exec`, as JSON:
    the defaults of launches; ranks do not get it.
FLEETRUN_PYTHON [Pythons below `fleetrun exec` > the launcher] The Python of the ranks, where it
    is not the launcher's; ranks do not get it.
FLEETRUN_RUN_DIR! [the launcher > scripts] The run directory of this launch; scripts may put their
    own files there.
FLEETRUN_HEARTBEAT! [the launcher > scripts; ranks that report updates] The file for the number
    of the last step, for --hang_timeout.
FLEETRUN_ERROR_FILE! [the launcher > programs other than Python] The file to which a rank can write
    the error that ends it, as JSON; Python's exceptions are recorded anyway.
FLEETRUN_RECORDS [the launcher > Python ranks] The file to which a rank appends its exception
    and what became of the strategy.
FLEETRUN_JOB [the launcher > the launcher and its guard] The name of the launch, which identifies
    its processes in /proc.
FLEETRUN_STACK_SIGNAL [the launcher > Python ranks] The number of the signal that makes a rank dump
    the stacks of its threads.
FLEETRUN_STRATEGY_FILE [the launcher > Python ranks] The file with the requested strategy; unset
    without one.
FLEETRUN_PROFILE [the launcher > Python ranks] Which steps a rank profiles, and the file for its
    trace; only with --profile.
FLEETRUN_REPORT_UPDATES [the launcher > Python ranks] Report each update to the heartbeat file
    even without a strategy; with --hang_timeout.
FLEETRUN_FORK_SERVER [the guard > a Python that forks ranks] Whose orders that process takes; no
    rank gets it.
FLEETRUN_FLIGHT_RECORDER [the launcher > Python ranks] The file in which a rank records its
    collectives; only with --hang_timeout or --flight_recorder.
FLEETRUN_STOP_AFTER [`fleetrun tune`, `fleetrun verify` > Python ranks] The number of updates after
    which a rank ends; it records the time and loss of each.
FLEETRUN_VERIFY [`fleetrun verify` > Python ranks] The snapshots of parameters that a rank takes,
    as JSON.
_FLEETRUN_COMPLETE [the shell's completion > the launcher] Requests completions instead of a
    launch.
FLEETRUN_ARG_N! [the user > the launcher] Word N of a command that --from-manifest repeats,
    if it is secret and has no name.
"""


def table() -> tuple[Variable, ...]:
    """Return all variables; no launch reads them."""
    import re  # no launch has time for it

    rows = re.findall(r"(?m)^(\w+)(!?) \[(.+?) > (.+?)\] (.+)$", _TEXT.replace("\n    ", " "))
    return tuple(
        Variable(name, set_by, read_by, meaning, mark == "!")
        for name, mark, set_by, read_by, meaning in rows
    )
