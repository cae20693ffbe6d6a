"""A command line that makes no sense on one host of a job: the others hear of it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import ports
import pytest
from commandline import Command
from waiting import LONG_S

from fleetrun import cli

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

# Where the hosts meet, written where it can be read although something else cannot.
MISTAKES = {
    "a value": (("--grace=soon", "{ips}"), {}, "", "--grace=soon"),
    "an option": (("{ips}", "--gpsu", "0"), {}, "", "o such option: --gpsu"),
    "a variable": (
        ("{ips}",),
        {"PADDLE_NPROC_PER_NODE": "many"},
        "",
        "from $PADDLE_NPROC_PER_NODE",
    ),
    "a file": ((), {}, "ips: {hosts}\ngrace: soon\n", "fleetrun.yaml:2"),
    "a strategy": (("{ips}", "--strategy=none.yaml"), {}, "", "none.yaml"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_other_hosts_are_told_as_far_as_it_can_be_read_where_they_are(
    mistake: str, tmp_path: Path
) -> None:
    options, env, config, sentence = MISTAKES[mistake]
    hosts = "127.0.0.1,127.0.0.2"
    folders = [tmp_path / name for name in ("well", "ill")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "fleetrun.yaml").write_text(config.format(hosts=hosts))
    (port,) = ports.free(1)
    ips = f"--ips={hosts}"
    start = f"--start_port={port}"
    well = Command.python(folders[0], "open('up', 'w')", ips, start, "--host=127.0.0.1", ranks=1)
    ill = Command.python(folders[1], "open('up', 'w')", start, "--host=127.0.0.2", ranks=1)
    ill.argv[-1:] = [option.format(ips=ips) for option in options] + ill.argv[-1:]
    if mistake == "a variable":
        ill.argv.remove("--nproc_per_node=1")
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(well.start()),
            stack.enter_context(ill.start(env=env)),
        ]
        consoles = [launcher.communicate(timeout=LONG_S)[1].decode() for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [2, 2], consoles
    assert sentence in consoles[0]
    assert "(on 127.0.0.2)" in consoles[0]
    assert sentence in consoles[1]
    assert not list(tmp_path.glob("*/up"))


@pytest.mark.parametrize(
    "words",
    [
        ("--grace=soon",),
        ("--grace=soon", "--nnodes=2", "--master=here"),
        ("--grace=soon", "--ips=a,,b"),
        ("--grace=soon", "--ips=127.0.0.1,127.0.0.2", "--dry-run"),
        ("--grace=soon", "--hosts=a,b"),
        ("--grace=soon", "--from-manifest=m.json"),
    ],
)
def test_where_there_is_nobody_to_tell_the_launch_ends_with_the_mistake(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "train.py"], environ={}) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "--grace=soon" in printed or "m.json" in printed
