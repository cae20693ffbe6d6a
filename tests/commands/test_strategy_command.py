"""`fleetrun strategy ...` through the real command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from commandline import fleetrun

from fleetrun.cli import app
from fleetrun.strategy import fields, load

CONFIGS = Path(__file__).parents[2] / "configs"


class Said(NamedTuple):
    """The exit code of a command, and its output."""

    code: int
    out: str
    err: str


def cells(line: str) -> list[str]:
    """Return the cells of LINE."""
    return re.split(r" {2,}", line.strip())


def strategy(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    code = app.main(["strategy", *words], environ={})
    return Said(code, *capsys.readouterr())


def test_list_has_every_field_for_those_who_ask(capsys: pytest.CaptureFixture[str]) -> None:
    done = strategy(capsys, "list", "--fields")
    assert done.code == 0
    for field in fields.TABLE:
        section = "" if field.section == fields.STRATEGY else f"{field.section}."
        assert f"\n{section}{field.name} " in done.out
    rows = [cells(line) for line in done.out.splitlines()]
    assert ["field", "value", "meaning"] in rows
    wanted = "a whole number of MB from 1 to 65536, or auto [default: 32]"
    assert ["fuse_grad_size_in_MB", wanted] in [row[:2] for row in rows]
    assert ["k_steps", "a whole number of steps, 1 or more [default: 1]"] in [r[:2] for r in rows]


@pytest.mark.parametrize("name", load.PRESETS)
def test_show_prints_a_preset_to_start_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = strategy(capsys, "show", name)
    # amp and gradient_merge are also fields; showing a preset means its file.
    assert output.out == (CONFIGS / f"{name}.yaml").read_text()


def test_show_says_what_a_field_comes_to_why_that_is_known_and_how_it_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = strategy(capsys, "show", "nccl_comm_num").out
    assert "auto: 1 on one host, 2 on several." in out
    assert "  effective: fleetrun sends the gradients itself, over communicators in turn\n" in out
    assert "GPU" in out.partition("Evidence")[2]
    assert "fleetrun --set nccl_comm_num=VALUE train.py" in out
    assert "If it is false" in strategy(capsys, "show", "sync_nccl_allreduce").out
    for part in ("k_steps", "pp_configs", "mp_configs.mp_async_allreduce"):
        assert part in strategy(capsys, "show", part).out


def test_validate_says_all_that_is_wrong_line_by_line(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "bad.yaml").write_text(
        """\
strategie: {}
strategy:
  fuse_grad_size_in_MB: much
  asp: true
  gradient_merge_configs:
    k_step: 4
    avg: perhaps
  thread_num: 2
  num_threads: 3
  amp: true
  amp: false
flags:
  cudnn_exhaustive_search: 1
nccl: 3
"""
    )
    done = strategy(capsys, "validate", "bad.yaml")
    assert (done.code, done.out) == (2, "")
    nothing = "Paddle then sends no gradients at all, and ranks diverge without an error"
    size = "give a whole number of MB from 1 to 65536, or auto"
    assert [line.removeprefix("fleetrun: bad.yaml:") for line in done.err.splitlines()] == [
        "1: no such section: strategie; did you mean strategy?",
        f"3: fuse_grad_size_in_MB: much: {size}.",
        f"4: asp: true is refused: {nothing}.",
        "6: gradient_merge_configs has no k_step; did you mean k_steps?",
        "7: avg: perhaps: give true or false.",
        "9: num_threads is already set in line 8.",
        "11: amp is already set in line 10.",
        "13: cudnn_exhaustive_search: did you mean FLAGS_cudnn_exhaustive_search?",
        "14: nccl: write one `name: value` a line.",
    ]


@pytest.mark.parametrize("words", [("explain", "recommended"), ("show", "nccl_comm_num")])
def test_nothing_is_called_effective_on_gpus_where_no_strategy_has_run(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = fleetrun("strategy", *words, folder=tmp_path)
    assert done.returncode == 0
    # A page about a field has the places below their status.
    rows = re.sub(r"\n    (?=\w+ [\d.]+ [cg]pu)", "  ", done.stdout).splitlines()
    on_gpus = [row for row in rows if re.search(r"(dygraph|static) [\d.]+ gpu", row)]
    assert [row for row in on_gpus if "expected" in row]
    assert [row for row in on_gpus if "effective" in row] == []


def test_explain_sorts_the_places_by_what_happens_there(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "a.yaml").write_text(
        "strategy: {amp_configs: {incr_ratio: 2, decr_ratio: 0.5}}\n"
        "build_strategy: {fuse_bn_act_ops: 1}\nenv: {MY_TOKEN: abc}\n"
    )
    out = strategy(capsys, "explain", "a.yaml", "--device=cpu").out
    rows = [cells(line) for line in out.splitlines()]
    where = "dygraph 2.6.2 cpu, dygraph 3.3.1 cpu"
    assert ["fuse_bn_act_ops: true", "no effect", where] in [row[:3] for row in rows]
    assert [row[0] for row in rows].count("amp_configs") == 1
    assert "MY_TOKEN: ***" in [row[0] for row in rows]
    assert "note: Paddle 3.3.1 supports static strategies only in its older" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "strategy: give one of list, show, validate, explain."),
        (["tell"], "strategy: give one of list, show, "),
        (["explein"], "strategy: give one of list, show, validate, explain."),
        (["list", "--feilds"], "no such option: --feilds; did you mean --fields?"),
        (["list", "--x"], "no such option: --x; see `fleetrun strategy list --help`."),
        (["list", "now"], "strategy list: got unexpected extra argument (now)."),
        (["show"], "strategy show: give PRESET|FIELD."),
        (["validate"], "strategy validate: give FILE..."),
        (["explain", "amp", "--graph"], "option '--graph' requires an argument."),
        (["show", "nope"], "there is no file nope, nor a preset"),
        (["show", ""], 'there is no file "", nor a preset'),
        (["show", "nccl_com_num"], "nor a preset of that name; did you mean nccl_comm_num?"),
        (["show", "comm_fuson"], "nor a preset of that name; did you mean comm_fusion?"),
        (["show", sys.executable], ": this strategy is not UTF-8 text."),
        (["explain", "amp", "--paddle=1.8"], "--paddle=1.8: give one of 2.6.2, 3.3.1."),
        (["explain", "nope"], "presets are recommended, "),
    ],
)
def test_a_slip_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = strategy(capsys, *words)
    assert output.code == 2
    assert output.err.startswith("fleetrun: ")
    assert output.err.count("\n") == 1
    assert message in output.err
