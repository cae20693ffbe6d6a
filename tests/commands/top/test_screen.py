"""The screen of top: what fits, what is dropped first, and that no line overflows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fleetrun.commands.top import screen
from fleetrun.commands.top.sample import RankRow, Snapshot
from fleetrun.commands.top.view import View, after, keys, ordered

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


def shown(
    snapshot: Snapshot,
    width: int = 0,
    height: int | None = None,
    view: View = View(),  # noqa: B008
) -> list[str]:
    console = Console(width=width or 1000, color_system=None)
    with console.capture() as captured:
        optional = screen.optional(snapshot.rows)
        console.print(screen.frame(snapshot, width, height, view, optional))
    return [line.rstrip() for line in captured.get().splitlines()]


def heads(lines: list[str]) -> list[str]:
    return lines[2].replace("last line", "last_line").split()


def test_all_that_is_known_of_a_rank_stands_in_its_row_once() -> None:
    lines = shown(a_snapshot(a_row(0), a_row(1)))
    head = "rank state device pid cpu% mem gpu% gmem watt step step/s loss last_line"
    assert " ".join(heads(lines)) == head
    row = "1 running gpu:1 4001 100 3.0G 87 40G 412 120 3.46 0.1235 epoch 1 step 120 loss 0.1235"
    assert " ".join(lines[4].split()) == row
    assert lines[0] == "default  running  1m23s  /log/runs/a"
    assert lines[1] == "2 processes: 2 running"


def test_rows_that_do_not_fit_are_counted_and_odd_ones_are_shown() -> None:
    rows = [a_row(rank) for rank in range(64)]
    rows[50] = a_row(50, "stopped", is_odd=True)
    rows[60] = a_row(60, "done")
    lines = shown(a_snapshot(*rows), 80, 10)
    assert len(lines) == 10
    assert [line.split()[0] for line in lines[3:9]] == ["0", "1", "2", "3", "4", "50"]
    assert lines[9] == "and 58 more: 57 running, 1 done"
    assert lines[1] == "64 processes: 62 running, 1 stopped, 1 done"


def test_a_log_cannot_write_on_the_screen() -> None:
    lines = shown(a_snapshot(a_row(0, line="\x1b[2J\x1b]0;title\x07飞")), 300)
    assert "\x1b" not in "".join(lines)
    assert "飞" in lines[3]


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
    st.integers(6, 20),
    st.lists(st.sampled_from([*"slt/?qj", "enter", "up", "page down", "escape"])),
)
def test_no_line_runs_over_whatever_is_pressed(
    rows: list[RankRow], width: int, height: int, pressed: list[str]
) -> None:
    view = View()
    for key in pressed:
        view = after(view, key, rows, 5)
    console = Console(width=width, color_system=None)
    snapshot = a_snapshot(*rows, notice="seen", hosts=2)
    picture = screen.frame(snapshot, width, height, view, screen.optional(rows))
    lines = console.render_lines(picture, pad=False)
    assert view.what == "help" or len(lines) <= height
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


def cluster(ranks: int) -> Snapshot:
    """Make a job on hosts of eight GPUs, of which rank 9's is half idle."""
    rows = [
        a_row(rank, host=f"node{rank // 8}", gpu_percent=40.0 if rank == 9 else 87.0)
        for rank in range(ranks)
    ]
    return a_snapshot(*rows, hosts=ranks // 8)


def pressed(snapshot: Snapshot, typed: bytes) -> View:
    view = View()
    for key in keys(typed):
        view = after(view, key, snapshot.rows, 10)
    return view


def test_keys_sort_filter_and_choose() -> None:
    snapshot = cluster(256)
    by_gpu = shown(snapshot, 200, 24, pressed(snapshot, b"ssskk"))
    assert by_gpu[3].split()[0] == "0"
    odd = snapshot.rows[100]._replace(state="behind 40s", is_odd=True)
    rows = [odd if row.rank == 100 else row for row in snapshot.rows]
    assert [row.rank for row in ordered(rows, pressed(snapshot, b"/odd\r"))] == [100]
    filtered = pressed(snapshot, b"/NODE3 x\x7f\x7f\r")
    assert [row.rank for row in ordered(rows, filtered)] == [*range(24, 32), *range(240, 256)]
    assert after(filtered, "escape", rows, 5) == View()
    # Typed letters are text, not keys; unfinished text is shown.
    assert screen.footer(pressed(snapshot, b"/sq")).plain.startswith("filter: sq_")
    # The window follows the row.
    lines = shown(snapshot, 200, 24, pressed(snapshot, b"j" + b"\x1b[6~" * 20))
    assert "200" in [line.split()[0] for line in lines[3:]]
    assert pressed(snapshot, b"jjk").selected == "rank 0"
    assert pressed(snapshot, b"jl").what == "log"
    assert pressed(snapshot, b"jlq").what == "ranks"
    assert pressed(snapshot, b"q").is_over
    assert after(View(), "t", rows, 5).selected == "rank 100"
    # Columns without values are passed over.
    bare = a_snapshot(a_row(0, gpu_percent=None, gpu_memory_bytes=None))
    assert [pressed(bare, b"s" * times).order for times in (2, 3)] == ["mem", "step"]
