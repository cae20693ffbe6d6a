"""Writes into docs/devices.md what has run for each kind of device, as the tests have it.

Run it as .venv/bin/python scripts/devices_page.py.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from pages import DOCS, ROOT, in_both_languages, table, with_section

from fleetrun.plan import kinds

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PAGE = DOCS / "devices.md"
BEGIN, END = "<!-- what ran -->", "<!-- end of what ran -->"
TESTS = ROOT / "tests"

# Kinds of which Paddle's own wheel is needed, and what stands in for their drivers in tests.
WHEELS = {
    "`gpu`, NVIDIA's": "NVML, CUDA's start and the wheel's libraries",
    "`gpu`, AMD's and DCU": "the kernel's files",
    "`xpu`": "device files",
}
# What the wheel itself has shown.
BY_WHEEL = {
    "`gpu`, NVIDIA's": "of 2.6.2; on an H100: collectives; on a CPU: what it lacks, static graphs",
}
_TRAINED = re.compile(r"devices\.on\(\s*\"(\w+)\"")
_PARAMETERS = re.compile(r"\(\"(\w+)\", \"(?:3\.3\.1|2\.6\.2)\", \d+\)")


def trained() -> set[str]:
    """Return the kinds that the device under test plays in tests that train."""
    kinds: set[str] = set()
    for path in sorted(TESTS.rglob("test_*.py")):
        kinds.update(_TRAINED.findall(path.read_text(encoding="utf-8")))
    launched = (TESTS / "train" / "test_device_kinds.py").read_text(encoding="utf-8")
    return kinds.union(_PARAMETERS.findall(launched))


def recorded() -> set[str]:
    """Return the kinds of whose ranks Paddle's own launchers were recorded."""
    lines = (TESTS / "golden" / "launch-cases.jsonl").read_text(encoding="utf-8").splitlines()
    return {kind for line in lines for kind in json.loads(line).get("paddle_counts", ())}


def rows() -> Iterable[tuple[str, ...]]:
    """Yield a row for each kind: where it ran, of whatever sort."""
    for name, mock in WHEELS.items():
        yield name, "no", "no", BY_WHEEL.get(name, ""), mock, "all the rest"
    on_device, of_launchers = trained(), recorded()
    for kind in kinds.VENDORS:
        if kind in kinds.BUILT_IN:
            continue
        plays = "training" if kind in on_device else "no"
        plans = "the same plans" if kind in of_launchers else "no"
        files = "device files" if kinds.VENDORS[kind].file else ""
        yield f"`{kind}`", plays, plans, "", files, "the vendor's names, driver and kernels"
    others = sorted(on_device - {*kinds.VENDORS})
    named = f"training, as {', '.join(f'`{kind}`' for kind in others)}"
    yield "any other", named, "no", "", "", "the vendor's driver and kernels"


def section() -> str:
    """Return what stands between the marks."""
    heads = (
        "kind",
        "the device under test",
        "Paddle's launchers",
        "its wheel",
        "a mock",
        "reading",
    )
    return f"{table(heads, rows())}\n"


def pages() -> Iterable[tuple[Path, str]]:
    """Yield the page in each language, with its text as it should be."""
    return [(page, with_section(page, BEGIN, END, section())) for page in in_both_languages(PAGE)]


if __name__ == "__main__":
    for page, text in pages():
        page.write_text(text, encoding="utf-8")
