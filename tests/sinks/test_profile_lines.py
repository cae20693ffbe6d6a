"""A launch's lines about the steps that its ranks recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import Command

from fleetrun.cli.app import main


def test_the_end_says_where_the_trace_is_and_who_left_none(tmp_path: Path) -> None:
    code = """
steps, _, path = os.environ.get("FLEETRUN_PROFILE", "").partition(":")
open(f"asked.{rank}", "w").write(f"{steps} {os.path.basename(path)}")
if rank < 2:
    open(path, "w").write("{}")
"""
    job = Command.python(tmp_path, code, "--profile=0-2:3", ranks=4)
    job.argv.remove("--quiet")
    done = job.run()
    assert done.code == 0
    asked = [(tmp_path / f"asked.{rank}").read_text() for rank in range(4)]
    assert asked == [*(f"3-3 trace.{rank}.json" for rank in range(3)), " "]
    assert "Profile: open " in done.stderr
    assert "trace.0.json and 1 other in https://ui.perfetto.dev." in done.stderr


@pytest.mark.parametrize("text", ["", "0:0", "0:5-3", "0:1-9999", "0:x", "0:", "first", "0:-3"])
def test_what_cannot_be_meant_is_a_sentence(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([f"--profile={text}", "--dry-run", "train.py"], environ={})
    assert code == 2 or not text
    assert "Traceback" not in capsys.readouterr().err
