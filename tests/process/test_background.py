"""Processes that run beside the launcher, but not for it, are left alone."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from commandline import Command

if TYPE_CHECKING:
    from pathlib import Path


def test_background_jobs_of_a_shell_that_became_the_launcher_live_on(tmp_path: Path) -> None:
    job = Command(tmp_path, "true", ranks=1)
    shell = 'env -i sleep 60 >/dev/null 2>&1 & echo $! > background; exec "$@"'
    assert job.finish(job.start(("sh", "-c", shell, "sh"))).code == 0
    # This raises if the process is gone.
    os.kill(int((tmp_path / "background").read_text()), signal.SIGKILL)
