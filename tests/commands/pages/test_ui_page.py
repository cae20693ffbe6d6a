"""`fleetrun ui` in a browser, and what it denies without a token."""

from __future__ import annotations

import http.client
import json
import re
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from browsers import browse
from commandline import Command, started
from runfolders import big, measured
from waiting import LONG_S, until

from fleetrun.rundir import metricsfile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


class Page(NamedTuple):
    """A page that is served: its address without the token, and the token."""

    address: str
    token: str

    def url(self, **words: str) -> str:
        """Return the address to open; WORDS say what to show."""
        more = "".join(f"&{name}={text}" for name, text in words.items())
        return f"{self.address}#token={self.token}{more}"

    def ask(self, path: str, **headers: str) -> Any:
        """Return the answer to a request of PATH with the token, or with HEADERS.

        That is its status and text where it is refused.
        """
        known = headers or {"Authorization": f"Bearer {self.token}"}
        host = self.address.removeprefix("http://").strip("/")
        connection = http.client.HTTPConnection(host, timeout=LONG_S)
        connection.request("GET", f"/{path}", headers=known)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return json.loads(text) if answer.status == 200 else (answer.status, text)

    def key(self, name: str) -> str:
        """Return the key of the run NAME."""
        (key,) = [run["key"] for run in self.ask("api/runs") if run["name"] == name]
        return str(key)


@contextmanager
def served(folder: Path) -> Iterator[Page]:
    """Serve the runs in FOLDER until the end of the block."""
    process = started("ui", folder=folder)
    try:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().decode().strip().partition("#token=")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        yield Page(address, token)
    finally:
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=LONG_S)
    assert (process.returncode, b"Traceback" in output) == (130, False), output


def test_a_browser_shows_1024_ranks_and_takes_nothing_that_they_print_for_a_page(
    tmp_path: Path,
) -> None:
    run = big(tmp_path / "log" / "runs" / "20250101T000000Z-big-7", 1024)
    for moment in range(3, 7):
        record = measured(1024, moment, step=20 * moment)
        slow = [
            used._replace(step=10 * moment) if used.rank == 700 else used for used in record.ranks
        ]
        busy = [
            gpu._replace(use_percent=100.0) if number == 700 else gpu
            for number, gpu in enumerate(record.gpus)
        ]
        record = record._replace(ranks=tuple(slow), gpus=tuple(busy))
        metricsfile.append(str(run / "metrics.jsonl"), record)
    report = json.loads((run / "report.json").read_text()) if (run / "report.json").exists() else {}
    culprit = {"process": "trainer.5", "rank": 5, "last_words": [HOSTILE]}
    report |= {"schema": 1, "outcome": "rank 5 exited with 7", "exit_code": 7, "culprit": culprit}
    (run / "report.json").write_text(json.dumps(report))
    with served(tmp_path) as page:
        key = page.key(run.name)
        dom = browse(page.url(run=key), tmp_path / "browser")
        other = page.url(run=key, map="GPU+use")
        chinese = browse(other, tmp_path / "browser", "--accept-lang=zh-CN")
        gone = browse(page.url(run="gone"), tmp_path / "browser")
    assert 'data-ready="yes"' in dom
    assert '<p id="problem" role="alert" hidden="">' in dom
    assert 'data-size="3 x 1024"' in dom
    assert "Highest on average: rank 700 0.5; median 0.25." in dom
    assert "rank 5 exited with 7 (exit code 7)" in dom
    assert dom.count('<rect class="point"') == 1024
    # As text.
    assert "&lt;img src=x onerror=" in dom
    assert "<title>owned" not in dom
    # No empty boxes below the sentence.
    assert "There is no such run any more." in gone
    assert '<div id="run" hidden="">' in gone
    assert '<div id="run">' in dom
    # Text of the run is not translated.
    assert '<html lang="zh-CN">' in chinese
    assert re.search("平均值最高.GPU 700 87.14.中位数 70", chinese)
    assert re.search("rank 5 exited with 7.退出码 7", chinese)
    assert 'data-size="7 x 1023"' in chinese


ATTACK = """<!DOCTYPE html><title>attack</title><pre id="said"></pre><script>
const target = "TARGET", said = {};
async function attempt(name, make) {
  try { said[name] = String(await make()); } catch (error) { said[name] = "error"; }
}
const loaded = made => new Promise(done => {
  made.onload = () => done("loaded");
  made.onerror = () => done("error");
  document.body.append(made);
});
(async () => {
  await attempt("plain", async () => (await fetch(target + "api/runs")).text());
  await attempt("with the token", async () =>
    (await fetch(target + "api/runs", { headers: { Authorization: "Bearer TOKEN" } })).text());
  await attempt("no-cors", async () =>
    (await fetch(target + "api/runs", { mode: "no-cors" })).text());
  await attempt("with credentials", async () =>
    (await fetch(target + "api/runs?token=TOKEN", { credentials: "include" })).text());
  const made = (tag, path) => Object.assign(document.createElement(tag), { src: target + path });
  await attempt("image", () => loaded(made("img", "api/runs")));
  await attempt("frame", async () => {
    const frame = made("iframe", "#token=TOKEN");
    await loaded(frame);
    return frame.contentDocument === null ? "error" : frame.contentDocument.body.textContent;
  });
  document.getElementById("said").textContent = JSON.stringify(said);
})();
</script>"""


@contextmanager
def site(text: str) -> Iterator[str]:
    """Serve TEXT to everybody, as another local program may; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_another_page_in_the_same_browser_gets_nothing_not_even_with_the_token(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as page:
        text = ATTACK.replace("TARGET", page.address).replace("TOKEN", page.token)
        with site(text) as address:
            dom = browse(address, tmp_path / "browser")
    answers = json.loads(dom.partition('<pre id="said">')[2].partition("</pre>")[0])
    # An opaque answer has no text; everything else fails.
    assert answers.pop("no-cors") in ("error", "")
    assert (len(answers), set(answers.values())) == (5, {"error"})


def test_a_name_that_leads_here_by_somebody_elses_dns_gets_nothing(tmp_path: Path) -> None:
    big(tmp_path / "log" / "runs" / "20250101T000000Z-big-7", 6)
    with served(tmp_path) as page:
        evil = page.url().replace("127.0.0.1", "rebound.test")
        dom = browse(evil, tmp_path / "browser", names="MAP rebound.test 127.0.0.1,")
        here = browse(
            page.url().replace("127.0.0.1", "localhost"),
            tmp_path / "browser",
            names="EXCLUDE localhost,",
        )
        bearer = f"Bearer {page.token}"
        host = page.ask("api/runs", Authorization=bearer, Host="rebound.test:80")
    assert "answers to 127.0.0.1 and localhost only" in dom
    assert "big" not in dom
    assert host[0] == 421
    assert "rank 5 exited with 7" in here


def test_without_the_token_nothing_about_a_run_is_told(tmp_path: Path) -> None:
    big(tmp_path / "log" / "runs" / "20250101T000000Z-big-7", 8)
    with served(tmp_path) as page:
        key = page.key("20250101T000000Z-big-7")
        run = f"api/runs/{key}"
        for path in ("api/runs", run):
            assert page.ask(path, Authorization="Bearer x")[0] == 401
        assert page.ask(run, Cookie=page.token)[0] == 401
        assert page.ask("api/runs/..%2f..%2fetc")[0] == 404
        beside = browse(page.url(run=key, beside=key), tmp_path / "browser")
    assert 'data-chart="differs"' in beside


def test_a_page_follows_a_job_and_notices_its_end(tmp_path: Path) -> None:
    code = """
print(f"step 1 loss 0.{5 + rank}", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(rank)
"""
    job = Command.python(tmp_path, code)
    launcher = job.start()
    try:
        with served(tmp_path) as page:
            until(lambda: any(event["event"] == "started" for event in job.events()))
            key = page.key((tmp_path / "log" / "latest").resolve().name)
            assert page.ask(f"api/runs/{key}")["is_running"]
            assert page.ask("api/runs")[0]["state"] == "running"
            (tmp_path / "go").touch()
            until(lambda: not page.ask(f"api/runs/{key}")["is_running"])
            assert page.ask(f"api/runs/{key}")["verdict"] == "rank 1 exited with 1"
    finally:
        assert job.release(launcher).code == 1
