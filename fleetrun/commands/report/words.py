"""The texts of pages and their Chinese translation, which browsers in Chinese show.

What a run reports (verdicts, events, logs) stays in English, as on the console.
"""

from __future__ import annotations

import gettext
import json
from pathlib import Path

from fleetrun.cli.help import DOMAIN, LOCALES

# A text of a page matches as a whole; {} is anything.
TEXTS = (
    # Of a run, in the order of the page.
    *("running", "its launcher was killed", "all processes finished", "{} (exit code {})"),
    *("duration", "processes", "hosts", "attempts", "steps per second", "last throughput"),
    *("last loss", "peak memory of a process", "Cause", "Its log", "Its standard error"),
    *("Loss", "Steps", "Events", "and {} more, in events.jsonl", "at"),
    "Faint: as printed; bold: the mean of {} values around each.",
    *("{} (logarithmic)", "buckets of gradients"),
    *(
        "what",
        "Processes",
        "Strategy",
        "field",
        "asked",
    ),
    *(
        "in effect",
        "why",
        "effective",
        "no difference",
        "no effect",
        "refused",
        "script",
        "no word",
    ),
    *("Where it came from", "run", "command", "folder", "Logs"),
    *("What differs", "Loss of both", "Steps of both"),
    *("succeeded", "failed first", "stopped with it", "end unknown"),
    *("CPU use", "Memory", "GPU use", "GPU memory", "Step time"),
    "Time in collectives",
    # Of `fleetrun ui`.
    *("1 process", "{} processes", "compare", "leave out", "Elsewhere on this host"),
    *("There is no run yet.", "Ranks over time", "not measured", "{}; a click shows its log"),
    "Highest on average: {}; median {}.",
    *(
        "ranks",
        "lines matching",
        "all: 0,3-5",
        "regular expression",
        "only the rank that failed first",
    ),
    *("Search", "logs: {}", "logs: {}; the last lines of them", "Stacks and collectives"),
    *("Take the stacks of all ranks now", "Requested; they will appear here.", "{} and {} more"),
    "No stacks yet: a hang (--hang_timeout) or the button takes them.",
    "fleetrun ui does not answer: it has ended or was restarted.",
)


def script() -> str:
    """Return the script that translates a page: the texts in Chinese, then words.js."""
    translate = gettext.translation(DOMAIN, LOCALES, ["zh_CN"], fallback=True).gettext
    chinese = json.dumps({text: translate(text) for text in TEXTS}, ensure_ascii=False)
    code = Path(__file__).with_name("words.js").read_text(encoding="utf-8")
    return f"const CHINESE = {chinese};\n{code}"
