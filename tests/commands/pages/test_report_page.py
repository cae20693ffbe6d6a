"""`fleetrun report`: the page of a real run and of two, as a browser shows it."""

from __future__ import annotations

import base64
import json
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browsers
import pytest
from commandline import Command, fleetrun
from runfolders import big, ring

from fleetrun.commands.pages import rundata, series
from fleetrun.commands.pages.server import page
from fleetrun.rundir import runs

if TYPE_CHECKING:
    import subprocess

SCRIPT = """
for step in range(5):
    print(f"step {step} loss: {1 / (step + 1):.4f}", flush=True)
if rank == 1:
    while not os.path.exists("printed"):
        time.sleep(0.01)
    raise ValueError("too <b>hot</b>")
open("printed", "w").close()
time.sleep(600)
"""


def report(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `fleetrun report WORDS` in FOLDER."""
    return fleetrun("report", *words, folder=folder)


class ShownText(HTMLParser):
    """A page in a browser: its visible text, and its number of elements per class."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self._hidden = 0
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Skip elements that are never shown."""
        self._hidden += tag in {"script", "style"}
        self.links += [value for name, value in attrs if name == "href" and value]

    def handle_endtag(self, tag: str) -> None:
        """End a skipped element."""
        self._hidden -= tag in {"script", "style"}

    def handle_data(self, data: str) -> None:
        """Take text."""
        if not self._hidden:
            self.text += data


def browse(file: Path) -> str:
    """Return the document that a browser makes of FILE."""
    return browsers.browse(file.as_uri(), file.parent / "browser")


def drawn(dom: str, chart: str) -> str:
    """Return the browser's drawing of CHART."""
    return dom.partition(f' data-chart="{chart}"')[2].partition(" data-chart=")[0]


def failed(folder: Path) -> Path:
    """Let a job fail in FOLDER; return its run directory."""
    assert Command.python(folder, SCRIPT, "--env=MY_TOKEN=hush-hush").run().code == 1
    return (folder / "log" / "latest").resolve()


@pytest.mark.slow
def test_a_browser_shows_how_a_real_run_went_and_why_it_failed(tmp_path: Path) -> None:
    run_dir = failed(tmp_path)
    done = report(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{run_dir / 'report.html'}\n")
    dom = browse(run_dir / "report.html")
    shown = ShownText(dom)
    for text in ("rank 1 exited with 1 (exit code 1)", "ValueError: too <b>hot</b>", "paddle"):
        assert text in shown.text
    assert "hush-hush" not in dom
    assert drawn(dom, "A-processes").count('class="point"') == 2
    assert "failed first" in drawn(dom, "A-processes")
    for chart in ("A-loss", "A-steps"):
        assert drawn(dom, chart).count("data-name=") == 2
    # The rank that failed first is marked in each.
    for chart in ("A-processes", "A-loss", "A-steps"):
        assert drawn(dom, chart).count("▶ rank 1") == 1
        assert "▶ rank 0" not in drawn(dom, chart)
    assert 'class="line culprit" stroke="#d33f3f" data-name="rank 1"' in drawn(dom, "A-loss")
    # A sentence stands once.
    for sentence in ("rank 1 exited with 1", "ValueError: too <b>hot</b>"):
        assert ShownText(dom.partition("<body")[2]).text.count(sentence) == 1
    logs = [link for link in shown.links if "workerlog" in link]
    assert {(run_dir / link).resolve() for link in logs} == {
        run_dir / "workerlog.0",
        run_dir / "workerlog.1",
    }


@pytest.mark.slow
def test_two_runs_stand_side_by_side_with_what_differs(tmp_path: Path) -> None:
    first = failed(tmp_path)
    steps = "for i in 1 2 3; do echo step $i loss: 0.5; done"
    assert Command(tmp_path, steps, "--job_id=other").run().code == 0
    second = (tmp_path / "log" / "latest").resolve()
    done = report(tmp_path, first.name, second.name)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    dom = browse(tmp_path / "report.html")
    shown = ShownText(dom)
    for text in ("What differs", "--job_id", "all processes finished", "exited with 1"):
        assert text in shown.text
    for run in "AB":
        assert drawn(dom, f"{run}-processes").count('class="point"') == 2
    assert drawn(dom, "both-loss").count("data-name=") == 4


def story(folder: Path) -> rundata.Document:
    return rundata.read([runs.read(str(folder))])


def cells(chart: dict[str, Any]) -> list[list[float]]:
    """Return the numbers of a heat map, row by row."""
    numbers = array("f", base64.b64decode(chart["values"]))
    wide = len(chart["at"])
    return [[round(x, 4) for x in numbers[at : at + wide]] for at in range(0, len(numbers), wide)]


def test_what_a_run_says_cannot_break_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    text = page([{**story(big(tmp_path / "run", 1024)), "verdict": evil, "title": evil}])
    assert len(text) < 1_500_000
    assert "alert(1)</script>" not in text
    assert text.count("<script") == 1
    curve = series.Curve(
        "rank 0", (1, 2, 3, 4), (0.0, 1.0, 2.0, 3.0), (float("nan"), 0.5, 0.4, 0.3)
    )
    (line,) = series.lines([curve], "loss")
    assert line["y"] == [None, 0.5, 0.4, 0.3]


def test_a_run_that_tells_next_to_nothing_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    told = story(tmp_path)
    assert (told["verdict"], told["exit_code"]) == ("its launcher was killed", None)
    assert (told["spans"], told["maps"], told["lines"]) == ([], [], {"loss": [], "steps": []})


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["a", "b", "c"], 2, "one run, or two"),
        (["nowhere"], 2, "no such run: nowhere"),
        ([], 3, "There is no launch in log"),
    ],
)
def test_what_is_not_there_is_a_sentence(
    words: list[str], code: int, problem: str, tmp_path: Path
) -> None:
    done = report(tmp_path, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert problem in done.stderr


def test_of_a_hang_a_map_shows_who_is_in_no_collective(tmp_path: Path) -> None:
    run_dir = big(tmp_path / "run", 6)
    for rank in (0, 1, 2):
        waits = [(1e9 + 2, 1e9 + 4)] if rank == 1 else [(1e9 + 1, 1e9 + 4), (1e9 + 5, 0)]
        (run_dir / f"collectives.{rank}").write_bytes(ring(rank, waits))
    with (run_dir / "events.jsonl").open("a") as file:
        places = [{"who": ["rank 1"], "where": "load (train.py:5)"}]
        cause = [{"who": ["rank 1"], "text": "rank 1 never entered sum 2"}]
        more = {"seconds": 8.0, "places": places, "collectives": cause}
        about = {"schema": 2, "time": 1e9 + 14, "monotonic": 14.0, "event": "hung"}
        file.write(json.dumps({**about, **more}) + "\n")
    told = story(run_dir)
    (used,) = [used for used in told["maps"] if used["title"] == "Time in collectives"]
    assert (told["first"], used["rows"]) == (used["title"], ["rank 0", "rank 1", "rank 2"])
    # From the moment that all records reach back to, 2 s, to the end, 14 s.
    assert [round(at, 6) for at in used["at"][:2]] == [2.0, 2.1]
    waiting, late, other = cells(used)
    assert waiting == other == [100.0] * 20 + [0.0] * 10 + [100.0] * 90
    assert late == [100.0] * 20 + [0.0] * 100
    # Rank 5 failed, the hang waited for rank 1; both are marked.
    assert told["culprits"] == ["rank 5", "rank 1"]
