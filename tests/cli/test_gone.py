"""What is gone is answered with one sentence that says what to use instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetrun.cli import app, elsewhere, options
from fleetrun.cli.argv import split

# Every option of the table at its largest, before the halving; each must still be answered.
_ONCE = """
gpus nproc_per_node ips env nccl config log_dir tee redirects log_filter ui quiet dry_run strategy
set strategy_mode strategy_strict merge_tail check_ranks devices npus xpus device_kind backend
oversubscribe virtual_local_rank gpu_memory_fraction bind host network start_port port_range
port_check nnodes master elastic_server np rdzv_timeout elastic_timeout spares elastic_pre_hook
heartbeat_timeout rank hosts hostfile include exclude ssh ssh_fanout ship run_mode job_id grace
max_restart preload resume_from stdin debug wrap profile hang_timeout flight_recorder detach on_end
webhook preflight log_level banner log_overwrite log_keep gather_logs log_max_size log_max_files
metrics_period metrics_port from_manifest server_num trainer_num servers trainers heter_worker_num
heter_workers heter_devices coordinator_num coordinators with_gloo http_port gloo_port version color
help legacy sort_ip enable_gpu_log use_paddlecloud print_config use_env scale force
enable_auto_mapping elastic_level cluster_topo_path rank_mapping_path auto_parallel_config
auto_cluster_config auto_tuner_json
"""
# Their other names in Paddle's launchers.
_ALIASES = """
cluster_node_ips node_ip started_port endpoints workers worker_num selected_gpus selected_xpus
selected_npus
"""

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize("name", [name for name in elsewhere.GONE if name[0] != "$"])
def test_an_option_that_is_gone_says_what_to_use(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = f"{name} is not in this version: {elsewhere.GONE[name]}\n"
    Path("fleetrun.yaml").write_text(f"quiet: true\n{name}: 1\n")
    for words, where in (
        ([f"--{name}=1", "train.py"], "--"),
        (["ps", f"--{name}=1"], "ps: --"),
        (["train.py"], "fleetrun.yaml:2: "),
    ):
        if words[0] == "top" and name == "color":
            continue  # which keeps it
        assert app.main(words, environ={}) == 2
        assert capsys.readouterr().err == f"fleetrun: {where}{answer}"


@pytest.mark.parametrize("name", [name for name in elsewhere.GONE if name[0] == "$"])
def test_a_variable_that_is_gone_says_what_to_use(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = f"fleetrun: {name} is not in this version: {elsewhere.GONE[name]}\n"
    assert app.main(["train.py"], environ={name[1:]: "1"}, launch=lambda *_: 0) == 2
    assert capsys.readouterr().err == answer
    assert app.main(["train.py"], environ={name[1:]: "0"}, launch=lambda *_: 0) == 0


@pytest.mark.parametrize("name", [*_ONCE.split(), *_ALIASES.split()])
def test_an_option_that_there_was_is_taken_or_answered_in_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{name}=1", "train.py"]
    if name not in elsewhere.GONE:
        assert [given.spelling for given in split(words).given] == [name]
    if name in elsewhere.GONE or options.BY_SPELLING[name] in options.UNUSED:
        Path("train.py").touch()
        code = app.main(words, environ={}, launch=lambda *_: 0)
        message = capsys.readouterr().err
        assert code == (2 if message else 0)
        assert re.fullmatch(rf"(fleetrun: --{name}.*\.\n)?", message)


def test_the_list_of_what_there_was_is_whole() -> None:
    assert len(set(_ONCE.split())) == 106
    assert options.BY_SPELLING.keys() >= set(_ONCE.split()) - elsewhere.GONE.keys()
