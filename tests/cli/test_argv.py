"""The command line: ours before the script, the script's own after it, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli.argv import mistaken_script, split
from fleetrun.errors import UsageError
from fleetrun.model import Script

ANYTHING = st.text(st.characters(exclude_characters="\0", exclude_categories=[]))
LOOK_ALIKES = st.sampled_from(["--", "-m", "", "--gpus=0", "--help", "-h", "--dry-run", "-", "a=b"])


def given_of(*words: str) -> list[tuple[str, str]]:
    """Return what the options before a script come to."""
    parsed = split([*words, "train.py"])
    assert parsed.script == Script("file", "train.py", ())
    return [(given.spelling, given.raw) for given in parsed.given]


def refusal(*words: str) -> str:
    """Return what is said to a command line that cannot be."""
    with pytest.raises(UsageError) as error:
        split(words)
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["train.py"], Script("file", "train.py", ())),
        (["-m", "pkg.train", "-m", "x"], Script("module", "pkg.train", ("-m", "x"))),
        (["./run.sh", "a"], Script("file", "./run.sh", ("a",))),
        (["--", "train.py"], Script("file", "train.py", ())),
        (["--", "-weird-name.py", "--"], Script("file", "-weird-name.py", ("--",))),
        (["--", "--", "x"], Script("file", "--", ("x",))),
        (["--", "-m", "pkg.train"], Script("module", "pkg.train", ())),
        (["--gpus=0", "--", "--gpus=1"], Script("file", "--gpus=1", ())),
        (
            ["--gpus", "0", "t.py", "--gpus", "1", "--", ""],
            Script("file", "t.py", ("--gpus", "1", "--", "")),
        ),
        (["t.py", "--help"], Script("file", "t.py", ("--help",))),
    ],
)
def test_the_script_may_have_any_form(words: list[str], script: Script) -> None:
    assert split(words).script == script


@given(st.lists(ANYTHING | LOOK_ALIKES))
def test_s06_script_arguments_come_through_verbatim(args: list[str]) -> None:
    for head, script in (
        ([], ["train.py"]),
        (["--gpus=0", "--dry-run"], ["-m", "pkg.train"]),
        (["--tee", "all", "--"], ["-odd.py"]),
    ):
        parsed = split([*head, *script, *args])
        assert parsed.script is not None
        assert list(parsed.script.args) == args
        assert parsed.script.target == script[-1]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--gpus=0,1"], [("gpus", "0,1")]),
        (["--gpus", "0, 1"], [("gpus", "0, 1")]),
        (
            ["--selected_gpus=0", "--selected-xpus", "1"],
            [("selected_gpus", "0"), ("selected_xpus", "1")],
        ),
        (["--cluster_node_ips=a", "--node-ip=b"], [("cluster_node_ips", "a"), ("node_ip", "b")]),
        (["--started_port=1"], [("started_port", "1")]),
        (["--nproc_per-node", "2"], [("nproc_per_node", "2")]),
        (["--dry-run"], [("dry_run", "table")]),
        (["--dry_run=json"], [("dry_run", "json")]),
        (["--tee"], [("tee", "all")]),
        (["--tee", "0,1"], [("tee", "0,1")]),
        (["--log_overwrite"], [("log_overwrite", "true")]),
        (["--log_overwrite", "0"], [("log_overwrite", "0")]),
        (["--quiet"], [("quiet", "true")]),
        (["--quiet=no"], [("quiet", "no")]),
        (["--env", "A=b=c", "--env=D="], [("env", "A=b=c"), ("env", "D=")]),
        (["--rank", "-1"], [("rank", "-1")]),
        (["--log_dir="], [("log_dir", "")]),
    ],
)
def test_options_are_read_in_every_spelling(
    words: list[str], settings: list[tuple[str, str]]
) -> None:
    assert given_of(*words) == settings


@pytest.mark.parametrize(
    ("words", "name", "raw"),
    [
        (["--mlus", "0,1"], "mlus", "0,1"),
        (["--gcus=0,1,2,3,4,5,6,7"], "gcus", "0,1,2,3,4,5,6,7"),
        (["--musas", "all"], "musas", "all"),
        (["--iluvatar-gpus=0-3"], "iluvatar_gpus", "0-3"),
        (["--selected_mlus=0"], "mlus", "0"),
        (["--mlus=x"], "mlus", "x"),
        # Of a kind that nobody knows, only the host can tell.
        (["--foos", "0, 1"], "foos", "0, 1"),
    ],
)
def test_devices_of_any_kind_are_named_by_the_rule(words: list[str], name: str, raw: str) -> None:
    (given,) = split([*words, "train.py"]).given
    assert (given.spelling, given.name, given.raw) == (name, "devices", raw)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--foos=x", "no such option: --foos; `fleetrun --help=all` lists them all."),
        ("--foos=", "no such option: --foos; "),
        ("--mlu=0", "no such option: --mlu; did you mean --mlus?"),
        ("--ngpus=4", "no such option: --ngpus; use --nproc_per_node=4"),
        ("-mlus=0", "no such option: -mlus; "),
        ("--mlu=0", "no such option: --mlu; "),
    ],
)
def test_not_every_option_that_ends_in_s_names_devices(word: str, says: str) -> None:
    assert refusal(word, "train.py").startswith(says)


def test_a_command_that_looks_like_a_value_is_the_script() -> None:
    parsed = split(["--dry-run", "sh", "run.sh"])
    assert parsed.script == Script("file", "sh", ("run.sh",))


def test_an_abbreviation_is_read_and_said() -> None:
    parsed = split(["--nproc=2", "--cluster-node", "a", "--back=nccl", "t.py"])
    assert [given.name for given in parsed.given] == ["nproc_per_node", "ips", "backend"]
    assert parsed.notes == (
        "--nproc is read as --nproc_per_node.",
        "--cluster-node is read as --cluster_node_ips.",
        "--back is read as --backend.",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--cluter_node_ips=1", "t.py"],
            "no such option: --cluter_node_ips; did you mean --cluster_node_ips?",
        ),
        (
            ["--nporc_per_node=4", "t.py"],
            "no such option: --nporc_per_node; did you mean --nproc_per_node?",
        ),
        (["--foo=1", "t.py"], "no such option: --foo; `fleetrun --help=all` lists them all."),
        (["-gpus=0", "t.py"], "no such option: -gpus; did you mean --gpus?"),
        (["--back-end=x", "t.py"], "no such option: --back-end; did you mean --backend?"),
        (["--xpu=0", "t.py"], "no such option: --xpu; did you mean --xpus?"),
        (["--gpu=0", "t.py"], "no such option: --gpu; did you mean --gpus?"),
        (["--", ""], "the script name is empty; is a variable unset?"),
        (["", "t.py"], "the script name is empty; is a variable unset?"),
        (
            ["run_check", "x"],
            (
                "run_check is Paddle's check of its installation and takes nothing after it; for a "
                "file of that name write ./run_check."
            ),
        ),
        (["-m", ""], "-m: the module's name is empty; is a variable unset?"),
        (["-m"], "-m needs a module: write `fleetrun [options] -m package.module`."),
        (["--gpus"], "--gpus needs a value: give LIST."),
        (
            ["--gpus", "--ips=a", "t.py"],
            (
                "--gpus needs a value, and --ips=a looks like an option: write --gpus=VALUE. "
                "Programs that start launches write this when they find no device on this host, "
                "or none in CUDA_VISIBLE_DEVICES and its like; without the option fleetrun trains "
                "on the CPU."
            ),
        ),
    ],
)
def test_a_slip_is_answered_with_what_to_write(words: list[str], message: str) -> None:
    assert refusal(*words) == message


@pytest.mark.parametrize("words", [[], ["--gpus=0"], ["--"], ["--quiet", "--"]])
def test_a_command_without_script_is_refused(words: list[str]) -> None:
    assert refusal(*words).startswith("no script to run: ")


def test_an_option_that_took_the_script_for_its_value_is_named() -> None:
    message = "no script to run: --nproc_per_node has taken train.py as its value; "
    assert (
        refusal("--nproc_per_node", "train.py")
        == f"{message}write --nproc_per_node=VALUE train.py."
    )


def test_options_of_python_are_sent_to_python() -> None:
    assert "python -u train.py" in refusal("-u", "train.py")
    assert refusal("-", "x").startswith("no such option: -;")


@pytest.mark.parametrize("word", ["-h", "--help", "--version"])
def test_help_and_version_need_no_script_and_end_the_line(word: str) -> None:
    parsed = split(["--gpus=0", word, "--nonsense"])
    assert parsed.script is None
    assert parsed.asks("help") or parsed.asks("version")
    assert not parsed.asks("gpus" if word == "" else "ips")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0", "1", "2", "t.py"], "write --gpus=0,1,2."),
        (["--gpus", "0,", "1", "t.py"], "write --gpus=0,1."),
        (["--ips", "10.0.0.1", "10.0.0.2", "t.py"], "write --ips=10.0.0.1,10.0.0.2."),
        (["--hang_timeout", "30", "minutes", "t.py"], "write --hang_timeout=30minutes."),
        (["--grace=10", "s", "t.py"], "write --grace=10s."),
        (["--log_max_size", "1", "GB", "t.py"], "write --log_max_size=1GB."),
        (["\N{EN DASH}gpus=0", "t.py"], "write two hyphens, --gpus=0."),
        (["\N{EM DASH}\N{EM DASH}gpus=0", "t.py"], "write two hyphens, --gpus=0."),
        (["'--gpus=0'", "t.py"], "write --gpus=0."),
        (["nproc-per-node=2", "t.py"], "write --nproc-per-node=2."),
        (["OMP_NUM_THREADS=1", "t.py"], "write --env OMP_NUM_THREADS=1 for a variable of ranks."),
        (
            ["\N{LEFT DOUBLE QUOTATION MARK}--quiet\N{RIGHT DOUBLE QUOTATION MARK}"],
            "write --quiet.",
        ),
    ],
)
def test_a_value_that_became_the_script_is_recognised(words: list[str], message: str) -> None:
    mistake = mistaken_script(split(words))
    assert mistake is not None
    assert mistake.endswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "=", "0,1", "t.py"], "--gpus ends at the space before =: write --gpus=0,1."),
        (["--gpus", "=0", "t.py"], "--gpus ends at the space before =0: write --gpus=0."),
        (
            ["--quiet", "=", "true", "t.py"],
            "--quiet ends at the space before =: write --quiet=true.",
        ),
        (["--log_dir", "="], "--log_dir ends at the space before =: write --log_dir=VALUE."),
        (["--set", "=", "a=1", "t.py"], "--set ends at the space before =: write --set=a=1."),
    ],
)
def test_spaces_around_an_equals_sign_are_a_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        split(words)
    assert str(refused.value) == message


def test_a_pair_without_its_key_is_read_as_one() -> None:
    (setting,) = split(["--set", "=5", "t.py"]).given
    assert setting.raw == "=5"


@pytest.mark.parametrize(
    "words",
    [
        ["t.py"],
        ["--gpus=0", "t.py"],
        ["--grace=10", "sh"],
        ["--job_id", "1", "s"],
        ["--quiet", "1"],
        ["1"],
        ["-m", "1"],
        ["--help"],
    ],
)
def test_other_scripts_are_no_mistakes(words: list[str]) -> None:
    assert mistaken_script(split(words)) is None
