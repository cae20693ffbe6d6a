"""Ranks that start warm, in tests, are as gone as any when the process that stands for them is."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import lab
import pytest
from checkout import environ
from training import PYTHONS, WARM_PATH
from waiting import LONG_S, until
from warming import warm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Much memory, so that its end takes the kernel long.
SERVES = """
import pathlib, socket, time
server = socket.create_server(("0.0.0.0", 6170))
memory = bytearray(b"x" * (1 << 30))
pathlib.Path("ready").touch()
time.sleep(1000)
"""


@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing() or "")
def test_after_term_its_port_is_free_on_a_host(tmp_path: Path) -> None:
    with lab.hosts(1, tmp_path) as [host]:
        (host.folder / "serves.py").write_text(SERVES)
        variables = {**warm(PYTHONS["3.3.1"]), "PYTHONPATH": WARM_PATH}
        for _ in range(3):
            words = (str(PYTHONS["3.3.1"]), "-u", "serves.py")
            rank = host.start(*words, env=environ(**variables))
            until((host.folder / "ready").exists)
            (host.folder / "ready").unlink()
            # The only other processes are those of the host.
            host.run("pkill", "-TERM", "-o", "-f", "serves.py")
            assert rank.wait(LONG_S) == -signal.SIGTERM
            bind = "import socket; socket.create_server(('0.0.0.0', 6170))"
            host.run(str(PYTHONS["3.3.1"]), "-c", bind)


@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing() or "")
def test_on_a_host_too_it_ends_by_the_signal_that_killed_it(tmp_path: Path) -> None:
    with lab.hosts(1, tmp_path) as [host]:
        (host.folder / "dies.py").write_text("import os; os.kill(os.getpid(), 9)")
        variables = {**warm(PYTHONS["3.3.1"]), "PYTHONPATH": WARM_PATH}
        rank = host.start(str(PYTHONS["3.3.1"]), "-u", "dies.py", env=environ(**variables))
        assert rank.wait(LONG_S) == -signal.SIGKILL, host.output
        assert host.output == ""
