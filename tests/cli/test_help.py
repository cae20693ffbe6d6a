"""The help in Chinese: complete, in step with the English one, and only where it is asked for."""

from __future__ import annotations

import re

import pytest

import docs
from fleetrun.cli import help as pages
from fleetrun.cli import options
from fleetrun.text import display_width

# Typed and exported words must be the same in every language.
TYPED = re.compile(r"--[a-z_-]+[a-z]|\$\w+|`[^`]+`|\{\w*\}|\b\w+\.(?:py|yaml|json|txt)\b")


def test_what_is_typed_is_the_same_in_both_languages() -> None:
    translate = pages.translation({"LANG": "zh_CN.UTF-8"})
    for text in docs.help_texts():
        assert set(TYPED.findall(text)) == set(TYPED.findall(translate(text))), text


def test_all_of_the_help_is_translated_and_fits() -> None:
    translate = pages.translation({"LANG": "zh_CN.UTF-8"})
    shown = pages.text("all", translate)
    for option in options.OPTIONS:
        assert f"{option.flag}" in shown
        assert str(option.help) not in shown
    long = [line for line in shown.splitlines() if display_width(line) > 100]
    # Words that cannot be broken.
    assert not [line for line in long if " " in line.strip()]
    screen = translate(pages.SCREEN).splitlines()
    assert len(screen) == len(pages.SCREEN.splitlines())
    assert max(map(display_width, screen)) <= 80


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
def test_the_language_is_what_gettext_says(environ: dict[str, str], *, is_chinese: bool) -> None:
    assert ("退出码" in pages.translation(environ)(pages.SCREEN)) == is_chinese
