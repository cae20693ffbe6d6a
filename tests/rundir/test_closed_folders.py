"""A folder that this user may not enter is named, without useless advice."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from waiting import LONG_S

from fleetrun.errors import EnvironmentFault
from fleetrun.host import scripts
from fleetrun.model import Script
from fleetrun.run.isolation import IsolatedCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a folder like /root, in one that all may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    (tmp_path / "root").mkdir(mode=0o700)
    return tmp_path / "root"


def as_nobody(call: Callable[[], object]) -> object:
    """Return what CALL returns to an ordinary user."""

    def become() -> object:
        os.setgroups([])
        os.setuid(NOBODY)
        return call()

    result = IsolatedCall(become).result(LONG_S)
    assert result is not None
    assert not result.trouble
    return result.value


@pytest.mark.parametrize("name", ["train.py", "train.sh"])
def test_a_script_in_a_closed_folder_is_no_missing_one(home: Path, name: str) -> None:
    (home / name).touch(mode=0o755)

    def find() -> str:
        try:
            scripts.find(Script("file", str(home / name), ()), "/", {})
        except EnvironmentFault as fault:
            return str(fault)
        return ""

    assert as_nobody(find) == (
        f"{home / name} cannot be reached: this user (uid {NOBODY}) may not enter the folder "
        f"{home}. Put it elsewhere, or let this user enter that folder."
    )
    assert not find()
