"""The help: what people use on one page, all of it by section, and the same in Chinese."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import docs
from fleetrun.cli import app, options
from fleetrun.cli import help as pages
from fleetrun.cli.option import GROUPS
from fleetrun.cli.parser import COMMANDS
from fleetrun.text import display_width

# Typed and exported words must be the same in every language.
TYPED = re.compile(r"--[a-z_-]+[a-z]|\$\w+|`[^`]+`|\{\w*\}|\b\w+\.(?:py|yaml|json|txt)\b")
Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """Return a function that runs `fleetrun WORDS` and returns what it prints."""

    def run(*words: str, **environ: str) -> str:
        assert app.main(words, environ=environ) == 0
        return capsys.readouterr().out

    return run


def test_help_is_what_people_use(shown: Shown) -> None:
    text = shown("--help")
    assert text == shown("-h")
    assert max(map(len, text.splitlines())) <= 80
    headings = ["Usage", "Examples", "Commands", "Most used", "Exit codes"]
    assert [heading for heading in headings if f"\n{heading}:" in f"\n{text}"] == headings
    rows = re.findall(r"(?m)^  ([a-z]+)  +\w", text.partition("Commands:")[2])
    assert rows == list(COMMANDS)
    # Else it would be taken for a script.
    assert all(name.isalpha() for name in COMMANDS)
    assert len(re.findall(r"(?m)^  --[a-z]", text)) <= 12


def test_help_loads_little() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fleetrun", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines()}
    assert "fleetrun.cli.help" in loaded
    assert not loaded & {"asyncio", "numpy", "paddle", "rich", "fleetrun.commands.logs"}


def test_all_of_the_help_has_every_option_and_exit_code(shown: Shown) -> None:
    text = shown("--help=all")
    order = ["Usage: fleetrun [OPTIONS]", "Commands:", *(f"{name}:" for name in GROUPS.values())]
    places = [text.index(heading) for heading in [*order, "Exit codes:"]]
    assert places == sorted(places)
    for option in options.KNOWN:
        assert option.opts[0] in text
    assert "\n  5  " in text
    # They are the last thing in it.
    assert text.rpartition("\n\n")[2].startswith("Exit codes:\n")


@pytest.mark.parametrize("section", [*GROUPS, "codes"])
def test_every_section_of_the_help_can_be_asked_for(section: str, shown: Shown) -> None:
    assert shown(f"--help={section}").startswith(f"{GROUPS.get(section, 'Exit codes')}:")


def test_what_is_typed_is_the_same_in_both_languages() -> None:
    translate = pages.translation({"LANG": "zh_CN.UTF-8"})
    for text in docs.help_texts():
        assert set(TYPED.findall(text)) == set(TYPED.findall(translate(text))), text


def test_all_of_the_help_is_translated_and_fits() -> None:
    translate = pages.translation({"LANG": "zh_CN.UTF-8"})
    text = pages.text("all", translate)
    for option in options.OPTIONS:
        assert option.opts[0] in text
        assert str(option.help) not in text
    long = [line for line in text.splitlines() if display_width(line) > 80]
    # Words that cannot be broken, and names.
    assert not [line for line in long if " " in line.strip() and "--" not in line]


@pytest.mark.parametrize(
    ("environ", "is_chinese"),
    [
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.GB18030"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en:zh_CN"}, False),
        ({"LANG": "C.UTF-8", "LANGUAGE": "zh_CN:en"}, True),
        ({"LANG": "fr_FR.UTF-8"}, False),
        ({}, False),
    ],
)
def test_the_language_is_what_gettext_says(
    environ: dict[str, str], *, is_chinese: bool, shown: Shown
) -> None:
    assert ("退出码" in shown("--help", **environ)) == is_chinese
