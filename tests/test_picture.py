"""The picture of the README shows what a launch shows today."""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path

import picture
import pytest
from processes import MARKER, assert_no_survivors

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info[:2] not in {(3, 11), (3, 12)}, reason="tracebacks look different there"
)
def test_the_picture_is_what_the_commands_show() -> None:
    marker = uuid.uuid4().hex
    text = picture.shown({MARKER: marker})
    assert_no_survivors(marker)
    kept = picture.lines(picture.PICTURE.read_text(encoding="utf-8"))
    assert kept == picture.lines(picture.picture(text)), "run scripts/docs.py --picture"
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert kept == plain.splitlines()
    assert "fleetrun: rank 2 exited with 1." in kept


def test_the_picture_names_nothing_of_the_machine_and_both_readmes_show_it() -> None:
    svg = (ROOT / "docs" / "fleetrun.svg").read_text(encoding="utf-8")
    # Of folders, only the one that stands for yours.
    assert not re.search(r"(?<![\w.<])/(?!home/me/job)\w+/", svg)
    assert set(re.findall(r"https?://[^\"' )]+", svg)) <= {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }
    for name in ("README.md", "README.zh-CN.md"):
        head = (ROOT / name).read_text(encoding="utf-8").partition("\n## ")[0]
        assert "](docs/fleetrun.svg)" in head
