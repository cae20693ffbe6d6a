"""The names of all variables FLEETRUN_*; scripts/reference_tables.py says what each is for.

The code in the ranks must not import this module, so it repeats the names; a test keeps both in
step, and the pages of docs/ with the public ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

ASSUME_DEVICES = "FLEETRUN_ASSUME_DEVICES"
STRATEGY = "FLEETRUN_STRATEGY"
RUN_DIR = "FLEETRUN_RUN_DIR"
JOB = "FLEETRUN_JOB"
TOKEN = "FLEETRUN_TOKEN"  # noqa: S105 - a name
_TOKEN_BYTES = 32
HEARTBEAT = "FLEETRUN_HEARTBEAT"
RECORDS = "FLEETRUN_RECORDS"
STACK_SIGNAL_VARIABLE = "FLEETRUN_STACK_SIGNAL"
STRATEGY_FILE = "FLEETRUN_STRATEGY_FILE"
PROFILE = "FLEETRUN_PROFILE"
REPORT_UPDATES = "FLEETRUN_REPORT_UPDATES"
FLIGHT_RECORDER = "FLEETRUN_FLIGHT_RECORDER"
STOP_AFTER = "FLEETRUN_STOP_AFTER"
VERIFY = "FLEETRUN_VERIFY"
EXEC = "FLEETRUN_EXEC"
EXEC_OPTIONS = "FLEETRUN_EXEC_OPTIONS"
PYTHON = "FLEETRUN_PYTHON"
COMPLETE = "_FLEETRUN_COMPLETE"


def new_token() -> str:
    """Return a new random token."""
    return os.urandom(_TOKEN_BYTES).hex()


def with_token(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return ENVIRON, with a new token for this job if it has none."""
    return environ if environ.get(TOKEN) else {**environ, TOKEN: new_token()}
