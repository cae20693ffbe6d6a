"""`--ship`: the files sent to hosts without fleetrun, none of which stay there."""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checkout import ROOT
from commandline import Command
from ports import free
from sshd import HOSTS, instead_of_ssh

from fleetrun import cli
from fleetrun.errors import UsageError
from fleetrun.model import Script
from fleetrun.remote import bootstrap, protocol, shipment

SCRIPT = Script("file", "train.py", ())
pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="there is no git here")


def a_folder(folder: Path) -> Path:
    """Make a folder of a job in FOLDER."""
    work = folder / "work ü"
    (work / "big").mkdir(parents=True)
    (work / "data").mkdir()
    for name in ("train.py", "big/one", "data/two.bin", "data/x y", ".hidden"):
        (work / name).write_text(name)
    (work / "link").symlink_to("data")
    (work / ".gitignore").write_text("/big\n*.bin\n")
    return work


def names(sent: bytes) -> set[str]:
    """Return the job's files in the archive of SENT."""
    text, _, rest = sent.partition(b"\0")
    assert text.startswith(b'"""')
    size, _, data = rest.partition(b"\n")
    assert len(data) == int(size)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = set(archive.getnames())
    assert {"lib/fleetrun/cli.py", "lib/yaml/__init__.py", "lib/configs/overlap.yaml"} <= members
    return {name[4:] for name in members if name.startswith("job/")}


@pytest.mark.parametrize("is_repository", [False, True])
def test_what_git_does_not_ignore_is_sent_but_no_logs(
    tmp_path: Path, *, is_repository: bool
) -> None:
    work = a_folder(tmp_path)
    if is_repository:
        git = ["git", "-C", str(work)]
        subprocess.run([*git, "init", "-q"], check=True)
        # Tracked files are sent, whatever .gitignore says.
        subprocess.run([*git, "add", "-f", "data/two.bin", "train.py"], check=True)
        (work / "module" / "inner").mkdir(parents=True)
        subprocess.run([*git[:2], str(work / "module"), "init", "-q"], check=True)
        (work / "module" / "inner" / "file").touch()
    (work / "log").mkdir()
    (work / "log" / "workerlog.0").touch()
    sent = names(shipment.pack(str(work), SCRIPT, "log"))
    more = {"data/two.bin", "module/inner/file"} if is_repository else set()
    assert sent == {".gitignore", ".hidden", "data/x y", "link", "train.py"} | more


def test_without_git_a_folder_that_ignores_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = a_folder(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"no git here that reads .*/work ü/\.gitignore: install"):
        shipment.pack(str(work), SCRIPT, "log")
    (work / ".gitignore").unlink()
    sent = names(shipment.pack(str(work), SCRIPT, "log"))
    assert sent == {".hidden", "big/one", "data/two.bin", "data/x y", "link", "train.py"}


def test_a_folder_that_is_too_large_is_not_sent_and_its_largest_parts_are_named(
    tmp_path: Path,
) -> None:
    work = a_folder(tmp_path)
    for name, size in (("data/huge", 40 << 20), ("huge", 30 << 20), ("big/huge", 10**12)):
        with (work / name).open("wb") as file:
            file.truncate(size)
    with pytest.raises(UsageError) as caught:
        shipment.pack(str(work), SCRIPT, "log")
    expected = f"--ship sends at most 50 MiB, and {work} has 70 MiB (data/ 40 MiB, huge 30 MiB, "
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("{work}/train.py", r"name the script by its path there, train\.py"),
        ("../beside.py", r"\.\./beside\.py is not in it: start from a folder"),
        ("./big/one", r"\./big/one is ignored"),
    ],
)
def test_a_script_that_is_not_sent_is_one_sentence(
    tmp_path: Path, target: str, problem: str
) -> None:
    work = a_folder(tmp_path)
    (tmp_path / "beside.py").touch()
    script = Script("file", target.format(work=work), ())
    with pytest.raises(UsageError, match=problem):
        shipment.pack(str(work), script, "log")


@pytest.mark.extended
def test_what_every_host_has_may_be_started(tmp_path: Path) -> None:
    work = a_folder(tmp_path)
    for script in (Script("file", "/bin/sh", ()), Script("module", "timeit", ())):
        assert "train.py" in names(shipment.pack(str(work), script, "log"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ship"], "--ship sends to the hosts of --hosts or --hostfile: give one of them."),
        (["--ship", "--hosts=a", "--preflight"], "--preflight cannot be used with --ship"),
    ],
)
def test_what_cannot_be_sent_for_is_one_sentence(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--ssh=true", "t.py"], environ={}) == 2
    assert problem in capsys.readouterr().err


def test_an_old_python_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ast.parse(Path(bootstrap.__file__).read_text(encoding="utf-8"), feature_version=(3, 6))
    monkeypatch.setattr(bootstrap, "_OLDEST", (99, 1))
    bootstrap.run(protocol.line(protocol.Answer()).decode(), protocol.MARK.decode(), 1.0)
    printed = capfd.readouterr().out.strip().removeprefix(protocol.MARK.decode())
    fault = protocol.read(printed.encode(), protocol.Answer).fault
    assert fault.startswith("Python is 3.")
    assert fault.endswith(f" ({sys.executable}), and fleetrun needs 99.1 or later.")


@pytest.mark.parametrize("sent", [b"3\nabc", b"100\nabc"])
def test_what_does_not_come_whole_is_not_kept(tmp_path: Path, sent: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", protocol.RECEIVE],
        input=shipment.text() + b"\0" + sent,
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (b"could not be kept in" in done.stdout) == sent.startswith(b"3")
    assert not list(tmp_path.iterdir())


def with_a_plain_python(folder: Path) -> str:
    """Return the option for hosts with a bare Python, at another path than here."""
    plain = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    alone = [str(plain), "-I", "-c", "import fleetrun"]
    assert subprocess.run(alone, capture_output=True, check=False).returncode
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(plain)
    return instead_of_ssh(
        folder,
        f"command=$(printf %s \"$command\" | sed 's,{sys.executable},/nowhere/python,')\n"
        f'unset PYTHONPATH; cd /; PATH={folder}/bin:$PATH exec sh -c "$command"',
    )


DUMP = """
import json, os, sys
with open(os.path.join(sys.argv[1], "rank-" + os.environ["PADDLE_TRAINER_ID"]), "w") as file:
    json.dump([sys.argv[2:], os.getcwd(), sorted(os.listdir()), dict(os.environ)], file)
print("out")
"""


@pytest.mark.slow
def test_hosts_without_fleetrun_run_a_job_of_which_nothing_stays(tmp_path: Path) -> None:
    work = a_folder(tmp_path)
    (work / "train.py").write_text(DUMP)
    (work / "fleetrun.yaml").write_text("grace: 7\n")
    (tmp_path / "there").mkdir()
    command = Command(work, "", ranks=1)
    arguments = ["a b", "", "$HOME", "'\"\\", "ü\udcff"]
    command.argv[1:3] = ["-c", protocol.start("launcher", str(ROOT))]
    ssh = with_a_plain_python(tmp_path)
    port = f"--start_port={free(1)[0]}"
    command.argv[-1:] = [f"--hosts={HOSTS}", ssh, port, "--ship"]
    command.argv += ["train.py", str(tmp_path), *arguments]
    odd = "a b=c\n'\"$x ü\udcff"
    env = {"PYTHONPATH": "", "TMPDIR": str(tmp_path / "there"), "PADDLE_ODD": odd}
    ended = command.finish(command.start(env=env))
    assert ended.code == 0, ended.stderr
    assert "fleetrun: The logs are in log/runs/" in ended.stderr
    for rank in range(2):
        heard, cwd, entries, environ = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert (heard, environ["PADDLE_ODD"]) == (arguments, odd)
        assert Path(cwd).parents[1] == tmp_path / "there"
        assert {"train.py", "data", "link", ".hidden"} <= set(entries)
        assert "big" not in entries
        assert (work / "log" / f"workerlog.{rank}").read_text() == "out\n"
    assert not list((tmp_path / "there").iterdir())
