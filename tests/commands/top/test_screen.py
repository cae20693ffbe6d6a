"""The screen of top: what fits, what is dropped first, and which ranks lag."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fleetrun.commands.top import sample, screen
from fleetrun.commands.top.sample import RankRow, Snapshot
from fleetrun.commands.top.screen import View, after
from fleetrun.rundir.metricsfile import GpuUsage, RankUse

GIB = 1024**3


def a_row(rank: int, state: str = "running", **more: object) -> RankRow:
    use = RankUse("", rank, 1, "R", 1.0, 99.6, 3 * GIB, 1, 1, 0, 0, None, None)
    gpu = GpuUsage(rank, "", "H", 87.0, 40 * GIB, 80 * GIB, 412.4, 60.0)
    row = RankRow(
        label=f"rank {rank}",
        rank=rank,
        state=state,
        host="10.0.0.1",
        device=f"gpu:{rank}",
        pid=4000 + rank,
        use=use,
        gpus=(gpu,),
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
        console.print(screen.frame(snapshot, width, height, view))
    return [line.rstrip() for line in captured.get().splitlines()]


def heads(lines: list[str]) -> list[str]:
    return lines[2].replace("last line", "last_line").split()


def test_all_that_is_known_of_a_rank_stands_in_its_row_once() -> None:
    lines = shown(a_snapshot(a_row(0), a_row(1)))
    head = "rank state device pid cpu% mem gpu% gmem watt step step/s loss last_line"
    assert " ".join(heads(lines)) == head
    row = "1 running gpu:1 4001 100 3.0G 87 40.0G 412 120 3.46 0.1235 epoch 1 step 120 loss 0.1235"
    assert " ".join(lines[4].split()) == row
    assert lines[0] == "default  running  1 min 23 s  /log/runs/a"
    assert lines[1] == "2 processes: 2 running"


def test_rows_that_do_not_fit_are_counted_and_odd_ones_are_shown() -> None:
    rows = [a_row(rank) for rank in range(64)]
    rows[50] = a_row(50, "stopped", is_odd=True)
    rows[60] = a_row(60, "done")
    lines = shown(a_snapshot(*rows), 80, 10)
    assert len(lines) == 10
    assert [line.split()[0] for line in lines[3:8]] == ["0", "1", "2", "3", "50"]
    assert lines[8:] == ["and 59 more: 58 running, 1 done", "q quit  ? keys"]
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
    st.integers(7, 20),
    st.lists(st.sampled_from([*"?jxk b"])),
)
def test_no_line_runs_over_whatever_is_pressed(
    rows: list[RankRow], width: int, height: int, pressed: list[str]
) -> None:
    view = View()
    snapshot = a_snapshot(*rows, notice="seen", hosts=2)
    for key in pressed:
        view = after(view, key, snapshot, 5)
    console = Console(width=width, color_system=None)
    lines = console.render_lines(screen.frame(snapshot, width, height, view), pad=False)
    assert view.shows_keys or len(lines) <= height
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


def test_keys_move() -> None:
    snapshot = a_snapshot(*map(a_row, range(256)))

    def pressed(*keys: str) -> list[str]:
        view = View()
        for key in keys:
            view = after(view, key, snapshot, 10)
        return shown(snapshot, 200, 24, view)

    assert pressed(*"jjj k")[3].split()[0] == "12"
    assert pressed(*" " * 40)[-3].split()[0] == "255"
    assert "these keys" in "\n".join(pressed("j", "?"))
    assert pressed("j", "?", "?")[3].split()[0] == "1"
    assert pressed("j", "\x1b") == pressed()


def test_columns_stay_at_80_and_at_160_columns() -> None:
    known, unknown = a_row(0), RankRow("rank 0", 0, "running", "10.0.0.1", "gpu:0")
    for width, count in ((80, 9), (160, 13)):
        names = [heads(shown(a_snapshot(row), width)) for row in (known, unknown)]
        assert names[0] == names[1]
        assert len(names[0]) == count


def test_the_slowest_ranks_are_marked() -> None:
    rows = [a_row(0, "silent 30s", step=120), a_row(1, "silent 30s", step=100), a_row(2, step=110)]
    compared = [(row.state, row.is_odd) for row in sample.compared(rows)]
    assert compared == [("waits 30s", False), ("behind 30s", True), ("running", False)]
