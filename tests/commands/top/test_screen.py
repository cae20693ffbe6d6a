"""The screen of top: what fits, what is left out first, and that nothing runs over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.commands.top import screen
from fleetrun.commands.top.sample import RankRow, Snapshot

if TYPE_CHECKING:
    from rich.text import Text

GIB = 1024**3


def a_row(rank: int, state: str = "running", **more: object) -> RankRow:
    row = RankRow(
        label=f"rank {rank}",
        rank=rank,
        state=state,
        host="10.0.0.1",
        device=f"gpu:{rank}",
        pid=4000 + rank,
        cpu_percent=99.6,
        memory_bytes=3 * GIB,
        gpu_percent=87.0,
        gpu_memory_bytes=40 * GIB,
        power_w=412.4,
        step=120,
        steps_per_s=3.456,
        loss=0.123456,
        line="epoch 1 step 120 loss 0.1235",
    )
    return row._replace(**more)  # type: ignore[arg-type]


def a_snapshot(*rows: RankRow, **more: object) -> Snapshot:
    made = Snapshot("default", "/log/runs/a", "running", 83.0, 0, 0, 1, rows)
    return made._replace(**more)  # type: ignore[arg-type]


def text(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def heads(lines: list[Text]) -> list[str]:
    return text(lines)[2].replace("last line", "last_line").split()


def test_all_that_is_known_of_a_rank_stands_in_its_row() -> None:
    lines = screen.frame(a_snapshot(a_row(0), a_row(1)), 0, None)
    shown = "rank state device pid cpu% mem gpu% gmem watt step step/s loss last_line"
    assert " ".join(heads(lines)) == shown
    row = "1 running gpu:1 4001 100 3.0G 87 40G 412 120 3.46 0.1235 epoch 1 step 120 loss 0.1235"
    assert " ".join(text(lines)[4].split()) == row
    assert text(lines)[0] == "default  running  1m23s  /log/runs/a"
    assert text(lines)[1] == "2 processes: 2 running; 3.46 steps/s"


def test_what_nobody_knows_has_no_column() -> None:
    row = RankRow("rank 0", 0, "running", "here", "cpu", 1)
    lines = screen.frame(a_snapshot(row), 0, None)
    assert heads(lines) == ["rank", "state", "device", "pid"]


def test_devices_whose_use_nobody_can_read_are_named_once() -> None:
    rows = [
        RankRow(f"rank {n}", n, "running", "here", device, 1)
        for n, device in enumerate(("mlu:0", "mlu:1,mlu:2", "npu:0", "cpu"))
    ]
    said = text(screen.frame(a_snapshot(*rows), 0, None))
    assert said[1] == "4 processes: 4 running; use of MLUs and NPUs is not known"


def test_of_a_long_path_the_end_is_kept() -> None:
    run = f"/home/me/{'deep/' * 20}log/runs/20261122T135753Z-default-23306"
    head, *_ = text(screen.frame(a_snapshot(run=run), 70, None))
    assert len(head) == 70
    assert head.endswith("Z-default-23306")


def test_hosts_stand_there_where_there_are_several() -> None:
    assert "host" in heads(screen.frame(a_snapshot(a_row(0), hosts=2), 0, None))


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (20, ["rank", "state", "step"]),
        (46, ["rank", "state", "cpu%", "mem", "gpu%", "gmem", "step"]),
    ],
)
def test_a_narrow_terminal_keeps_what_matters_most(width: int, kept: list[str]) -> None:
    assert heads(screen.frame(a_snapshot(a_row(0)), width, 20)) == kept


def test_rows_that_do_not_fit_are_counted_and_odd_ones_are_shown() -> None:
    rows = [a_row(rank) for rank in range(64)]
    rows[50] = a_row(50, "stopped", is_odd=True)
    rows[60] = a_row(60, "done")
    lines = text(screen.frame(a_snapshot(*rows), 80, 10))
    assert len(lines) == 10
    assert [line.split()[0] for line in lines[3:9]] == ["0", "1", "2", "3", "4", "50"]
    assert lines[9].rstrip() == "and 58 more: 57 running, 1 done"
    assert lines[1].rstrip() == "64 processes: 62 running, 1 stopped, 1 done; 3.46 steps/s"


def test_the_verdict_stands_at_the_end() -> None:
    failed = a_row(1, "exit 7", is_odd=True)
    over = a_snapshot(a_row(0, "ended"), failed, verdict="rank 1 exited with 7", exit_code=7)
    lines = screen.frame(over._replace(phase="over", notice="rank 0 lags."), 0, None)
    assert (lines[-1].plain, lines[-1].style) == ("rank 1 exited with 7 (exit code 7)", "bold red")
    assert "lags" not in "".join(text(lines))
    assert text(lines)[1].startswith("2 processes: 1 ended, 1 failed")


def test_what_was_noticed_and_restarts_are_told() -> None:
    lines = text(
        screen.frame(a_snapshot(notice="Rank 1 lags.", attempt=1, max_restarts=3), 0, None)
    )
    assert "restarts 1 of 3" in lines[0]
    assert lines[1:3] == ["no process has been started yet", "Rank 1 lags."]


def test_a_log_cannot_write_on_the_screen() -> None:
    lines = screen.frame(a_snapshot(a_row(0, line="\x1b[2J\x1b]0;title\x07飞")), 300, None)
    assert "\x1b" not in "".join(text(lines))
    assert "飞" in text(lines)[3]


@given(
    st.lists(
        st.builds(
            a_row,
            st.integers(0, 2000),
            st.sampled_from(["running", "exit 139", "silent 3m", "stopped"]),
            line=st.text(max_size=40),
            is_odd=st.booleans(),
            loss=st.none() | st.floats(),
            step=st.none() | st.integers(0, 10**12),
        ),
        max_size=12,
    ),
    st.integers(1, 200),
    st.integers(1, 20),
)
def test_no_line_runs_over(rows: list[RankRow], width: int, height: int) -> None:
    lines = screen.frame(a_snapshot(*rows, notice="seen", hosts=2), width, height)
    assert len(lines) <= height
    for line in lines:
        assert line.cell_len == width
