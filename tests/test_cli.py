"""The command as people meet it: words in, one line and an exit code out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import LONG_S

from fleetrun import __version__, cli, help, options  # noqa: A004 - the module is called that
from fleetrun.errors import EnvironmentFault, FleetrunError, RendezvousError, UsageError
from fleetrun.strategy import fields, load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetrun.model import Request

ROOT = Path(__file__).parents[1]


class Launch:
    """A launch that keeps what it is given, and ends as it is told."""

    def __init__(self, ending: int | BaseException = 0) -> None:
        self.ending = ending
        self.requests: list[Request] = []

    def __call__(self, request: Request, _environ: Mapping[str, str]) -> int:
        """Take the place of `launch.launch`."""
        self.requests.append(request)
        if isinstance(self.ending, BaseException):
            raise self.ending
        return self.ending


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fleetrun(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the real command."""
    return subprocess.run(
        [sys.executable, "-m", "fleetrun", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
    )


def test_words_become_a_request_and_the_launch_s_code_the_exit_code() -> None:
    launch = Launch(17)
    assert cli.main(["--gpus=0,1", "train.py", "--lr"], environ={}, launch=launch) == 17
    (request,) = launch.requests
    assert request.devices == "0,1"
    assert request.script.args == ("--lr",)


def test_without_words_the_process_s_own_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fleetrun", "train.py"])
    monkeypatch.setenv("PADDLE_JOB_ID", "from-here")
    launch = Launch()
    assert cli.main(launch=launch) == 0
    assert launch.requests[0].job_id == "from-here"


@pytest.mark.parametrize(
    ("error", "code"),
    [(FleetrunError, 1), (UsageError, 2), (EnvironmentFault, 3), (RendezvousError, 4)],
)
def test_what_goes_wrong_is_one_line_and_its_own_exit_code(
    error: type[FleetrunError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train.py"], environ={}, launch=Launch(error("it is so."))) == code
    assert capsys.readouterr() == ("", "fleetrun: it is so.\n")


def test_an_interrupt_before_the_launch_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train.py"], environ={}, launch=Launch(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script to run"),
        (["--nporc_per_node=4", "train.py"], "did you mean --nproc_per_node?"),
        (["--gpus", "0", "1", "train.py"], "write --gpus=0,1."),
        (["--np=2", "train.py"], "processes are counted with --nproc_per_node here"),
        (["--config=nowhere.yaml", "train.py"], "nowhere.yaml: No such file"),
        (["completion"], "completion needs one shell's name: bash, zsh, fish."),
        (["completion", "tcsh"], "completion needs one shell's name: bash, zsh, fish."),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = Launch()
    assert cli.main(words, environ={}, launch=launch) == 2
    assert launch.requests == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fleetrun: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_script_with_a_number_for_a_name_can_be_run(elsewhere: Path) -> None:
    (elsewhere / "1").touch()
    launch = Launch()
    assert cli.main(["--gpus", "0", "1"], environ={}, launch=launch) == 0
    assert launch.requests[0].script.target == "1"


def test_the_config_file_of_the_folder_is_read_unless_another_is_named(elsewhere: Path) -> None:
    (elsewhere / "fleetrun.yaml").write_text("job_id: here\n")
    (elsewhere / "other.yaml").write_text("job_id: other\n")
    launch = Launch()
    cli.main(["train.py"], environ={}, launch=launch)
    cli.main(["--config", "other.yaml", "train.py"], environ={}, launch=launch)
    cli.main(["--config=/dev/null", "train.py"], environ={}, launch=launch)
    assert [request.job_id for request in launch.requests] == ["here", "other", "default"]


def test_an_unfit_system_is_one_sentence_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cli.main(["train.py"]) == 3
    assert capsys.readouterr().err == (
        "fleetrun: only Linux has what is needed to supervise processes, and this is darwin.\n"
    )
    assert cli.unfit("linux", (3, 10, 0)) is None


def test_the_real_launch_is_behind_it(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "train.py").touch()
    assert cli.main(["--dry-run", "--nproc_per_node=2", "train.py"]) == 0
    done = fleetrun("--dry-run", "--nproc_per_node=2", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.py" in done.stdout
    assert "train.py" in capsys.readouterr().out


# -- help --


def test_help_is_one_screen_of_what_people_use_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"], environ={}) == 0
    text = capsys.readouterr().out
    assert cli.main(["-h"], environ={}) == 0
    assert capsys.readouterr().out == text
    lines = text.splitlines()
    # The prompt needs the last line.
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    places = [text.index(each) for each in ("Usage:", "Examples:", "Most used:", "Exit codes:")]
    assert places == sorted(places)
    assert "--help=all" in text
    for name in cli.COMMANDS:
        assert name in text
    assert 'eval "$(fleetrun completion bash)"' in text


def test_help_tells_of_nothing_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"], environ={}) == 0
    text = capsys.readouterr().out
    known = options.by_name()
    flags = set(re.findall(r"--([a-z][\w-]*)", text)) - {"epochs"}
    assert len(flags) > 10
    for flag in flags:
        assert flag.replace("-", "_") in known
    codes = text.partition("Exit codes:")[2].partition("More:")[0]
    for code, _ in help.EXIT_CODES:
        # Those of signals are 128 + N.
        for one in {*code.split(", ")} - {"129", "130", "143"}:
            assert re.search(rf"\b{re.escape(one)}\b", codes), one


def test_all_of_the_help_has_every_option_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help=all"], environ={}) == 0
    text = capsys.readouterr().out
    order = ["Usage: fleetrun [OPTIONS]", "Examples:", *(f"{g}:" for g in options.GROUPS)]
    places = [text.index(each) for each in [*order, "Exit codes:", "Completion by Tab:"]]
    assert places == sorted(places)
    for option in options.TABLE:
        assert option.flag in text
    assert "\n  5  " in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("words", [["--help=devices"], ["--help", "devices"], ["-h", "devices"]])
def test_help_has_sections(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words, environ={}) == 0
    text = capsys.readouterr().out
    assert text.startswith("Devices:\n")
    assert "--backend" in text
    assert "--max_restart" not in text


@pytest.mark.parametrize("section", [*options.SECTIONS, "codes"])
def test_every_section_of_the_help_can_be_asked_for(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(options.SECTIONS.values()) == set(options.GROUPS)
    assert cli.main([f"--help={section}"], environ={}) == 0
    assert capsys.readouterr().out.startswith(f"{options.SECTIONS.get(section, 'Exit codes')}:")


def test_a_section_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help=gpus"], environ={}) == 2
    assert "--help=gpus: give one of screen, all, common" in capsys.readouterr().err


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, help.text().splitlines())) <= 80


def test_help_loads_neither_click_nor_the_options() -> None:
    program = (
        "import sys; from fleetrun.cli import main; main(['--help']); "
        "print(*sorted({'click', 'fleetrun.options', 'fleetrun.request'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG_S,
    )
    assert done.stdout.splitlines()[-1] == ""


def test_color_without_a_value_never_eats_the_script() -> None:
    launch = Launch()
    assert cli.main(["--color", "train.py"], environ={}, launch=launch) == 0
    assert cli.main(["--color", "never", "train.py"], environ={}, launch=launch) == 0
    assert [request.color for request in launch.requests] == ["always", "never"]
    assert {request.script.target for request in launch.requests} == {"train.py"}


# -- colour and the pager --


def on_terminal(*words: str, lines: int = 24, **variables: str) -> str:
    """Return what the command shows on a terminal of so many lines."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))
    unset = ("NO_COLOR", "PAGER", "LESS", "TERM", "COLUMNS", "LINES")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [sys.executable, "-m", "fleetrun", *words],
        env={**environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **variables},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    # The end of a terminal that nobody holds any more is an error to read.
    with contextlib.suppress(OSError):
        while piece := os.read(leader, 65536):
            shown += piece
    os.close(leader)
    process.wait(60)
    return shown.decode().replace("\r\n", "\n")


def test_help_is_coloured_on_a_terminal_and_never_in_a_pipe() -> None:
    assert "\x1b[1mExamples:\x1b[0m" in on_terminal("--help")
    assert "\x1b" not in on_terminal("--help", NO_COLOR="1")
    assert "\x1b" not in on_terminal("--help", TERM="dumb")
    assert "\x1b" not in on_terminal("--color=never", "--help")
    assert "\x1b" not in fleetrun("--help", TERM="xterm").stdout
    assert "\x1b" in fleetrun("--help", "--color=always", NO_COLOR="1").stdout
    assert "\x1b" in fleetrun("--color", "--help").stdout


def test_errors_are_coloured_on_a_terminal_and_never_in_a_pipe() -> None:
    assert on_terminal("--nonsense").startswith("\x1b[1;31mfleetrun:\x1b[0m no such option")
    assert "\x1b" not in on_terminal("--nonsense", NO_COLOR="1")
    assert "\x1b" not in on_terminal("--color", "never", "--nonsense")
    assert "\x1b" not in fleetrun("--nonsense", TERM="xterm").stderr
    assert "\x1b" in fleetrun("--color=always", "--nonsense").stderr
    assert on_terminal("strategy", "validate", "nope").startswith("\x1b[1;31mfleetrun:")


def test_the_banner_and_the_verdict_are_coloured_on_a_terminal(elsewhere: Path) -> None:
    (elsewhere / "train.py").write_text("raise SystemExit(3)\n")
    words = ("--nproc_per_node=1", "train.py")
    shown = on_terminal(*words, CUDA_VISIBLE_DEVICES="")
    assert shown.startswith("\x1b[1mfleetrun:\x1b[0m starting train.py")
    assert "\x1b[1;31mfleetrun:\x1b[0m rank 0 exited with 3" in shown
    assert "\x1b" not in on_terminal(*words, CUDA_VISIBLE_DEVICES="", NO_COLOR="1")


def test_long_help_goes_through_the_pager_of_a_terminal() -> None:
    paged = on_terminal("--help=all", PAGER="sed s/^/paged:/", NO_COLOR="1")
    assert paged.startswith("paged:Usage:")
    assert paged.endswith("\n")
    assert "paged:  5  " in paged
    assert "paged:" not in on_terminal("--help", PAGER="sed s/^/paged:/")
    assert "paged:" not in on_terminal("--help=all", PAGER="sed s/^/paged:/", lines=1000)
    assert "paged:" not in on_terminal("--help=all", PAGER="sed s/^/paged:/", TERM="dumb")
    assert "paged:" not in fleetrun("--help=all", PAGER="sed s/^/paged:/").stdout


@pytest.mark.parametrize("pager", ["no-such-pager -R", "", "cat", "true"])
def test_a_pager_that_is_none_leaves_nobody_without_help(pager: str) -> None:
    shown = on_terminal("--help=all", PAGER=pager)
    # One that reads nothing is what was asked for; it is no error either.
    assert ("Usage:" in shown) == (pager != "true")
    assert "Traceback" not in shown


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"], environ={}) == 0
    assert capsys.readouterr().out == f"fleetrun {__version__}\n"


def test_s37_a_reader_that_has_seen_enough_of_the_help_hears_no_complaint() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fleetrun", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        timeout=LONG_S,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_s80_a_command_line_is_read_without_anything_slow() -> None:
    slow = "click argparse difflib inspect dataclasses json yaml subprocess pathlib logging"
    program = (
        "import sys; from fleetrun.cli import main; "
        "main(['--gpus=0', '--env=A=1', 'train.py'], environ={}, launch=lambda r, e: 0); "
        f"print(*sorted(set('{slow}'.split()) & set(sys.modules)))"
    )
    done = subprocess.run(
        # -S and -I: what the interpreter's own set-up files import is not ours.
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({str(ROOT)!r}); {program}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG_S,
    )
    assert done.stdout.strip() == ""


# -- completion --


def completed(*words: str) -> list[tuple[str, str]]:
    """Return what may stand in the place of the last of WORDS, each with its type."""
    *before, last = words
    return [(item.type, item.value) for item in help.candidates(before, last)]


_VARIED = "--vary=fuse_all_reduce_ops=true,false"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--nproc"], [("plain", "--nproc_per_node")]),
        (["--nproc-"], [("plain", "--nproc-per-node")]),
        (["--dry"], [("plain", "--dry-run")]),
        (["--dry_"], [("plain", "--dry_run")]),
        (["--server_n"], [("plain", "--server_num")]),
        (["--elastic_l"], []),
        (["--nonsense=1", "--dry"], [("plain", "--dry-run")]),
        (["--nproc_per_node", "g"], [("plain", "gpu")]),
        (["--nproc_per_node=c"], [("plain", "--nproc_per_node=cpu")]),
        (["--dry-run=j"], [("plain", "--dry-run=json")]),
        (["--tee="], [("plain", "--tee=all")]),
        (["--log_overwrite=t"], [("plain", "--log_overwrite=true")]),
        (["--nonsense="], []),
        (["--gpus", ""], []),
        (["--config", "a"], [("file", "a")]),
        (["--log_dir", "a"], [("dir", "a")]),
        (["--gpus=0", ""], [("file", "")]),
        (["--dry-run", "tr"], [("file", "tr")]),
        (["--gpus=0", "train.py", "--gp"], [("file", "--gp")]),
        (["-m", "pkg", "--gp"], [("file", "--gp")]),
        (["--", "--gp"], [("file", "--gp")]),
        ([""], [("file", "")]),
        (["comp"], [("file", "comp"), ("plain", "completion")]),
        (["completion", "z"], [("plain", "zsh")]),
        (["completion", "zsh", ""], []),
        (["--help=dev"], [("plain", "--help=devices")]),
        (["--color=n"], [("plain", "--color=never")]),
        (
            ["--strategy=amp,ov"],
            [("file", "--strategy=amp,ov"), ("plain", "--strategy=amp,overlap")],
        ),
        (["--set", "nccl_c"], [("plain", "nccl_comm_num=")]),
        (["--set=fuse_bn_act"], [("plain", "--set=fuse_bn_act_ops=")]),
        (["--set", "gradient_merge_configs.k"], [("plain", "gradient_merge_configs.k_steps=")]),
        (["--set", "fuse_all_reduce_ops=t"], [("plain", "fuse_all_reduce_ops=true")]),
        (["--set", "nccl_comm_num="], [("plain", "nccl_comm_num=auto")]),
        (
            ["--set", "sharding_configs.sharding_segment_strategy=segment_a"],
            [("plain", "sharding_configs.sharding_segment_strategy=segment_anchors")],
        ),
        (["--set", "no_such=t"], []),
        (["tune", "--va"], [("plain", "--vary")]),
        (["tune", "--nproc"], [("plain", "--nproc_per_node")]),
        (["tune", "--vary", "nccl_c"], [("plain", "nccl_comm_num=")]),
        (["tune", "--vary=fuse_all_reduce_ops=true,f"], [("plain", _VARIED)]),
        (["tune", "--vary=a=1", "tr"], [("file", "tr")]),
        (["strategy", "l"], [("plain", "list")]),
        (["strategy", "list", "--f"], [("plain", "--fields")]),
        (["strategy", "show", "nccl_c"], [("file", "nccl_c"), ("plain", "nccl_comm_num")]),
        (["strategy", "validate", "over"], [("file", "over"), ("plain", "overlap")]),
        (["strategy", "explain", "--gr"], [("plain", "--graph")]),
        (["strategy", "explain", "--graph=d"], [("plain", "--graph=dygraph")]),
        (["strategy", "explain", "--paddle", "2"], [("plain", "2.6.2")]),
        (["strategy", "schema", ""], []),
    ],
)
def test_options_their_values_and_files_complete(
    words: list[str], found: list[tuple[str, str]]
) -> None:
    assert completed(*words) == found


def test_every_key_that_completes_is_one_that_a_launch_takes() -> None:
    keys = [value.removesuffix("=") for _, value in completed("--set", "")]
    assert len(keys) > 100
    for key in keys:
        values = [value for _, value in completed("--set", f"{key}=")]
        for value in values:
            assert load.parse_set(value)
        first, _, part = key.partition(".")
        field = fields.by_name("strategy")[first]
        assert not part or part in {each.name for each in field.keys}


def test_what_works_or_is_taken_completes() -> None:
    flags = [value for _, value in completed("--")]
    assert set(flags) == {
        option.flag if name == option.name else f"--{name}"
        for option in options.TABLE
        if option.status != "later"
        for name in (option.name, *option.aliases)
    }


@pytest.mark.parametrize("shell", help.SHELLS)
def test_the_script_to_source_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell], environ={}) == 0
    ours = capsys.readouterr().out
    assert cli.main([], environ={cli.COMPLETE_VARIABLE: f"{shell}_source"}) == 0
    assert capsys.readouterr().out == ours
    assert f"{cli.COMPLETE_VARIABLE}={shell}_complete" in ours


def test_how_to_source_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "--help"], environ={}) == 0
    assert 'eval "$(fleetrun completion bash)"' in capsys.readouterr().out


@pytest.mark.parametrize("instruction", ["tcsh_source", "bash", "bash_eat", "powershell_source"])
def test_a_wrong_instruction_is_refused(
    instruction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([], environ={cli.COMPLETE_VARIABLE: instruction}) == 2
    assert f"{cli.COMPLETE_VARIABLE}={instruction}: give SHELL_source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shell", "words", "cword", "answer"),
    [
        ("zsh", "fleetrun --dry-run=j", "1", "plain\n--dry-run=json\n_\n"),
        ("zsh", "fleetrun --log_d", "1", "plain\n--log_dir\n"),
        ("zsh", "fleetrun --gpus=0 tr", "2", "file\ntr\n_\n"),
        ("fish", "fleetrun --dry-run=j", "--dry-run=j", "plain,--dry-run=json\n"),
        ("fish", "fleetrun --gpus=0 tr", "tr", "file,tr\n"),
        ("bash", "fleetrun\n--dry-run\n=\nj", "3", "plain,json\n"),
        ("bash", "fleetrun\n--dry-run\n=", "2", "plain,table\nplain,json\nplain,sh\n"),
        ("bash", "fleetrun\n--master\na\n:\n1\n--dr", "5", "plain,--dry-run\n"),
    ],
)
def test_each_shell_is_answered_in_its_own_words(
    shell: str,
    words: str,
    cword: str,
    answer: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", cword)
    assert cli.main([], environ={cli.COMPLETE_VARIABLE: f"{shell}_complete"}) == 0
    assert capsys.readouterr().out.startswith(answer)


# What is typed, a Tab, an X; and what the line is then.
TYPED = {
    "fleetrun --nproc": "fleetrun --nproc_per_node X",
    "fleetrun --backend gl": "fleetrun --backend gloo X",
    "fleetrun --dry-run=j": "fleetrun --dry-run=json X",
    "fleetrun --strategy=over": "fleetrun --strategy=overlap X",
    "fleetrun --strategy comm_f": "fleetrun --strategy comm_fusion X",
    "fleetrun --set fuse_grad_size_in_M": "fleetrun --set fuse_grad_size_in_MB=X",
    "fleetrun --set=fuse_all_reduce_ops=f": "fleetrun --set=fuse_all_reduce_ops=false X",
    "fleetrun --gpus=0 tra": "fleetrun --gpus=0 train.py X",
    "fleetrun strategy show nccl_c": "fleetrun strategy show nccl_comm_num X",
    "fleetrun strategy explain --gr": "fleetrun strategy explain --graph X",
    "./fleetrun tune --vary a=1 --warm": "./fleetrun tune --vary a=1 --warmup X",
}
# Shows the line that was completed; Ctrl-A goes to its beginning.
_SHOW = {"bash": "printf 'LINE:%s\\n' ", "zsh": "print -r -- LINE:", "fish": "echo LINE:"}
_BEGIN = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
    "fish": ["--no-config", "-i"],
}
_READY = {
    "bash": 'PS1="> "; eval "$(fleetrun completion bash)"',
    "zsh": 'autoload -Uz compinit; compinit -u -D; PS1="> "; eval "$(fleetrun completion zsh)"',
    "fish": "fleetrun completion fish | source",
}


@pytest.fixture
def installed(elsewhere: Path) -> Path:
    """Make a folder with a script to run and a fleetrun in it, which is to be found first."""
    (elsewhere / "train.py").touch()
    command = elsewhere / "fleetrun"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m fleetrun "$@"\n')
    command.chmod(0o755)
    return elsewhere


def shell_of(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return program


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_a_real_shell_completes(name: str, installed: Path) -> None:
    program = shell_of(name)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    process = subprocess.Popen(
        [program, *_BEGIN[name]],
        env={
            "PATH": f"{installed}:{os.environ['PATH']}",
            "HOME": str(installed),
            "TERM": "dumb",
            "LC_ALL": "C",
            "INPUTRC": "/dev/null",
        },
        cwd=installed,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - a shell's own terminal
    )
    os.close(follower)
    shown = b""

    def read_until(mark: bytes) -> bytes:
        nonlocal shown
        while mark not in shown:
            assert select.select([leader], [], [], 60)[0], shown.decode(errors="replace")
            shown += os.read(leader, 65536)
        before, _, shown = shown.partition(mark)
        return before

    try:
        os.write(leader, f"{_READY[name]}; echo READY''NOW\n".encode())
        read_until(b"READYNOW\r\n")
        for typed, line in TYPED.items():
            os.write(leader, f"{typed}\tX\x01{_SHOW[name]}'\x05'; echo EN''D\n".encode())
            answer = read_until(b"END\r\n").decode(errors="replace")
            assert answer.rpartition("LINE:")[2].rstrip() == line, answer
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_real_fish_completes(installed: Path) -> None:
    program = shell_of("fish")
    asked = "; ".join(f"complete -C '{typed}'; echo END" for typed in TYPED)
    done = subprocess.run(
        [program, "--no-config", "-c", f"{_READY['fish']}; {asked}"],
        env={**os.environ, "PATH": f"{installed}:{os.environ['PATH']}", "HOME": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG_S,
    )
    assert done.stderr == ""
    answers = [each.strip().split("\n") for each in done.stdout.split("END\n")[:-1]]
    for (typed, line), answer in zip(TYPED.items(), answers, strict=True):
        # What fish offers is a whole word; after one that ends in = it puts no blank.
        words = [each.partition("\t")[0] for each in answer]
        assert line.removesuffix("X").rstrip().rpartition(" ")[2] in words, (typed, answer)
