"""A job of two hosts with four ranks each, as `logs`, `top` and `report` show it."""

from __future__ import annotations

import re
from pathlib import Path

import ports
import pytest
from commandline import Command, fleetrun
from waiting import until

pytestmark = pytest.mark.slow

# All print before one of them fails.
SCRIPT = """
echo step 3 loss 0.$R
touch printed.$R
until [ -e go ]; do sleep 0.05; done
[ $R != 6 ] || exit 7
exec sleep 600
"""


def seen(folder: Path, *words: str) -> str:
    """Return the output of `fleetrun WORDS` in FOLDER."""
    done = fleetrun(*words, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def files(folder: Path, name: str) -> list[str]:
    """Return the content of each host's file NAME; nothing of all while one is missing."""
    texts = [path.read_text() for path in folder.glob(f"log/latest/**/{name}")]
    return texts if len(texts) == 2 else [""]


def test_all_ranks_of_two_hosts_are_seen_while_they_run_and_afterwards(tmp_path: Path) -> None:
    master = (f"--master=127.0.0.1:{ports.free(1)[0]}", "--nnodes=2", "--metrics_period=0.5")
    hosts = [
        Command(
            tmp_path, SCRIPT, *master, f"--rank={place}", f"--host=127.0.0.{place + 1}", ranks=4
        )
        for place in (0, 1)
    ]
    launchers = [host.start() for host in hosts]
    hosts[0].wait_for(*(f"printed.{rank}" for rank in range(8)))
    # The launchers write it down a little later.
    until(lambda: len(list(tmp_path.glob("log/latest/**/plan.json"))) == 2)
    until(lambda: sum(text.count('"started"') for text in files(tmp_path, "events.jsonl")) == 8)
    # `top` shows what they have measured; the use of processors is known from the second time on.
    until(lambda: all(len(text.splitlines()) > 1 for text in files(tmp_path, "metrics.jsonl")))
    table = [line.split() for line in seen(tmp_path, "top", "--once").splitlines()]
    assert "hosts" in table[0]
    assert table[1][:4] == ["8", "processes:", "8", "running"]
    heads = table[2]
    rows = [dict(zip(heads, row, strict=False)) for row in table[3:]]
    assert [(row["rank"], row["state"], row["host"], row["step"]) for row in rows] == [
        (str(rank), "running", f"127.0.0.{1 + rank // 4}", "3") for rank in range(8)
    ]
    (tmp_path / "go").touch()
    ended = [host.finish(launcher) for host, launcher in zip(hosts, launchers, strict=True)]
    assert [end.code for end in ended] == [7, 7]

    lines = seen(tmp_path, "logs").splitlines()
    assert sorted(lines) == [f"[rank {rank}] step 3 loss 0.{rank}" for rank in range(8)]
    assert seen(tmp_path, "logs", "--failed") == "step 3 loss 0.6\n"
    last = seen(tmp_path, "top")
    assert "rank 6 exited with 7" in last.splitlines()[-1]
    page = Path(seen(tmp_path, "report").strip()).read_text(encoding="utf-8")
    bars = re.findall(r'"([a-z ]+)", "(rank \d on [\d.]+), attempt', page)
    assert len(bars) == 8
    failed = [bar for kind, bar in bars if kind == "failed first"]
    assert failed == ["rank 6 on 127.0.0.2"]
