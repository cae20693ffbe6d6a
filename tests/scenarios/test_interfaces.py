"""Interfaces that the user has exported and that cannot work are named before and afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commandline import fleetrun

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

# gloo's words.
LOST = """
import os
assert not os.environ["GLOO_SOCKET_IFNAME"] == "eth9", "Unable to find address for: eth9"
assert os.environ.get("NCCL_SOCKET_IFNAME", "lo") == "lo", "unhandled system error"
"""


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
@pytest.mark.parametrize("way", ["exported", "--env", "--config"])
def test_an_interface_that_is_missing_is_named_at_the_start_and_in_the_report(
    tmp_path: Path, name: str, way: str
) -> None:
    (tmp_path / "job.py").write_text(LOST)
    (tmp_path / "its.yaml").write_text(f"env:\n  {name}: eth9\n")
    words = {
        "--env": ("--env", f"{name}=eth9"),
        "--config": ("--config=its.yaml",),
    }.get(way, ())
    variables = {name: "eth9"} if way == "exported" else {}
    done = fleetrun("--nproc_per_node=1", *words, "job.py", folder=tmp_path, **variables)
    assert done.returncode == 1
    start, _, report = done.stderr.partition("failed first")
    for part in (start, report):
        assert f"{name}=eth9" in part, done.stderr
        assert "this host has no interface eth9 with an address; leave it out, or name lo" in part
