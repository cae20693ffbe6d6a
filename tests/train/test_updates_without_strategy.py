"""Updates are reported without a strategy, too, for --hang_timeout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from commandline import Command, fleetrun
from training import PYTHONS, RUN, SITE, STATIC, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

DYNAMIC = """
import paddle
net = paddle.nn.Linear(4, 2)
optimizer = paddle.optimizer.Adam(parameters=net.parameters())
for _ in range(3):
    net(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
"""
TEST = """
test = static.Program()
with static.program_guard(test, startup):
    paddle.nn.Linear(4, 2)(static.data("x", [None, 4])).mean()
executor.run(startup)
executor.run(test, feed=feed)
"""


# By the new representation of programs, or by the old one.
@pytest.mark.parametrize(
    ("version", "flag", "script", "beat"),
    [
        pytest.param("3.3.1", "1", DYNAMIC, "3 update", id="dynamic-3.3.1"),
        pytest.param("3.3.1", "1", STATIC + TEST + RUN, "1 update", id="static-3.3.1-new"),
        pytest.param("3.3.1", "0", STATIC + TEST, None, id="tests-3.3.1-old"),
        pytest.param("2.6.2", "0", STATIC + TEST + RUN, "1 update", id="static-2.6.2"),
    ],
)
def test_each_update_is_a_heartbeat(
    tmp_path: Path, version: str, flag: str, script: str, beat: str | None
) -> None:
    (tmp_path / "train.py").write_text(script)
    done = run(
        PYTHONS[version],
        ["-W", "ignore", "train.py"],
        tmp_path,
        PYTHONPATH=str(SITE),
        FLAGS_enable_pir_api=flag,
        FLEETRUN_REPORT_UPDATES="1",
        FLEETRUN_HEARTBEAT=str(tmp_path / "beat"),
    )
    assert done.returncode == 0, done.stdout
    assert "fleetrun" not in done.stdout
    path = tmp_path / "beat"
    assert (" ".join(path.read_text().split()[:2]) if path.exists() else None) == beat


def test_a_report_has_the_speed_of_the_updates_alone(tmp_path: Path) -> None:
    # A long first step, and a long time after the last one.
    (tmp_path / "train.py").write_text("""
import time, paddle
net = paddle.nn.Linear(4, 2)
optimizer = paddle.optimizer.SGD(parameters=net.parameters())
times = []
for step in range(8):
    time.sleep(0.1 if step else 1)
    net(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    times.append(time.time())
time.sleep(1)
open("speed", "w").write(str(7 / (times[-1] - times[0])))
""")
    options = ("--nproc_per_node=1", "--hang_timeout=1h", "--metrics_period=0.5")
    done = fleetrun(*options, str(PYTHONS["3.3.1"]), "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert fleetrun("report", folder=tmp_path).returncode == 0
    page = (tmp_path / "log" / "latest" / "report.html").read_text()
    speed = re.search(r'"steps per second", "([\d.]+)"', page)
    assert speed is not None
    assert float(speed[1]) == pytest.approx(float((tmp_path / "speed").read_text()), rel=0.05)


def test_s61_ranks_that_spin_after_an_update_hang_without_a_strategy(tmp_path: Path) -> None:
    code = f"{DYNAMIC}\ndef spin():\n    while True: pass\nspin()"
    job = Command.python(tmp_path, code, "--hang_timeout=3", ranks=1)
    ended = job.run(env={"PATH": "/usr/bin:/bin"})
    assert ended.code == 124
    assert "Rank 0 stands in spin" in ended.stderr
    assert (tmp_path / "log" / "latest" / "heartbeat.0").read_text().split()[1] == "update"


def test_a_paddle_whose_updates_cannot_be_watched_is_a_remark(tmp_path: Path) -> None:
    # The fake package lacks the functions that are looked for.
    package = tmp_path / "paddle"
    package.mkdir()
    (package / "__init__.py").write_text("from types import SimpleNamespace\nstatic = 1\n")
    (tmp_path / "train.py").write_text("import paddle; print('trained')")
    done = run(
        PYTHONS["3.3.1"],
        ["train.py"],
        tmp_path,
        PYTHONPATH=str(SITE),
        FLEETRUN_REPORT_UPDATES="1",
        FLEETRUN_HEARTBEAT=str(tmp_path / "beat"),
    )
    assert done.stdout.splitlines()[-1] == "trained"
    assert "fleetrun: updates are not reported: " in done.stdout
