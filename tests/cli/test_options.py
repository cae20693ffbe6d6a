"""The option table: complete, consistent, and read as written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli import options
from fleetrun.cli.option import GROUPS, Option, by_spelling
from fleetrun.errors import UsageError

# Every flag of Paddle's launchers: fleetrun 3.3, the older module it falls back to, 2.0, 1.8.
_PADDLE_FLAGS = """
master legacy rank log_level log_overwrite sort_ip enable_gpu_log nnodes nproc_per_node log_dir
run_mode job_id devices gpus npus xpus host ips start_port auto_parallel_config
auto_cluster_config auto_tuner_json servers trainers server_num trainer_num with_gloo
max_restart elastic_level elastic_timeout
backend selected_gpus selected_xpus cluster_topo_path rank_mapping_path enable_auto_mapping
workers coordinators heter_workers heter_devices worker_num coordinator_num heter_worker_num
http_port elastic_server np scale force mlus
cluster_node_ips node_ip use_paddlecloud started_port print_config endpoints
"""
_OURS = """
config env nccl tee quiet dry_run oversubscribe grace log_keep gpu_memory_fraction version help
strategy set strategy_mode hang_timeout preflight on_end webhook bind from_manifest color
"""
# Variables that Paddle's launcher takes for its flags and that mean the same to ours.
_PADDLE_VARIABLES = """
POD_IP PADDLE_MASTER PADDLE_DEVICES PADDLE_NNODES PADDLE_RUN_MODE PADDLE_LOG_LEVEL
PADDLE_LOG_OVERWRITE PADDLE_NPROC_PER_NODE PADDLE_JOB_ID PADDLE_RANK PADDLE_LOG_DIR
PADDLE_MAX_RESTART PADDLE_SERVER_NUM PADDLE_TRAINER_NUM PADDLE_SERVERS_ENDPOINTS
PADDLE_TRAINERS_ENDPOINTS PADDLE_START_PORT PADDLE_IPS PADDLE_AUTO_PARALLEL_CONFIG
PADDLE_AUTO_CLUSTER PADDLE_DISTRI_BACKEND FLAGS_START_PORT FLAGS_FIXED_PORT
PADDLE_SORT_IP PADDLE_ELASTIC_LEVEL PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL PADDLE_ELASTIC_TIMEOUT
PADDLE_WITH_GLOO
"""


@pytest.mark.parametrize("name", [*_PADDLE_FLAGS.split(), *_OURS.split()])
def test_every_promised_option_is_there(name: str) -> None:
    assert options.is_option(name)


@pytest.mark.parametrize("variable", _PADDLE_VARIABLES.split())
def test_every_promised_variable_is_read(variable: str) -> None:
    assert any(variable in option.env for option in options.KNOWN)


def test_no_spelling_means_two_things() -> None:
    assert len(by_spelling(options.KNOWN)) == sum(len(row.spellings) for row in options.KNOWN)
    variables = [name for option in options.KNOWN for name in option.env]
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.label)
def test_a_row_is_whole(option: Option) -> None:
    assert option.label.replace("_", "").isalnum()
    assert option.label.islower()
    assert option.group in GROUPS
    assert str(option.help).endswith(".")
    assert not option.reason
    for value in (option.usual, option.bare):
        assert value is None or option.kind.read(value) is not None


def test_there_are_few_enough_options_to_know() -> None:
    assert len(options.OPTIONS) <= 85


def test_ten_options_come_first() -> None:
    assert len([option for option in options.OPTIONS if option.group == "common"]) == 10


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("nproc_per_node", "2", 2),
        ("nproc_per_node", "GPU", "gpu"),
        ("gpu_memory_fraction", "0.5", 0.5),
        ("grace", "0", 0.0),
        ("backend", "NCCL", "nccl"),
        ("log_level", "DEBUG", "debug"),
        ("log_level", "20", "info"),
        ("log_level", "warn", "warning"),
        ("log_level", "NOTSET", "debug"),
        ("log_level", "CRITICAL", "error"),
        ("log_overwrite", "True", True),
        ("log_overwrite", "n", False),
        ("quiet", "1", True),
        ("ips", " 10.0.0.1, 10.0.0.2,", ("10.0.0.1", "10.0.0.2")),
        ("log_dir", " a b ", " a b "),
        ("rank", "-1", -1),
    ],
)
def test_values_are_read_as_paddle_reads_them(name: str, raw: str, value: object) -> None:
    assert options.find(name).kind.read(raw) == value


SECONDS = "give a number of seconds, 0 or more, or a time such as 90s, 30m or 1h30m."


@pytest.mark.parametrize(
    "option", [option for option in options.OPTIONS if option.metavar == "SECONDS"], ids=str
)
def test_every_duration_takes_units(option: Option) -> None:
    assert option.kind.read("30m") == 1800
    assert option.kind.read("1h30m") == 5400
    assert option.kind.read("2.5") == 2.5


@pytest.mark.parametrize(
    ("name", "raw", "wanted"),
    [
        ("nproc_per_node", "abc", "give a whole number, 1 or more, or one of auto, gpu, cpu."),
        ("nproc_per_node", "0", "give a whole number, 1 or more, or one of auto, gpu, cpu."),
        ("grace", "\u0663", SECONDS),
        ("hang_timeout", "9" * 5000, SECONDS),
        ("nproc_per_node", "-1", "give a whole number, 1 or more, or one of auto, gpu, cpu."),
        ("nproc_per_node", "2.0", "give a whole number, 1 or more, or one of auto, gpu, cpu."),
        ("start_port", "65536", "give a whole number from 1 to 65535."),
        ("gpu_memory_fraction", "1.5", "give a number from 0 to 1."),
        ("gpu_memory_fraction", "nan", "give a number from 0 to 1."),
        ("grace", "inf", SECONDS),
        ("hang_timeout", "5 moons", SECONDS),
        ("dry_run", "yaml", "give one of table, json."),
        ("log_overwrite", "maybe", "give true or false."),
        ("quiet", "", "give true or false."),
    ],
)
def test_a_wrong_value_is_told_what_is_wanted(name: str, raw: str, wanted: str) -> None:
    with pytest.raises(ValueError, match="give") as error:
        options.find(name).kind.read(raw)
    assert str(error.value) == wanted


@given(st.sampled_from(options.OPTIONS), st.text())
def test_any_text_is_a_value_or_a_clear_refusal(option: Option, raw: str) -> None:
    try:
        option.read(option.given(raw))
    except UsageError as error:
        assert str(error).startswith(f"{option.flag}=")  # noqa: PT017 - either is right


@pytest.mark.parametrize(
    ("name", "word", "eaten"),
    [
        ("dry_run", "json", False),
        ("dry_run", "sh", False),
        ("quiet", "true", False),
        ("log_overwrite", "1", True),
        ("log_overwrite", "train.py", False),
        ("tee", "all", True),
        ("tee", "0,2-3", True),
        ("tee", "train.py", False),
        ("tee", "", False),
        ("gpus", "train.py", True),
        ("sort_ip", "train.py", False),
        ("sort_ip", "false", True),
        ("enable_auto_mapping", "train.py", False),
        ("scale", "2", True),
        ("auto_tuner_json", "none", True),
    ],
)
def test_an_optional_value_never_eats_the_script(name: str, word: str, eaten: bool) -> None:
    assert options.find(name).takes_next(word) is eaten
