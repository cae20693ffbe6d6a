"""Words of other launchers: each is answered with the word that works here."""

from __future__ import annotations

import re

import pytest

from fleetrun.cli import elsewhere, options, parser, request
from fleetrun.cli.argv import split
from fleetrun.errors import UsageError


def refusal(*words: str) -> str:
    """Return what is said to a command line that cannot be."""
    with pytest.raises(UsageError) as error:
        split([*words, "train.py"])
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "4"], "no such option: -n; use --nproc_per_node=4: the number of "),
        (["-n4"], "no such option: -n4; use --nproc_per_node=4: the number of "),
        (["-np", "2"], "no such option: -np; use --nproc_per_node=2: the number of "),
        (["--num_processes=8"], "--nproc_per_node=8"),
        (["--num-processes", "8"], "--nproc_per_node=8"),
        (["--num_gpus=2"], "--nproc_per_node=2"),
        (["--ascend_npus=0,1"], "use --npus=0,1."),
        (["--host_num", "2"], "use --nnodes=2"),
        (["--node_rank=1"], "--rank=1"),
        (["--node-rank", "1"], "--rank=1"),
        (["-H", "a:4,b:4"], "use --hosts"),
        (["--hostlist=10.0.0.1,10.0.0.2"], "use --hosts"),
        (["--machinefile=hosts"], "use --hostfile"),
        (["-x", "API_TOKEN=hunter2"], "write --env NAME=VALUE"),
        (["--module", "pkg.train"], "write -m package.module"),
        (["--no-python"], "leave it out: any program that is not a .py"),
        (["--no_python"], "leave it out"),
        (["--standalone"], "leave it out: a job is on this host alone"),
        (["--rdzv-backend=c10d"], "write --master=HOST:PORT and --nnodes=N, or name the hosts"),
        (["--rdzv_id=7"], "--job_id=7"),
        (["--master_addr=a"], "name the hosts with --ips"),
        (["--master_port=29500"], "--start_port=29500"),
        (["--max_restarts=3"], "--max_restart=3"),
        (["--multi_gpu"], "all visible GPUs are used"),
        (["--mixed_precision=fp16"], "paddle.amp"),
        (["--bind-to", "core"], "--bind=cores"),
        (["-i"], "--gpus"),
    ],
)
def test_a_word_of_another_launcher_is_answered_with_ours(words: list[str], says: str) -> None:
    message = refusal(*words)
    assert message.startswith("no such option: ")
    assert says in message
    assert "hunter2" not in message


def test_what_counts_processes_elsewhere_and_hosts_in_paddle_is_told_apart() -> None:
    """Paddle's --np is the number of hosts of an elastic job; mpirun's that of processes."""
    assert "hosts" in str(options.find("np").help)
    assert "use --nproc_per_node=4" in refusal("-np", "4")


def test_spellings_of_our_own_need_no_hint() -> None:
    parsed = split(["--nproc-per-node=2", "train.py"])
    assert [given.name for given in parsed.given] == ["nproc_per_node"]


def test_a_hint_names_options_that_there_are_and_work() -> None:
    known = {*options.BY_SPELLING, *(option.flag[2:] for option in options.OPTIONS)}
    for word, says in elsewhere.SENTENCES.items():
        rest = says.replace("{}", "")
        for command, words in re.findall(r"`fleetrun (\w+) ([^`]*)`", rest):
            # Those of another command of ours are its own.
            own = {name for row in parser.load(command).params for name in row.opts}
            assert {f"--{name}" for name in re.findall(r"--([a-z][\w-]+)", words)} <= own, word
            rest = rest.replace(words, "")
        named = set(re.findall(r"--([a-z][\w-]+)", rest))
        assert named <= known, word
        assert not any(options.find(name.replace("-", "_")).reason for name in named), word
        assert says.endswith("."), word


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ssh_port=2222"], '--ssh="ssh -p PORT"'),
        (["-p", "2222"], '--ssh="ssh -p PORT"'),
        (["--launcher=pdsh"], "--hosts=A:8,B:8 starts hosts by ssh"),
        (["--min_np=2"], "--nnodes=MIN:MAX"),
        (["--max-np", "4"], "--nnodes=MIN:MAX"),
        (["--min_nodes=2"], "--nnodes=MIN:MAX"),
        (["--host-discovery-script=x.sh"], "--nnodes=MIN:MAX, which counts hosts, and --master"),
        (["--shutdown-timeout=30"], "--grace=30"),
        (["--role=trainer"], "leave it out"),
        (["-r", "3"], "write --redirects"),
        (["-t", "3"], "write --tee=all, or --tee=0,3"),
        (["--local-ranks-filter=0,1"], "use --tee=0,1"),
        (["--duplicate-stdout-filters=loss"], "--tee=all --log_filter=PATTERN"),
        (["--enable_each_rank_log=logs"], "--log_dir"),
        (["--slots-per-host=8"], "--nproc_per_node=8"),
        (["--num_cpu_threads_per_process=4"], "--env OMP_NUM_THREADS=N"),
    ],
)
def test_what_works_by_now_is_not_said_to_be_for_later(words: list[str], says: str) -> None:
    assert says in refusal(*words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--redirects=1"], "give true (torchrun's 3), for all ranks and both streams"),
        (["--redirects", "1:3,0:1"], "--tee=0,3 chooses the ranks that the console shows"),
        (["--redirects=maybe"], "give one of false, true."),
        (["--tee=0:3"], "it takes ranks, or all"),
        (["--tee", "0:3,1:1"], "it takes ranks, or all"),
        (["--log_filter=0,2-3"], "--tee=0,2-3 chooses ranks"),
        (["--log_filter=(loss"], "this is not a regular expression"),
    ],
)
def test_torchruns_values_of_options_that_are_called_the_same_here_are_answered(
    words: list[str], says: str
) -> None:
    with pytest.raises(UsageError) as error:
        request.resolve(split([*words, "train.py"]), {}, None)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "is_on"),
    [
        (["--redirects", "3"], True),
        (["--redirects"], True),
        (["--redirects=true"], True),
        (["--redirects", "0"], False),
        ([], False),
    ],
)
def test_redirects_are_asked_for_as_torchrun_does(words: list[str], *, is_on: bool) -> None:
    made = request.resolve(split([*words, "train.py"]), {}, None)
    assert (made.redirects, made.script.target) == (is_on, "train.py")


def test_a_word_that_is_ours_is_no_hint() -> None:
    """It would never be read."""
    assert not elsewhere.SENTENCES.keys() & options.BY_SPELLING.keys() - {"np"}
