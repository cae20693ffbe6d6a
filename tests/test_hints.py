"""Words of other launchers: each is answered with the word that works here."""

from __future__ import annotations

import re
import shlex

import pytest

from fleetrun import argv, hints, options, request
from fleetrun.commands import parser
from fleetrun.errors import UsageError


def refusal(*words: str) -> str:
    """Return what is said to a command line that cannot be."""
    with pytest.raises(UsageError) as error:
        argv.split([*words, "train.py"])
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
    assert "hosts" in options.find("np").help
    assert "use --nproc_per_node=4" in refusal("-np", "4")


def test_spellings_of_our_own_need_no_hint() -> None:
    parsed = argv.split(["--nproc-per-node=2", "train.py"])
    assert [given.option.name for given in parsed.settings] == ["nproc_per_node"]


def test_a_hint_names_options_that_there_are() -> None:
    known = {*options.by_name(), *(option.flag[2:] for option in options.TABLE)}
    for word, hint in hints.TABLE.items():
        assert not hint.option or hint.option in known, word
        says = hint.says
        for command, words in re.findall(r"`fleetrun (\w+) ([^`]*)`", says):
            # Those of another command of ours are its own.
            own = {name for row in parser.load(command).params for name in row.opts}
            assert {f"--{name}" for name in re.findall(r"--([a-z][\w-]+)", words)} <= own, word
            says = says.replace(words, "")
        assert set(re.findall(r"--([a-z][\w-]+)", says)) <= known, word
        assert hint.option or hint.says.endswith("."), word


def test_what_a_hint_names_works_today() -> None:
    """An option that works by now was called one of a later version."""
    by_name = options.by_name()
    for word, hint in hints.TABLE.items():
        for name in (*([hint.option] if hint.option else []), *re.findall(r"--(\w+)", hint.says)):
            row = by_name.get(name) or by_name.get(name.replace("-", "_"))
            assert row is None or not row.reason, word
        assert not re.search(r"\byet\b|this version|cannot|does not", hint.says), word


def test_what_a_hint_tells_to_write_can_be_written() -> None:
    """Each sentence's example is read as options of ours, down to its values."""
    example = {"HOST:PORT": "node1:6100", "MIN:MAX": "2:4", "A:8,B:8": "a:8,b:8", "A,B": "a,b"}
    example |= {"PORT": "22", "FILE": "key", "NAME=VALUE": "A=1", "FIELD": "f", "N": "4"}
    for word, hint in hints.TABLE.items():
        own = re.sub(r"`fleetrun \w+ [^`]*`", "", hint.says)
        for written in re.findall(r"(?<!\w)--\w+(?:=\"[^\"]*\"|=[\w:,]*\w| [A-Z_]+=\w+)", own):
            for name, value in example.items():
                written = re.sub(rf"\b{name}\b", value, written)  # noqa: PLW2901 - one by one
            words = shlex.split(written)
            for given in argv.split([*words, "train.py"]).settings:
                given.value()
            assert argv.split([*words, "train.py"]).script is not None, word


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ssh_port=2222"], '--ssh="ssh -p PORT"'),
        (["-p", "2222"], '--ssh="ssh -p PORT"'),
        (["--launcher=pdsh"], "--hosts=A:8,B:8 starts hosts by ssh"),
        (["--min_np=2"], "--nnodes=MIN:MAX"),
        (["--max-np", "4"], "--nnodes=MIN:MAX"),
        (["--min_nodes=2"], "--nnodes=MIN:MAX"),
        (["--host-discovery-script=x.sh"], "--nnodes=MIN:MAX and --master=HOST:PORT"),
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
        request.resolve(argv.split([*words, "train.py"]), {}, None)
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
    made = request.resolve(argv.split([*words, "train.py"]), {}, None)
    assert (made.redirects, made.script.target) == (is_on, "train.py")


def test_a_word_that_is_ours_is_no_hint() -> None:
    """It would never be read."""
    assert not hints.TABLE.keys() & options.by_name().keys() - {"np"}
