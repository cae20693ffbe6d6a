"""A real browser in tests: headless Chromium that reaches this machine only."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from waiting import LONG_S

if TYPE_CHECKING:
    from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def browse(address: str, home: Path, *options: str, names: str = "") -> str:
    """Return the document that Chromium, whose own files are in HOME, makes of ADDRESS.

    NAMES are its rules for host names before the last, by which every other name is nowhere.
    """
    if BROWSER is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            # Its own clock, which stands while an answer is awaited: a page looks twice.
            *("--virtual-time-budget=4000", f"--user-data-dir={home}"),
            f"--host-resolver-rules={names}MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            *options,
            address,
        ],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
