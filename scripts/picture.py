"""Draws docs/fleetrun.svg, the picture of the README, for scripts/docs.py --picture.

A real launch in a real terminal. What differs from run to run (times, numbers of processes, names
of host and folders) is replaced by what the README has in its place.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "fleetrun.svg"
COLUMNS, LINES = 92, 50
COMMANDS = (("--nproc_per_node=4", "train.py"), ("top", "--once"))
# Everybody waits for the others, as in an allreduce, so all have printed step 3 when rank 2 fails.
TRAIN = """\
import os, time

RANK = int(os.environ["PADDLE_TRAINER_ID"])

def batch(step):
    fails = (step, RANK) == (4, 2)
    if not fails:
        open(f"{step}.{RANK}", "w").close()
    while not all(os.path.exists(f"{step}.{rank}") for rank in {0, 1, 2, 3} - {RANK}):
        time.sleep(0.01)
    if fails:
        raise ValueError("label 17, but there are 10 classes")

def train():
    for step, loss in enumerate([2.302, 1.874, 1.411, 1.106], 1):
        batch(step)
        print(f"step {step} loss {loss + RANK / 100:.3f}", flush=True)

train()
"""
_PID = 6627
_MASKS = (
    (r"\d{8}T\d{6}Z-[\w.]+-\d+", "20261121T060424Z-train-6204"),
    (r"on \S+, pid \d+, at \S+ \S+, [\d.]+ s after", "on gpu7, pid 6629, at WHEN, 4.1 s after"),
    ("WHEN", "2026-11-21 06:04:24"),
    (r"after [\d.]+ s", "after 4.2 s"),
    (r"\b\d+s(?=\x1b\[2m +/home)", "4s"),
    # Without this machine's word on GPUs, and for whom a slow one waits.
    (r"^.*(training runs on the CPU|Waiting up to).*\n", ""),
    (r" +(\x1b\[0m)?$", r"\1"),
)
# As GitHub draws code where it is dark.
_DARK = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        *((72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)),
    ],
)
_PROMPT = "\x1b[1;32m$\x1b[0m \x1b[1m{}\x1b[0m\n"
# The width of a character, in units of the picture.
_CHARACTER = 12.2
_FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def run(folder: Path, words: tuple[str, ...], environ: dict[str, str]) -> str:
    """Return what `fleetrun WORDS` in FOLDER shows on a terminal."""
    command = shlex.join((sys.executable, "-m", "fleetrun", *words))
    on_terminal = f"stty cols {COLUMNS} rows {LINES}; {command}"
    done = subprocess.run(
        ["script", "-qc", on_terminal, "/dev/null"],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.replace("\r\n", "\n")


def shown(environ: dict[str, str]) -> str:
    """Return what the commands show, one after another, without what differs from run to run."""
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    text = ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")
        env = {**kept, "HOME": name, "CUDA_VISIBLE_DEVICES": "", **environ}
        for words in COMMANDS:
            text += _PROMPT.format(shlex.join(("fleetrun", *words))) + run(folder, words, env)
        text = text.replace(str(folder), "/home/me/job")
    for pattern, instead in _MASKS:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    # In the table, whose columns are as wide as the numbers.
    text = re.sub(r"device +pid", "device    pid", text)

    def numbered(row: re.Match[str]) -> str:
        return f"{row[1]}     {_PID + int(row[2])} "

    return re.sub(r"^( +(\d) .*cpu) +\d+ ", numbered, text, flags=re.MULTILINE)


def picture(text: str) -> str:
    """Return what a terminal shows as SVG; fonts are those of the machine that draws it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text.rstrip("\n")))
    svg = console.export_svg(title="fleetrun", theme=_DARK, unique_id="fleetrun")
    svg = re.sub(r" *@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", _FONTS)
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines())


def lines(svg: str) -> list[str]:
    """Return the text that SVG shows, line by line."""
    rows: dict[int, str] = {}
    for x, number, text in re.findall(r' x="([\d.]+)"[^<>]*line-(\d+)\)">([^<]*)</text>', svg):
        before = rows.get(int(number), "").ljust(round(float(x) / _CHARACTER))
        rows[int(number)] = before + unescape(text).replace("\xa0", " ").strip("\n")
    return [rows[number].rstrip() for number in sorted(rows)]


def draw() -> None:
    """Draw the picture."""
    PICTURE.write_text(picture(shown({})), encoding="utf-8")
