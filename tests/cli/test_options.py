"""The option table: complete, consistent, and read as written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli import options
from fleetrun.cli.option import GROUPS, Option, by_spelling
from fleetrun.errors import UsageError

# Variables that Paddle's launcher takes for its flags and that mean the same to ours.
_PADDLE_VARIABLES = """
POD_IP PADDLE_MASTER PADDLE_DEVICES PADDLE_NNODES PADDLE_RUN_MODE PADDLE_LOG_LEVEL
PADDLE_LOG_OVERWRITE PADDLE_NPROC_PER_NODE PADDLE_JOB_ID PADDLE_RANK PADDLE_LOG_DIR
PADDLE_MAX_RESTART PADDLE_SERVER_NUM PADDLE_TRAINER_NUM PADDLE_SERVERS_ENDPOINTS
PADDLE_TRAINERS_ENDPOINTS PADDLE_START_PORT PADDLE_IPS PADDLE_DISTRI_BACKEND
FLAGS_START_PORT FLAGS_FIXED_PORT
PADDLE_SORT_IP PADDLE_ELASTIC_LEVEL PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL PADDLE_ELASTIC_TIMEOUT
PADDLE_WITH_GLOO
"""


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


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("nproc_per_node", "2", 2),
        ("nproc_per_node", "GPU", "gpu"),
        ("grace", "0", 0.0),
        ("metrics_period", "0", 0.0),
        ("metrics_period", "0.1", 0.1),
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


@given(st.sampled_from(options.OPTIONS), st.text())
def test_any_text_is_a_value_or_a_clear_refusal(option: Option, raw: str) -> None:
    try:
        option.read(option.given(raw))
    except UsageError as error:
        assert str(error).startswith(f"{option.opts[0]}=")  # noqa: PT017 - either is right
