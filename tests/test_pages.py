"""What the README and the pages of docs/ say holds: commands, links, options, exit codes.

Every command works when it is pasted where it stands, those of docs/ in the README's project.
Set-up, the project's own scripts and what pip does are left out. What needs GPUs, several hosts or
endpoints on them is run with --dry-run. The project to try things in is the README's, with a small
stand-in for each training script, which trains nothing but says that it did as Paddle's hooks do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from processes import MARKER, assert_no_survivors

import docs
from fleetrun import errors
from fleetrun.cli import help as help_text
from fleetrun.plan import kinds
from fleetrun.run import events

ROOT = Path(__file__).parents[1]
# How the names of pages in Chinese end; they have the commands of those in English.
CHINESE = ".zh-CN.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
    if not path.name.endswith(CHINESE)
}
README = PAGES["README.md"]
# All but those for who changes fleetrun.
TRANSLATED = [name for name in PAGES if Path(name).stem not in {"architecture", "CONTRIBUTING"}]

# Set-up, the tests themselves, what measures for minutes, and what meets hosts that are not there.
LEFT_OUT = re.compile(
    r"(git clone|(\.venv/bin/python )?scripts/|pip install|python -m pip|apt-get|dnf |"
    r"fleetrun doctor --(ips|hosts))"
)
CLUSTER = re.compile(r" --(gpus|ips|master|servers)=")

TRAINER = """
import json, os, signal, socket, sys
if os.environ.get("TRAINING_ROLE") == "PSERVER":
    listening = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
    signal.pause()
with open(os.environ["FLEETRUN_RECORDS"], "w") as file:
    for number in range(1, int(os.environ.get("FLEETRUN_STOP_AFTER", "0")) + 1):
        record = {"number": number, "at": number / 10, "loss": 1 / number}
        print(json.dumps({"schema": 1, "kind": "update", **record}), file=file)
if "FLEETRUN_PROFILE" in os.environ:
    summary = {"steps": 1, "seconds": {"step": 0.1}, "hidden": None}
    more = {"rank": int(os.environ["PADDLE_TRAINER_ID"]), "first_step": 1, "summary": summary}
    with open(os.environ["FLEETRUN_PROFILE"].partition(":")[2], "w") as file:
        json.dump({"schema": 1, "traceEvents": [], "otherData": more}, file)
if "FLEETRUN_VERIFY" in os.environ:
    asked = json.loads(os.environ["FLEETRUN_VERIFY"])
    columns = dict.fromkeys("kinds sizes sums largest".split(), [0])
    columns |= {"names": ["weight"], "dtypes": ["float32"], "values": [""]}
    record = {"update": 1, "optimizer": 0, "records": os.environ["FLEETRUN_RECORDS"], **columns}
    with open(os.path.join(asked["path"], os.environ["PADDLE_TRAINER_ID"] + ".jsonl"), "w") as file:
        print(json.dumps(record), file=file)
print("trained", *sys.argv[1:])
"""


def chinese(name: str) -> str:
    """Return the name of the page in Chinese that is the twin of NAME."""
    return name.replace(".md", CHINESE)


class Piece(NamedTuple):
    """One thing that a reader pastes: commands, or a file with its name."""

    kind: str
    text: str


def pieces(page: str) -> list[Piece]:
    """Return the commands and named files of PAGE, in its order."""
    parts = []
    # Text and blocks in turn.
    for place, part in enumerate(re.split(r"^```", page, flags=re.MULTILINE)):
        kind, _, text = part.partition("\n")
        if place % 2:
            parts += [Piece(kind, text)] if kind in {"sh", "yaml", "python"} else []
            continue
        for inline in re.findall(r"`([^`]+)`", part):
            # A command in a sentence, which may be broken like one.
            if re.match(r"(\w+=\S+ )*fleetrun\s.*\.(py|json)\b", inline, flags=re.DOTALL):
                parts.append(Piece("sh", " ".join(inline.split())))
    return parts


def commands(text: str) -> list[str]:
    """Return the command lines of a block, long ones put together."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def adapted(command: str) -> str:
    """Return COMMAND as it can be tried on any machine; nothing for what is left out."""
    if LEFT_OUT.match(command):
        return ""
    if not CLUSTER.search(command):
        return command
    dry = command if "--dry-run" in command else command.replace("fleetrun ", "fleetrun --dry-run ")
    return f"env -u CUDA_VISIBLE_DEVICES FLEETRUN_ASSUME_DEVICES=gpu:8 {dry}"


def script(page: str) -> list[str]:
    """Return the lines that paste all of PAGE, and end at the first command that fails."""
    lines = []
    for kind, text in pieces(page):
        if kind != "sh":
            # Only a file that says its name is meant to be kept.
            named = re.match(r"# (\S+\.(?:yaml|py))\n", text)
            lines += [f"cat >{named[1]} <<'END'\n{text}END"] if named else []
            continue
        for command in filter(None, map(adapted, commands(text))):
            shown = command.replace("'", "'\\''")
            lines += [f"echo '>>> {shown}'", command, "code=$?"]
            lines += ['[ "$code" = 0 ] || { echo "it exited with $code"; exit 1; }']
    return lines


# The project that the README makes, in which a launch has left its logs.
PROJECT = script(README[README.index("### Try it here") : README.index("## Every day")])
PASTED = [name for name, page in PAGES.items() if script(page)]


def paste(lines: list[str], folder: Path, **variables: str) -> str:
    """Run LINES with VARIABLES in the project in FOLDER; return what they say.

    Nobody may be left.
    """
    (folder / "bin").mkdir(exist_ok=True)
    path = variables.get("PYTHONPATH", ROOT)
    ours = f"PYTHONPATH={path} exec {sys.executable} -m fleetrun"
    for name, words in (("python", f"exec {sys.executable}"), ("fleetrun", ours)):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\n{words} "$@"\n')
        command.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").write_text(f"PATH={folder}/bin:$PATH\n")
    marker = uuid.uuid4().hex
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines) + "\n"],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", MARKER: marker, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert_no_survivors(marker)
    assert done.returncode == 0, done.stdout[-3000:]
    tried = sum(line.startswith("echo '>>> ") for line in lines)
    assert done.stdout.count(">>> ") == tried
    return done.stdout


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return what the README begins with, and the project that it makes, with logs of a launch."""
    bare, made = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("made")
    for folder in (bare, made):
        (folder / "scripts").mkdir()
        for trainer in ("train_resnet.py", "train_ctr.py"):
            (folder / "scripts" / trainer).write_text(TRAINER)
    paste([*PROJECT, "fleetrun train.py"], made)
    return bare, made


@pytest.mark.slow
@pytest.mark.parametrize("name", PASTED)
def test_every_command_works_when_it_is_pasted_where_it_stands(
    name: str, tmp_path: Path, projects: tuple[Path, Path]
) -> None:
    project, is_made = tmp_path / "project", name != "README.md"
    shutil.copytree(projects[is_made], project, symlinks=True)
    begin = [". .venv/bin/activate", "cd demo"] if is_made else []
    output = paste([*begin, *script(PAGES[name])], project)
    # A restart that loads its checkpoint.
    assert ("resuming at step 10" in output) == (name == "docs/cookbook.md")


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_yaml_can_be_read(name: str) -> None:
    for kind, text in pieces(PAGES[name]):
        assert kind != "yaml" or isinstance(yaml.safe_load(text), dict)


def test_the_commands_are_found() -> None:
    assert {"README.md", "docs/launching.md", "docs/strategies.md", "docs/watching.md"} <= set(
        PASTED
    )
    pasted = [command for page in PAGES.values() for command in script(page)]
    assert "fleetrun train.py --epochs 3" in "\n".join(pasted)
    assert sum(command.startswith("echo '>>> ") for command in pasted) >= 30


@pytest.mark.parametrize(
    ("name", "source"), [("train.py", "train_resnet.py"), ("train_ctr.py", "train_ctr.py")]
)
def test_what_the_pages_give_a_training_script_is_an_option_of_it(name: str, source: str) -> None:
    text = (ROOT / "scripts" / source).read_text(encoding="utf-8")
    calls = [
        line
        for page in PAGES.values()
        for piece in pieces(page)
        for line in commands(piece.text)
        if f" {name}" in line and not line.startswith("cp ")
    ]
    assert calls
    for call in calls:
        for flag in re.findall(r" (--\w+)", call.partition(f" {name}")[2].partition("#")[0]):
            assert f'"{flag}"' in text, call


def test_the_readme_says_how_to_get_at_the_command_and_how_long_tests_take() -> None:
    assert ". .venv/bin/activate" in README
    assert re.search(r"scripts/test\W.*minutes", README)


def anchors(page: str) -> set[str]:
    """Return what links may name in PAGE: its headings, as GitHub spells them, and marks."""
    without_code = re.sub(r"(?ms)^```.*?^```", "", page)
    headings = re.findall(r"(?m)^#+ (.+)$", without_code)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', page))


@pytest.mark.parametrize("name", [*PAGES, *map(chinese, TRANSLATED)])
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


def test_the_readme_leads_to_every_page() -> None:
    for name in PAGES:
        assert name == "README.md" or f"]({name})" in README


@pytest.mark.parametrize(("name", "word"), [("README.md", "Status"), ("README.zh-CN.md", "状态")])
def test_the_first_screen_of_the_readme_has_the_status(name: str, word: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    first_screen = text.partition("\n## ")[0]
    (status,) = (part for part in first_screen.split("\n\n") if part.startswith(f"**{word}**"))
    assert "CPU" in status
    assert "GPU" in status
    assert "#what-has-run)" in status


@pytest.mark.parametrize("name", ["docs/strategies.md", "docs/strategies.zh-CN.md"])
def test_the_table_of_fields_calls_nothing_effective_on_gpus(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    cells = [cell.strip() for cell in text.replace("\n", "|").split("|")]
    assert cells.count("effective / expected")
    # One word is about both, the second of two about GPUs.
    assert [cell for cell in cells if re.search(r"(^|/ )effective$", cell)] == []


def test_what_is_generated_is_what_the_code_makes_of_it() -> None:
    contents, untranslated = docs.generated()
    for path, content in contents.items():
        assert path.read_bytes() == content, f"{path}: run scripts/docs.py"
    assert not untranslated, "translate them in the catalogue, then run scripts/docs.py"


def test_every_exit_code_of_the_code_is_in_the_help() -> None:
    kinds_of_errors = (errors.UsageError, errors.EnvironmentFault, errors.RendezvousError)
    known = {kind.exit_code for kind in kinds_of_errors} | {events.HUNG, events.STRATEGY_REJECTED}
    told = {code for row in help_text.EXIT_CODES for code in row[0].split(", ")}
    assert {str(code) for code in known} <= told


def test_the_table_of_devices_says_what_the_tests_run() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    trained = set(re.findall(r'devices\.on\(\s*"(\w+)"', tests))
    cases = (ROOT / "tests" / "golden" / "launch-cases.jsonl").read_text(encoding="utf-8")
    recorded = {
        kind for line in cases.splitlines() for kind in json.loads(line).get("paddle_counts", ())
    }
    lines = re.findall(r"(?m)^\| `(\w+)` \| (.*?) \| (.*?) \|", PAGES["docs/launching.md"])
    rows = {kind: (training, plans) for kind, training, plans in lines}
    for kind in kinds.VENDORS.keys() - kinds.BUILT_IN:
        training, plans = rows[kind]
        assert (training == "training") == (kind in trained), kind
        assert (plans == "the same plans") == (kind in recorded), kind


# -- pages in Chinese ------------------------------------------------------------------------------


def headings(text: str) -> list[int]:
    """Return the level of each heading."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", prose, flags=re.MULTILINE)]


def links(text: str, name: str) -> set[str]:
    """Return where links lead, in either language, but for those to the page NAME itself."""
    links = {link.replace(CHINESE, ".md") for link in re.findall(r"\]\(([^)]+)\)", text)}
    return {link.removeprefix(name) for link in links} - {""}


def shapes(text: str) -> list[int]:
    """Return the number of columns of each row of a table."""
    return [line.count(" | ") for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_chinese_page_has_the_headings_commands_tables_and_links(name: str) -> None:
    path, english, own = ROOT / chinese(name), PAGES[name], Path(name).name
    twin = path.read_text(encoding="utf-8")
    blocks = re.compile(r"```\w*\n(.*?)```", flags=re.DOTALL)
    assert headings(twin) == headings(english)
    assert blocks.findall(twin) == blocks.findall(english)
    assert shapes(twin) == shapes(english)
    assert links(twin, own) == links(english, own)
    # They lead to each other.
    assert f"({path.name})" in english
    assert f"({own})" in twin


def test_no_page_has_the_header_of_its_catalogue_or_both_sides_of_a_merge() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert "charset=" not in text, page
        # grep and git diff take a page with one for binary, and show nothing of it.
        assert "\0" not in text, page
        assert not re.search(r"(?m)^(<{7}|>{7}) ", text), page


def test_the_pages_use_the_words_of_the_glossary() -> None:
    mark = '<a id="terms"></a>'
    glossary = PAGES["docs/reference.md"].partition("\n## Terms\n")[2]
    terms = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \| [^|]+ \| *([^|]*?) *\|$", glossary)[1:]
    assert len(terms) >= 20
    translated = "".join(
        (ROOT / chinese(name)).read_text(encoding="utf-8").partition(mark)[0] for name in TRANSLATED
    )
    english = "".join(PAGES[name].partition("\n## Terms\n")[0] for name in TRANSLATED).lower()
    for word, translation, wrong in terms:
        assert word in english
        assert translation in translated
        assert not wrong or wrong not in translated, wrong
