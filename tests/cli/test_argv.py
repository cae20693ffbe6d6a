"""The command line: ours before the script, the script's own after it, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli.argv import split
from fleetrun.model import Script

ANYTHING = st.text(st.characters(exclude_characters="\0", exclude_categories=[]))
LOOK_ALIKES = st.sampled_from(["--", "-m", "", "--gpus=0", "--help", "-h", "--dry-run", "-", "a=b"])


def given_of(*words: str) -> list[tuple[str, str]]:
    """Return what the options before a script come to."""
    parsed = split([*words, "train.py"])
    assert parsed.script == Script("file", "train.py", ())
    return [(given.spelling, given.raw) for given in parsed.given]


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
        (["--log_dir="], []),
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
        (["--selected_mlus=0"], "selected_mlus", "0"),
        (["--mlus=x"], "mlus", "x"),
    ],
)
def test_devices_of_any_kind_are_named_by_the_rule(words: list[str], name: str, raw: str) -> None:
    (given,) = split([*words, "train.py"]).given
    assert (given.spelling, given.name, given.raw) == (name, "devices", raw)


def test_an_abbreviation_is_read_and_said() -> None:
    parsed = split(["--nproc=2", "--cluster-node", "a", "--back=nccl", "t.py"])
    assert [given.name for given in parsed.given] == ["nproc_per_node", "ips", "backend"]
    assert parsed.notes == (
        "--nproc is read as --nproc_per_node.",
        "--cluster-node is read as --cluster_node_ips.",
        "--back is read as --backend.",
    )


@pytest.mark.parametrize("word", ["-h", "--help", "--version"])
def test_help_and_version_need_no_script_and_end_the_line(word: str) -> None:
    parsed = split(["--gpus=0", word, "--nonsense"])
    assert parsed.script is None
    assert parsed.asks("help") or parsed.asks("version")
    assert not parsed.asks("gpus" if word == "" else "ips")
