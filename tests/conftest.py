"""Fixtures and hooks of all tests: no test inherits a launch environment."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Helpers beside the tests (waiting.py, processes.py) are plain modules, and so are pages' tables.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from examples import FEW, MANY, USUAL

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from terminals import Terminal

    from fleetrun.run.loop import Loop

# Every run has the same examples: a random failure says nothing about a change.
# FLEETRUN_TEST_EXPLORE=1 looks for new ones.
# There is no deadline per example: a busy machine is no failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", patient, derandomize=True, max_examples=USUAL)
settings.register_profile("few", patient, derandomize=True, max_examples=FEW)
settings.register_profile("long", patient, derandomize=True, max_examples=MANY)
settings.register_profile("explore", patient, derandomize=False, max_examples=MANY)
settings.load_profile("same")

# In the background of a script (`.ci/run &`) they are ignored, and so they would be by launchers.
for _signum, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _usual)

# Programs for ranks: they import Paddle.
collect_ignore = ["train/models"]

_PREFIXES = (
    *("PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "FLEETRUN_", "TRAINER_", "POD_", "DISTRIBUTED_"),
    *("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "LSB_", "PBS_", "JOB_", "PE_HOSTFILE"),
)

# The marks of the slowest tests, in this order.
_LONG_FIRST = ("train", "multinode", "slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the option for tests that take too long for every run."""
    parser.addoption("--gpu", action="store_true", help="the tests that need a GPU, too")
    parser.addoption("--long", action="store_true", help="also the tests that are marked long")


# What a file says of all of its tests, but for those that are left out where something is missing.
_OF_ALL_TESTS = re.compile(r"(?m)^pytestmark = (\[[^\]]*\]|.*)")


class Files:
    """Leaves out files that no test would be run of, which each worker would import and search."""

    def __init__(self, config: pytest.Config) -> None:
        terms = config.option.markexpr.split(" and ")
        self._left_out = {term[4:] for term in terms if term.startswith("not ")}
        if not config.getoption("--long"):
            self._left_out.add("long")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out a file if all its tests have a mark that is not wanted."""
        if not collection_path.match("test_*.py"):
            return None
        marked = _OF_ALL_TESTS.search(collection_path.read_text(encoding="utf-8"))
        marks = re.findall(r"pytest\.mark\.(\w+)", marked[1]) if marked else []
        # Others may have to say something to it.
        return not self._left_out.isdisjoint(marks) or None

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        """Look for tests in the docstrings only of files that have any."""
        collected = yield
        has_any = any(type(collector).__name__ == "DoctestModule" for collector in collected)
        if not has_any or b">>>" in file_path.read_bytes():
            return collected
        return [collector for collector in collected if type(collector).__name__ != "DoctestModule"]


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples before the tests are imported."""
    # Of a conftest.py's own hooks, those for files see only the files beside it.
    config.pluginmanager.register(Files(config))
    if os.environ.get("FLEETRUN_TEST_EXPLORE"):
        settings.load_profile("explore")
    elif config.getoption("--long"):
        settings.load_profile("long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that are marked long or gpu, unless they are requested."""
    if not config.getoption("--gpu"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu: scripts/test --gpu runs it"))
    long = [item for item in items if item.get_closest_marker("long")]
    if long and not config.getoption("--long"):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    if hasattr(config, "workerinput"):
        _begin_with_long_files(items)


def _begin_with_long_files(items: list[pytest.Item]) -> None:
    """Sort ITEMS so that no worker starts minutes of training when the others are done."""
    places: dict[Path, int] = {}
    for item in items:
        marks = [item.get_closest_marker(name) is not None for name in _LONG_FIRST]
        place = marks.index(True) if any(marks) else len(marks)
        places[item.path] = min(place, places.get(item.path, place))
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the collected tests, thousands of objects that stay, for the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Kill the processes that a failed test has left."""
    begun_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        return (yield)
    except Exception:
        # Most tests start no process, and are faster without this.
        from processes import kill_what_was_left

        kill_what_was_left(begun_s)
        raise


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop every variable that a launcher reads."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name.endswith("_VISIBLE_DEVICES"):
            monkeypatch.delenv(name)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """Return a new terminal, which is closed afterwards."""
    # Most tests need neither a terminal nor its modules.
    from terminals import Terminal

    made = Terminal()
    yield made
    os.close(made.ours)
    os.close(made.theirs)


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Return a loop that is closed after the test."""
    from fleetrun.run.loop import Loop

    made = Loop()
    yield made
    made.close()
