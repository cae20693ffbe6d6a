"""A scenario that failed half-way leaves nobody behind for the next one."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from processes import survivors

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """Kill what the commands of a test have left; the test itself has failed by then."""
    Command.made.clear()
    yield
    for command in Command.made:
        for pid in survivors(command.marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
