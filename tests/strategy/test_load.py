"""Reading strategies: presets, files and --set."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.errors import UsageError
from fleetrun.model import Layer
from fleetrun.strategy import load

CONFIGS = Path(__file__).parents[2] / "configs"


def settings(text: str) -> list[tuple[str, str, object]]:
    """Read TEXT as the file my.yaml."""
    return [setting[:3] for setting in load.parse(text, "my.yaml")]


def refused(text: str) -> str:
    with pytest.raises(UsageError) as error:
        list(load.parse(text, "my.yaml"))
    return str(error.value)


def test_presets_are_all_files_of_the_folder_but_the_example_of_options() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*load.PRESETS, "fleetrun"}


@pytest.mark.parametrize("name", load.PRESETS)
def test_a_preset_can_be_used_and_says_what_it_is_for(name: str) -> None:
    asked = load.combine([load.read(name)])
    assert asked.settings
    assert (CONFIGS / f"{name}.yaml").read_text().startswith("# ")


def test_every_section_is_read() -> None:
    text = """
strategy:
  fuse_grad_size_in_MB: 16.0
  gradient_merge_configs: {k_steps: "4", avg: 1}
  hybrid_configs: {dp_degree: 2, mp_configs: {sync_grad: true}, mp_configs.sync_param: false}
build_strategy:
  fuse_bn_act_ops: true
execution_strategy:
  num_threads: 3
flags:
  FLAGS_cudnn_exhaustive_search: 1
nccl:
  NCCL_IB_DISABLE: true
env:
  OMP_NUM_THREADS: 04
"""
    assert settings(text) == [
        ("strategy", "fuse_grad_size_in_MB", 16),
        ("strategy", "gradient_merge_configs.k_steps", 4),
        ("strategy", "gradient_merge_configs.avg", True),
        ("strategy", "hybrid_configs.dp_degree", 2),
        ("strategy", "hybrid_configs.mp_configs.sync_grad", True),
        ("strategy", "hybrid_configs.mp_configs.sync_param", False),
        ("build_strategy", "fuse_bn_act_ops", True),
        ("execution_strategy", "num_threads", 3),
        ("flags", "FLAGS_cudnn_exhaustive_search", "1"),
        ("nccl", "NCCL_IB_DISABLE", "1"),
        ("env", "OMP_NUM_THREADS", "04"),
    ]


def test_documented_spellings_are_the_fields_they_mean() -> None:
    text = """
strategy:
  _fuse_grad_size_in_TFLOPS: 50
  thread_num: 3
  fuse_elewise_add_act_ops: true
  build_strategy: {fuse_bn_act_ops: true}
"""
    assert settings(text) == [
        ("strategy", "fuse_grad_size_in_TFLOPS", 50.0),
        ("execution_strategy", "num_threads", 3),
        ("build_strategy", "fuse_elewise_add_act_ops", True),
        ("build_strategy", "fuse_bn_act_ops", True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "my.yaml:1: write sections: strategy, build_strategy"),
        ("strategy:\n\tamp: 1", "my.yaml:2: this is not YAML: "),
        ("strategy:\n  <<: {amp: 1}", "my.yaml:2: << is not supported: give several files"),
        ("amp: true", "my.yaml:1: amp is in no section; put it under `strategy:`."),
        ("strategy: {amp: !!bool a}", "my.yaml:1: this is not YAML: this is not a tag:yaml"),
        ("strategy: {amp: !!timestamp a}", "my.yaml:1: this is not YAML: this is not a tag:"),
        ("? [a]\n: 1", "my.yaml:1: write sections: strategy, build_strategy"),
        ("strategy: 1", "my.yaml:1: strategy: write one `name: value` a line."),
        (
            "strategy:\n  fuse_grad_size_in_BM: 1",
            "my.yaml:2: no such field: fuse_grad_size_in_BM; did you mean fuse_grad_size_in_MB?",
        ),
        (
            "strategy: {qqqq: 1}",
            "no such field: qqqq; `fleetrun strategy list --fields` shows all.",
        ),
        (
            "strategy: {avg: true}",
            "my.yaml:1: avg is a part: did you mean gradient_merge_configs.avg?",
        ),
        (
            "build_strategy: {amp: true}",
            "my.yaml:1: amp belongs to the section strategy, not to build_strategy.",
        ),
        (
            "strategy: {gradient_merge_configs: {zzz: 4}}",
            "gradient_merge_configs has no zzz; it has k_steps, avg.",
        ),
        (
            "strategy: {gradient_merge_configs: 4}",
            "my.yaml:1: gradient_merge_configs: give a mapping with k_steps, avg.",
        ),
        ("strategy: {amp: {a: 1}}", "my.yaml:1: amp: a mapping: give true or false."),
        (
            "strategy: {hybrid_configs: {pp_configs: 3}}",
            "my.yaml:1: hybrid_configs.pp_configs: give a mapping with overlap_p2p_comm, ",
        ),
        (
            "strategy: {hybrid_configs: {mp_configs: {async_allreduce: 1}}}",
            "no mp_configs.async_allreduce; did you mean mp_configs.mp_async_allreduce?",
        ),
        ("env: {a-b: 1}", "my.yaml:1: a-b is not a variable name."),
        ("env: {A: [1]}", "my.yaml:1: A: give one value."),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_line(text: str, message: str) -> None:
    assert message in refused(text)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("fuse_grad_size_in_MB=16", ("strategy", "fuse_grad_size_in_MB", 16)),
        ("fuse_grad_size_in_MB=auto", ("strategy", "fuse_grad_size_in_MB", "auto")),
        ("thread_num=2", ("execution_strategy", "num_threads", 2)),
        ("gradient_merge_configs.k_steps=4", ("strategy", "gradient_merge_configs.k_steps", 4)),
        (
            "amp_configs.custom_white_list=[a]",
            ("strategy", "amp_configs.custom_white_list", ("a",)),
        ),
        ("FLAGS_x=1", ("flags", "FLAGS_x", "1")),
        ("nccl.NCCL_DEBUG=INFO", ("nccl", "NCCL_DEBUG", "INFO")),
        ("env.A=b=c", ("env", "A", "b=c")),
    ],
)
def test_one_field_can_be_set(text: str, setting: tuple[str, str, object]) -> None:
    assert load.parse_set(text) == (*setting, "--set", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("amp", "--set amp: give KEY=VALUE"),
        ("amq=1", "--set amq: no such field: amq; did you mean amp?"),
        ("k_steps=1", "k_steps is a part: did you mean gradient_merge_configs.k_steps or "),
        ("amp.x=1", "--set amp.x: amp has no parts: give true or false."),
        ("amp=[", "--set amp: this is not YAML"),
        ("amp_configs=1", "--set amp_configs: set one of its parts: init_loss_scaling"),
        ("hybrid_configs.pp_configs=1", ": set one of its parts: pp_configs.overlap_p2p_comm, "),
    ],
)
def test_what_cannot_be_set_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        load.parse_set(text)
    assert message in str(error.value)


def layer(name: str, text: str) -> Layer:
    return Layer(name, tuple(load.parse(text, name)))


def test_later_layers_win_part_by_part_and_set_wins_over_all() -> None:
    first = layer(
        "a", "strategy: {gradient_merge: 1, gradient_merge_configs: {k_steps: 2, avg: 0}}"
    )
    second = layer("b", "strategy: {gradient_merge_configs: {k_steps: 3}, nccl_comm_num: 2}")
    asked = load.combine([first, second], [load.parse_set("nccl_comm_num=1")])
    assert asked.sources == ("a", "b", "--set")
    assert [(setting.name, setting.value, setting.source) for setting in asked.settings] == [
        ("gradient_merge", True, "a:1"),
        ("gradient_merge_configs.k_steps", 3, "b:1"),
        ("gradient_merge_configs.avg", False, "a:1"),
        ("nccl_comm_num", 1, "--set"),
    ]


def test_a_name_is_a_preset_or_else_a_file(elsewhere: Path) -> None:
    (elsewhere / "amp").write_text("strategy: {lamb: true}")
    (elsewhere / "mine").write_text("strategy: {lamb: true}")
    assert load.read("amp").settings[0].source == "amp:3"
    assert load.read("./amp").settings[0].name == "lamb"
    assert load.read("mine").settings[0].source == "mine:1"


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no file nope, nor a preset .* presets are recommended, "
    ):
        load.read("nope")
    with pytest.raises(UsageError, match="is a folder"):
        load.read(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        load.read(str(tmp_path / "latin.yaml"))
    with pytest.raises(UsageError, match="/dev/null is not a regular file, not a strategy file"):
        load.read("/dev/null")


@given(st.text(max_size=60))
def test_any_text_is_a_strategy_or_one_clear_refusal(text: str) -> None:
    try:
        list(load.parse(text, "my.yaml"))
    except UsageError as error:
        assert str(error).startswith("my.yaml")  # noqa: PT017 - either outcome is right
