"""Reading strategies: presets, files and --set."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.errors import UsageError
from fleetrun.model import Knob, Layer
from fleetrun.strategy import load

CONFIGS = Path(__file__).parents[2] / "configs"


def knobs(text: str) -> list[tuple[str, str, object]]:
    """Read TEXT as the file my.yaml."""
    return [knob[:3] for knob in load.parse(text, "my.yaml")]


def refused(text: str) -> str:
    with pytest.raises(UsageError) as error:
        list(load.parse(text, "my.yaml"))
    return str(error.value)


def test_presets_are_all_files_of_the_folder_but_the_example_of_options() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*load.PRESETS, "fleetrun"}


@pytest.mark.parametrize("name", load.PRESETS)
def test_a_preset_can_be_used_and_says_what_it_is_for(name: str) -> None:
    asked = load.combine([load.read(name)])
    assert asked.strategy.knobs
    assert asked.notes == ()
    assert (CONFIGS / f"{name}.yaml").read_text().startswith("# ")


def test_every_section_is_read() -> None:
    text = """
strategy:
  fuse_grad_size_in_MB: 16.0
  gradient_merge_configs: {k_steps: "4", avg: 1}
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
    assert knobs(text) == [
        ("strategy", "fuse_grad_size_in_MB", 16),
        ("strategy", "gradient_merge_configs.k_steps", 4),
        ("strategy", "gradient_merge_configs.avg", True),
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
    assert knobs(text) == [
        ("strategy", "fuse_grad_size_in_TFLOPS", 50.0),
        ("execution_strategy", "num_threads", 3),
        ("build_strategy", "fuse_elewise_add_act_ops", True),
        ("build_strategy", "fuse_bn_act_ops", True),
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "strategy:\n", "strategy: {}\n"])
def test_a_file_may_ask_for_nothing(text: str) -> None:
    assert knobs(text) == []


def test_every_knob_knows_its_line() -> None:
    (knob,) = load.parse("strategy:\n\n  amp: true\n", "my.yaml")
    assert knob == Knob("strategy", "amp", value=True, source="my.yaml:3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "my.yaml:1: write sections: strategy, build_strategy"),
        ("a: [", ": this is not YAML"),
        ("strategy:\n\tamp: 1", "my.yaml:2: this is not YAML: there is a tab; indent with spaces"),
        ("a\x01", "my.yaml: this is not YAML"),
        ("strategy:\n  <<: {amp: 1}", "my.yaml:2: << is not supported: give several files"),
        ("strategy: {}\n---\n", "my.yaml: there are several documents in it: give each a file"),
        ("strategy: {asp: 2001-13-01}", "my.yaml:1: this is not YAML: month"),
        ("stratgy: {}", "my.yaml:1: no such section: stratgy; did you mean strategy?"),
        ("zzz: {}", "my.yaml:1: no such section: zzz; sections are strategy, "),
        ("amp: true", "my.yaml:1: amp is in no section; put it under `strategy:`."),
        ("FLAGS_x: 1", "my.yaml:1: FLAGS_x is in no section; put it under `flags:`."),
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
            "strategy:\n  gradient_merge_configs:\n    k_step: 4",
            "my.yaml:3: gradient_merge_configs has no k_step; did you mean k_steps?",
        ),
        (
            "strategy: {gradient_merge_configs: {zzz: 4}}",
            "gradient_merge_configs has no zzz; it has k_steps, avg.",
        ),
        (
            "strategy: {gradient_merge_configs: 4}",
            "my.yaml:1: gradient_merge_configs: give a mapping with k_steps, avg.",
        ),
        (
            "strategy:\n  fuse_grad_size_in_MB: 16.5",
            "my.yaml:2: fuse_grad_size_in_MB: 16.5: give a whole number of MB from 1 to 65536",
        ),
        ("strategy: {amp: 2}", "my.yaml:1: amp: 2: give true or false."),
        ("strategy: {amp: }", "my.yaml:1: amp: null: give true or false."),
        ("strategy: {amp: {a: 1}}", "my.yaml:1: amp: a mapping: give true or false."),
        ("strategy: {fuse_grad_size_in_num: true}", "fuse_grad_size_in_num: true: give a whole"),
        ("strategy:\n  amp: 1\n  amp: 0", "my.yaml:3: amp is already set in line 2."),
        (
            "strategy:\n  thread_num: 1\n  num_threads: 2",
            "my.yaml:3: num_threads is already set in line 2.",
        ),
        ("flags: {x: 1}", "my.yaml:1: x: did you mean FLAGS_x?"),
        ("nccl: {DEBUG: INFO}", "my.yaml:1: DEBUG: did you mean NCCL_DEBUG?"),
        ("env: {a-b: 1}", "my.yaml:1: a-b is not a variable name."),
        ("env: {A: [1]}", "my.yaml:1: A: give one value."),
        ("env: {A: }", "my.yaml:1: A: give one value."),
        ("strategy: {amp: &a [*a]}", "this is not YAML"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_line(text: str, message: str) -> None:
    assert message in refused(text)


@pytest.mark.parametrize(
    ("text", "knob"),
    [
        ("fuse_grad_size_in_MB=16", ("strategy", "fuse_grad_size_in_MB", 16)),
        ("fuse_grad_size_in_MB=auto", ("strategy", "fuse_grad_size_in_MB", "auto")),
        ("strategy.amp=1", ("strategy", "amp", True)),
        ("thread_num=2", ("execution_strategy", "num_threads", 2)),
        ("gradient_merge_configs.k_steps=4", ("strategy", "gradient_merge_configs.k_steps", 4)),
        ("build_strategy.fuse_bn_act_ops=1", ("build_strategy", "fuse_bn_act_ops", True)),
        (
            "amp_configs.custom_white_list=[a]",
            ("strategy", "amp_configs.custom_white_list", ("a",)),
        ),
        ("FLAGS_x=1", ("flags", "FLAGS_x", "1")),
        ("nccl.NCCL_DEBUG=INFO", ("nccl", "NCCL_DEBUG", "INFO")),
        ("env.A=b=c", ("env", "A", "b=c")),
    ],
)
def test_one_field_can_be_set(text: str, knob: tuple[str, str, object]) -> None:
    assert load.parse_set(text) == (*knob, "--set", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("amp", "--set amp: give KEY=VALUE"),
        ("", "--set: give KEY=VALUE"),
        ("=1", "give KEY=VALUE"),
        ("amq=1", "--set amq: no such field: amq; did you mean amp?"),
        ("k_steps=1", "k_steps is a part: did you mean gradient_merge_configs.k_steps or "),
        ("amp.x=1", "--set amp.x: amp has no parts: give true or false."),
        ("amp=", "--set amp=null: give true or false."),
        ("amp=[", "--set amp: this is not YAML"),
        ("amp_configs=1", "--set amp_configs: set one of its parts: init_loss_scaling"),
        ("flags.x=1", "--set flags.x: x: did you mean FLAGS_x?"),
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
    assert asked.strategy.sources == ("a", "b", "--set")
    assert [(knob.name, knob.value, knob.source) for knob in asked.strategy.knobs] == [
        ("gradient_merge", True, "a:1"),
        ("gradient_merge_configs.k_steps", 3, "b:1"),
        ("gradient_merge_configs.avg", False, "a:1"),
        ("nccl_comm_num", 1, "--set"),
    ]


@pytest.mark.parametrize("text", ["without_graph_optimization: false", "asp: true"])
def test_what_makes_ranks_diverge_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"a:1: .* is refused: .* ranks diverge"):
        load.combine([layer("a", f"strategy: {{{text}}}")])


@pytest.mark.parametrize("text", ["without_graph_optimization: true", "asp: false"])
def test_its_harmless_value_is_not(text: str) -> None:
    assert load.combine([layer("a", f"strategy: {{{text}}}")]).notes == ()


def test_parts_of_what_is_off_are_remarked_on() -> None:
    (note,) = load.combine(
        [layer("a", "strategy: {amp_configs: {incr_ratio: 2, decr_ratio: 1}}")]
    ).notes
    assert note == "a:1: amp_configs is set without amp, which only the script can still enable."
    assert load.combine([layer("a", "strategy: {hybrid_configs: {mp_degree: 2}}")]).notes == ()


def test_the_digest_is_of_what_is_asked_for() -> None:
    once = load.combine([layer("a", "strategy: {amp: 1, lamb: 1}")]).strategy
    same = load.combine([layer("b", "strategy: {lamb: true}"), layer("c", "strategy: {amp: 1}")])
    other = load.combine([layer("a", "strategy: {amp: 0, lamb: 1}")]).strategy
    assert once.digest == same.strategy.digest != other.digest


def test_a_name_is_a_preset_or_else_a_file(elsewhere: Path) -> None:
    (elsewhere / "amp").write_text("strategy: {lamb: true}")
    (elsewhere / "mine").write_text("strategy: {lamb: true}")
    assert load.read("amp").knobs[0].source == "amp:3"
    assert load.read("./amp").knobs[0].name == "lamb"
    assert load.read("mine").knobs[0].source == "mine:1"


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


def test_an_installation_that_lacks_a_preset_says_so() -> None:
    with pytest.raises(UsageError, match="The preset nope is missing from this fleetrun"):
        load.preset_path("nope")


@given(st.text(max_size=60))
def test_any_text_is_a_strategy_or_one_clear_refusal(text: str) -> None:
    try:
        list(load.parse(text, "my.yaml"))
    except UsageError as error:
        assert str(error).startswith("my.yaml")  # noqa: PT017 - either outcome is right


@given(st.text(max_size=40))
def test_any_set_is_a_knob_or_one_clear_refusal(text: str) -> None:
    try:
        load.parse_set(text)
    except UsageError as error:
        assert str(error).startswith("--set")  # noqa: PT017 - either outcome is right
