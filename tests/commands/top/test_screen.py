"""The screen of top: what fits, what is dropped first, and that no line overflows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.commands.top import screen
from fleetrun.commands.top.sample import RankRow, Snapshot, eta_s
from fleetrun.commands.top.view import View, after, keys, ordered

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
    lines = text(screen.frame(a_snapshot(*rows), 0, None))
    assert lines[1] == "4 processes: 4 running; use of MLUs and NPUs is not known"


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
            use=st.lists(st.floats(0, 9000)).map(tuple),
        ),
        max_size=12,
    ),
    st.integers(1, 200),
    st.integers(1, 20),
    st.lists(st.sampled_from([*b"sSrohlt/q\rj", *(b"\x1b[A", b"\x1b[6~", b"\x1b")])),
)
def test_no_line_runs_over_whatever_is_pressed(
    rows: list[RankRow], width: int, height: int, pressed: list[int | bytes]
) -> None:
    shown = View()
    for key in pressed:
        shown = after(shown, bytes([key]) if isinstance(key, int) else key, rows, 5)
    asked = shown if pressed else None
    lines = screen.frame(a_snapshot(*rows, notice="seen", hosts=2), width, height, asked)
    assert len(lines) <= height
    for line in lines:
        assert line.cell_len == width


def cluster(ranks: int) -> Snapshot:
    """Make a job on hosts of eight GPUs, of which rank 9's is half idle."""
    rows = [
        a_row(
            rank,
            host=f"node{rank // 8}",
            gpu_memory_total_bytes=80 * GIB,
            gpu_percent=40.0 if rank == 9 else 87.0,
            use=(20.0, 40.0) if rank == 9 else (80.0, 87.0),
        )
        for rank in range(ranks)
    ]
    return a_snapshot(*rows, hosts=ranks // 8)


def pressed(snapshot: Snapshot, typed: bytes) -> View:
    view = View()
    for key in keys(typed):
        view = after(view, key, snapshot.rows, 10)
    return view


def shown(snapshot: Snapshot, typed: bytes, *, width: int = 200, height: int = 24) -> list[str]:
    return text(screen.frame(snapshot, width, height, pressed(snapshot, typed)))


@pytest.mark.parametrize(("ranks", "width"), [(2, 80), (2, 200), (16, 80), (16, 200), (256, 80)])
def test_bars_show_what_is_used_and_each_host_has_its_total(ranks: int, width: int) -> None:
    lines = shown(cluster(ranks), b"", width=width)
    (head,) = [line for line in lines if "rank" in line and "state" in line]
    assert "gpu use" in head
    assert ("lately" in head) == (width == 200)
    (first,) = [line for line in lines if line.split()[:1] == ["0"]]
    assert "███████ " in first
    totals = [line.split()[0] for line in lines if "8 processes" in line]
    assert totals == (["node0", "node1"] if ranks == 16 else [])
    assert ("2 processes" in lines[-1]) == (ranks == 2)


def test_keys_sort_filter_and_choose() -> None:
    snapshot = cluster(256)
    by_gpu = shown(snapshot, b"sssr")
    assert by_gpu[3].split()[0] == "9"
    assert "▂▄" in by_gpu[3]
    odd = snapshot.rows[100]._replace(state="behind 40s", is_odd=True)
    rows = [odd if row.rank == 100 else row for row in snapshot.rows]
    assert [row.rank for row in ordered(rows, pressed(snapshot, b"o"))] == [100]
    filtered = pressed(snapshot, b"/NODE3 x\x7f\x7f\r")
    assert [row.rank for row in ordered(rows, filtered)] == [*range(24, 32), *range(240, 256)]
    assert after(filtered, b"\x1b", rows, 5) == View()
    # Typed letters are text, not keys; unfinished text is shown.
    assert screen.footer(pressed(snapshot, b"/sq")).startswith("filter: sq_")
    # The window follows the row.
    lines = shown(snapshot, b"j" + b"\x1b[6~" * 20)
    assert "200" in [line.split()[0] for line in lines[3:]]
    assert pressed(snapshot, b"jjk").selected == "rank 0"
    hosts = shown(snapshot, b"h", height=50)
    assert [line.split()[0] for line in hosts[3:35]] == [f"node{number}" for number in range(32)]
    assert pressed(snapshot, b"hjjj").selected == "node2"
    assert "node20 " in "".join(shown(snapshot, b"h" + b"j" * 21, height=12))
    assert pressed(snapshot, b"hjjjl") == View(what="log", selected="rank 16")
    assert pressed(snapshot, b"jl").what == "log"
    assert pressed(snapshot, b"jlq").what == "ranks"
    assert pressed(snapshot, b"q").is_over
    assert after(View(), b"t", rows, 5).selected == "rank 100"
    # Columns without values are passed over.
    bare = a_snapshot(a_row(0, gpu_percent=None, gpu_memory_bytes=None))
    assert [pressed(bare, b"s" * times).order for times in (2, 3)] == ["mem", "step"]


def test_a_terminal_without_block_characters_gets_no_bars() -> None:
    lines = text(screen.frame(cluster(16), 200, 24, View(has_bars=False)))
    assert "".join(lines).isascii()
    assert screen.footer(View()).isascii()


def test_the_end_of_known_steps_is_told() -> None:
    rows = [a_row(rank, step=100, total_steps=1000, steps_per_s=2.0 + rank) for rank in (0, 1)]
    assert eta_s(rows) == 450.0
    assert eta_s([a_row(0)]) is None
    assert "ETA 7m30s" in text(screen.frame(a_snapshot(*rows, eta_s=450.0), 120, 9))[0]
