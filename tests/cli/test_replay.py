"""A manifest plans the same launch again, and what is typed beside it wins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import plans
import pytest
from plans import a_roster, some_facts

from fleetrun.cli import app, replay
from fleetrun.cli.argv import split
from fleetrun.errors import UsageError
from fleetrun.plan import planner
from fleetrun.plan.devices import Share
from fleetrun.run.loop import Loop
from fleetrun.rundir import names
from fleetrun.sinks.provenance import Provenance

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import LaunchPlan, Request

WORDS = ("--gpus=0,1", "--env", "A=b", "--tee", "0", "train.py", "--lr=1", "")
ENVIRON = {"HOME": "/root", "NCCL_DEBUG": "INFO", "PADDLE_JOB_ID": "night", "HF_TOKEN": "exported"}


@pytest.fixture
def folder(elsewhere: Path) -> Path:
    """Make a folder with a script, and stand in it."""
    (elsewhere / "train.py").touch()
    (elsewhere / "other.py").touch()
    (elsewhere / "elsewhere").mkdir()
    return elsewhere


def plan_of(made: Request, environ: Mapping[str, str]) -> LaunchPlan:
    """Plan MADE for a made-up host."""
    roster = a_roster()
    share = Share("gpu", roster.members[0].groups, "nccl")
    return planner.plan(made, some_facts(2, environ=environ), share, roster)


def asked(words: tuple[str, ...], environ: Mapping[str, str]) -> tuple[Request, Mapping[str, str]]:
    """Return what the command line WORDS asks for."""
    seen: list[tuple[Request, Mapping[str, str]]] = []

    def launch(made: Request, variables: Mapping[str, str]) -> int:
        seen.append((made, variables))
        return 0

    assert app.main(words, environ=environ, launch=launch) == 0
    return seen[0]


def write(
    folder: Path, words: tuple[str, ...] = WORDS, environ: Mapping[str, str] | None = None
) -> Path:
    """Write the manifest of a launch in FOLDER."""
    made, variables = asked(words, ENVIRON if environ is None else environ)
    plan = plan_of(made, variables)._replace(cwd=str(folder), run_dir=str(folder / "log/runs/one"))
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    job = plans.job(plan, asked=made)
    job.environ = variables
    manifest = Provenance(job)
    manifest.open(Loop())
    manifest.close()
    return Path(plan.run_dir) / names.MANIFEST


def refusal(*words: str, environ: Mapping[str, str] | None = None) -> str:
    """Return why there is no such launch."""
    with pytest.raises(UsageError) as error:
        replay.replay(split(words), environ or {})
    assert error.value.exit_code == 2
    return str(error.value)


def test_the_environment_of_the_launch_comes_back(folder: Path) -> None:
    path = write(folder)
    here = {"NCCL_DEBUG": "WARN", "PADDLE_NNODES": "1", "HOME": "/home/me"}
    again, variables = asked((f"--from-manifest={path}",), here)
    assert again.job_id == "night"
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["HOME"] == "/home/me"
    assert "PADDLE_NNODES" not in variables
    assert again.restored == (
        ("NCCL_DEBUG", "INFO"),
        ("PADDLE_JOB_ID", "night"),
        ("PADDLE_NNODES", None),
    )


def test_what_stands_beside_wins(folder: Path) -> None:
    path = write(folder)
    again, _ = asked(
        (
            *("--gpus=1", "--from-manifest", str(path), "--job_id=day", "--env=A=new"),
            *("--quiet", "other.py", "--lr"),
        ),
        {"PADDLE_JOB_ID": "other"},
    )
    assert (again.devices, again.job_id, again.quiet, again.tee) == ("1", "day", True, "0")
    assert again.env == (("A", "new"),)
    assert (again.script.target, again.script.args) == ("other.py", ("--lr",))


def test_what_the_config_file_said_is_kept(folder: Path) -> None:
    config = folder / "fleetrun.yaml"
    config.write_text(
        "gpu_memory_fraction: 0.123456789\nips: [127.0.0.1]\nlog_overwrite: yes\n"
        "env: {A: b}\nnccl: {DEBUG: INFO}\n"
    )
    first, _ = asked(("train.py",), {})
    path = write(folder, ("train.py",), {})
    config.write_text("grace: 1\n")
    again, _ = asked((f"--from-manifest={path}",), {})
    assert again._replace(typed=(), given=(), settings=()) == first._replace(
        typed=(), given=(), settings=()
    )
    assert asked((f"--from-manifest={path}", f"--config={config}"), {})[0].grace_s == 1


def test_the_folder_is_that_of_the_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder, ("train.py",), {})
    monkeypatch.chdir(folder / "elsewhere")
    asked(("--from-manifest=../log/runs/one/manifest.json",), {})
    assert Path.cwd() == folder
    assert path.exists()


def test_what_had_a_secret_must_be_typed_again(folder: Path) -> None:
    (folder / "fleetrun.yaml").write_text("env: {DB_PASSWORD: hush}\n")
    (folder / "my.yaml").write_text("env: {MY_TOKEN: s3cr3t, MY_NAME: me}")
    words = ("--env=HF_TOKEN=s3cr3t", "--strategy=my.yaml", "train.py", "--password", "hush")
    path = write(folder, words, {"NCCL_TOKEN": "x"})
    assert not {"hush", "s3cr3t"} & {*path.read_text().replace('"', " ").split()}
    assert refusal(f"--from-manifest={path}") == (
        f"{path}: secrets are not written down: give again what has --env=DB_PASSWORD=***, "
        "--env=HF_TOKEN=***, --password ***, my.yaml: MY_TOKEN=***, "
        "$NCCL_TOKEN=***: the option, the file or the script with its arguments."
    )
    anew = ("--env=HF_TOKEN=a", "--env=DB_PASSWORD=b", "--strategy=my.yaml", "train.py")
    again, _ = asked((f"--from-manifest={path}", *anew), {"NCCL_TOKEN": "y"})
    assert dict(again.env) == {"HF_TOKEN": "a", "DB_PASSWORD": "b"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not a manifest: it is not JSON"),
        ("[" * 100_000, "is not a manifest: it is not JSON"),
        ("[]", "is not a manifest: it has no schema"),
        ("{}", "is not a manifest: it has no schema"),
        ('{"schema": 2}', "this manifest has schema 2, and fleetrun"),
        ('{"schema": 1}', "something is missing or wrong in it"),
    ],
)
def test_what_is_no_manifest_is_one_sentence(folder: Path, text: str, sentence: str) -> None:
    path = folder / "a.json"
    path.write_text(text)
    message = refusal(f"--from-manifest={path}")
    assert sentence in message
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


def test_strategies_are_as_they_were_even_when_the_file_has_changed(folder: Path) -> None:
    (folder / "my.yaml").write_text("strategy: {amp_configs: {custom_black_list: [a]}, amp: 1}")
    (folder / "fleetrun.yaml").write_text("set:\n  lamb: true\n")
    words = ("--strategy=my.yaml,overlap", "--set=nccl_comm_num=3", "train.py")
    first, _ = asked(words, {})
    path = write(folder, words, {})
    (folder / "my.yaml").write_text("strategy: {lars: true}")
    (folder / "fleetrun.yaml").unlink()
    again, _ = asked(("--from-manifest", str(path)), {})
    assert again.strategy is not None
    assert first.strategy is not None
    made, before = ([row[:3] for row in r.strategy.settings] for r in (again, first) if r.strategy)
    assert made == before
    anew, _ = asked(("--from-manifest", str(path), "--strategy=my.yaml"), {})
    assert anew.strategy is not None
    assert "lars" in [setting.name for setting in anew.strategy.settings]
