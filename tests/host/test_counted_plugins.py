"""The devices of plug-ins, as a Paddle counts them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_paddles import fake_paddle, plugins
from plans import a_request

from fleetrun.errors import EnvironmentFault
from fleetrun.host import probe
from fleetrun.run import isolation

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import Facts

SOMEBODY = f"Paddle 3.3.1 of {sys.executable}"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a bare machine, and a folder with a script to stand in."""
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/proc/self/fd").mkdir(parents=True)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "root"


def read(
    root: Path,
    *texts: str,
    environ: dict[str, str] | None = None,
    timeout_s: float = 60.0,
    log: Callable[[str], None] = print,
    **fields: Any,
) -> Facts:
    """Read the machine under ROOT, whose Paddle has the plug-ins of TEXTS."""
    known = {
        "PYTHONPATH": fake_paddle(root.parent),
        "CUSTOM_DEVICE_ROOT": plugins(root.parent, *texts) if texts else "",
    }
    return probe.read(
        a_request(**fields),
        {**known, **(environ or {})},
        root=str(root),
        log=log,
        plugins_timeout_s=timeout_s,
    )


def test_a_driver_without_its_plugin_is_said_with_what_to_install(root: Path) -> None:
    for number in range(8):
        (root / f"dev/davinci{number}").touch()
    facts = read(root)
    assert (facts.paddle_counts, facts.device_counts, facts.has_plugins) == ({}, {}, False)
    assert facts.absent == {
        "npu": (f"{SOMEBODY} has no plug-in for NPUs (pip install paddle-custom-npu)")
    }


def test_a_plugin_that_crashes_is_a_fault(root: Path) -> None:
    with pytest.raises(EnvironmentFault, match="the process that asks it was killed by SIGSEGV"):
        read(root, "mlu 2", environ={"FAKE_PADDLE_KILL": "1"})


def test_a_plugin_that_hangs_is_a_fault_in_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "_REMARK_S", 0.05)
    printed: list[str] = []
    with pytest.raises(EnvironmentFault, match=r"has not answered within 0\.2 s"):
        read(root, "mlu 2", environ={"FAKE_PADDLE_SLEEP": "600"}, timeout_s=0.2, log=printed.append)
    assert printed == ["Waiting up to 0.2 s for Paddle's plug-ins to count their devices."]
