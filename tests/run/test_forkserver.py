"""Which ranks are forked, which start without it, and that no process is left behind."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import forks
import pytest
from waiting import LONG_S

from fleetrun.run import guard
from fleetrun.run.descriptors import FileLimit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleetrun.run.children import Order

TELLS = """
import os, sys
if sys.argv[1:]: os.environ[sys.argv[1]] = "2"
import paddle
print("rank", os.environ["PADDLE_TRAINER_ID"], paddle.base.core.started, paddle.read,
      os.environ["OMP_NUM_THREADS"], flush=True)
"""
NEW = "Paddle says hello\nrank {} ['{}', 'devices'] None {}\n"


@pytest.fixture
def parent() -> Iterator[guard.Guard]:
    made = guard.Guard("marker", FileLimit(1))
    yield made
    made.dismiss()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    forks.fake_paddle(tmp_path)
    (tmp_path / "tells.py").write_text(TELLS)
    return tmp_path


def order(folder: Path, *words: str, rank: int = 0, **more: str) -> Order:
    argv = (sys.executable, "-u", str(folder / "tells.py"), *words)
    return forks.order(folder, str(folder / "fake"), *argv, rank=rank, **more)


def waiting(parent: guard.Guard) -> list[int]:
    """Return the processes that wait, the server first, in the order in which they came."""
    text = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text()
    return list(map(int, text.split()))


def in_both_ways(folder: Path, parent: guard.Guard, module: str) -> tuple[str, str]:
    """Return what the rank prints that is new, and a fork that has MODULE; they end alike."""
    _, ended = forks.run(parent, order(folder))
    new = (folder / "log.0").read_text()
    assert forks.stand_by(parent, order(folder), module)[0] == "ready"
    forked, ended_forked = forks.run(parent, order(folder))
    assert (forked.is_forked, ended_forked.status) == (True, ended.status)
    return new, (folder / "log.0").read_text().removeprefix(new)


def test_ranks_are_forked_and_read_their_own_flags(folder: Path, parent: guard.Guard) -> None:
    state, own_bytes, why = forks.stand_by(parent, order(folder))
    assert (state, why) == ("ready", "")
    assert 1 << 20 < own_bytes < 1 << 30
    for rank in (1, 0):
        started, ended = forks.run(parent, order(folder, rank=rank, FLAGS_x=f"of {rank}"))
        assert started.is_forked
        assert ended.status == (os.CLD_EXITED, 0)
        assert (folder / f"log.{rank}").read_text() == NEW.format(rank, f"of {rank}", 1)
    # No more processes wait for now; the server forks more at its next turn.
    assert len(waiting(parent)) == 1
    parent.standing_by()
    assert len(waiting(parent)) == 3


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "READ_AT_IMPORT", "PYTHONHASHSEED"])
def test_a_rank_that_needs_another_value_starts_as_ever(
    folder: Path, parent: guard.Guard, name: str
) -> None:
    forks.stand_by(parent, order(folder))
    started, ended = forks.run(parent, order(folder, rank=0, **{name: "4"}))
    assert not started.is_forked
    assert started.why_not.startswith(f"{name}, which is read when Paddle is loaded, has another")
    assert ended.status == (os.CLD_EXITED, 0)
    # The others are not affected.
    assert forks.run(parent, order(folder, rank=1))[0].is_forked


def test_a_copy_of_the_environment_in_the_standard_library_is_the_ranks_own(
    folder: Path, parent: guard.Guard
) -> None:
    (folder / "fake" / "serves.py").write_text("import wsgiref.handlers")
    (folder / "tells.py").write_text(
        "import paddle, wsgiref.handlers\nprint(wsgiref.handlers.BaseHandler.os_environ['OWN'])"
    )
    assert forks.stand_by(parent, order(folder), "serves")[0] == "ready"
    assert forks.run(parent, order(folder, OWN="mine"))[0].is_forked
    assert (folder / "log.0").read_text() == "Paddle says hello\nmine\n"


@pytest.mark.parametrize(
    "copy",
    [
        "dict(os.environ)",
        "list(os.environ.items())",
        # In another form.
        "json.dumps(dict(os.environ.items()))",
        "' '.join(os.environ.values())",
        "len([1 for value in os.environ.values() if value in '12'])",
        "sorted(f'{name}={value}' for name, value in os.environ.items())",
        "['%s %s' % both for both in os.environ.items()]",
        "[name for name, value in os.environ.items() if value == '1']",
        "[int(value) for name, value in os.environ.items() if name == 'OWN']",
        "{name: ':' + value for name, value in os.environ.items()}",
        "{name: value[:9].lower() for name, value in os.environ.items()}",
        "sum(value in {'1', '2'} for _, value in os.environ.items())",
        # Used by what is written in C.
        "[name for name, value in os.environ.items() if re.match('1', value)]",
        "[name for name, value in os.environ.items() if value in 'text']",
        "[os.path.exists(value) for name, value in os.environ.items() if name == 'OWN']",
        "[(lambda: value)() for name, value in os.environ.items()]",
        "list(map(len, {name: value for name, value in os.environ.items()}.values()))",
        "0\nfor name, value in os.environ.items():\n if 'OWN' in name: break\nis_1 = value in '1'",
        "[a for a, b in os.environ.items() for name, value in os.environ.items() if value in '1']",
        "lambda: value in '1'\nfor name, value in os.environ.items(): old()",
        "0\nfor name, value in os.environ.items(): 'value' in vars() and 'text' in vars()['value']",
        "os.environb[b'OWN'] == b'1'",
        "b' '.join(value for name, value in os.environb.items())",
    ],
)
def test_a_module_that_copies_the_environment_is_named(
    folder: Path, parent: guard.Guard, copy: str
) -> None:
    (folder / "fake" / "copies.py").write_text(f"import json, os, re\nold = {copy}")
    assert forks.stand_by(parent, order(folder, OWN="1"), "copies")[0] == "ready"
    started, _ = forks.run(parent, order(folder, OWN="2"))
    assert not started.is_forked
    assert started.why_not == "OWN, which is read when copies is loaded, has another value"


def test_a_module_that_only_looks_for_its_own_variables_has_read_no_others(
    folder: Path, parent: guard.Guard
) -> None:
    # As tqdm does, which Paddle imports.
    (folder / "fake" / "seeks.py").write_text(
        "import os\nfor name, value in os.environ.items():\n"
        "    if name.startswith('SEEKS_'): is_on = bool(int(value))\ndel name, value"
    )
    assert forks.stand_by(parent, order(folder, OWN="1", SEEKS_ON="0"), "seeks")[0] == "ready"
    assert forks.run(parent, order(folder, OWN="2", SEEKS_ON="0"))[0].is_forked
    changed = order(folder, SEEKS_ON="1"), order(folder, SEEKS_ON="0", SEEKS_ALSO="1")
    for name, other in zip(("SEEKS_ON", "SEEKS_ALSO"), changed, strict=True):
        started, _ = forks.run(parent, other)
        assert started.why_not == f"{name}, which is read when seeks is loaded, has another value"


def test_another_program_starts_as_ever(folder: Path, parent: guard.Guard) -> None:
    forks.stand_by(parent, order(folder))
    wrapped = order(folder)
    started, _ = forks.run(parent, wrapped._replace(argv=("nice", *wrapped.argv)))
    assert (started.is_forked, started.why_not) == (False, "its command differs")


def test_ranks_keep_a_realtime_priority(folder: Path, parent: guard.Guard) -> None:
    try:
        os.sched_setscheduler(parent.pid, os.SCHED_RR, os.sched_param(2))
    except PermissionError:
        pytest.skip("this user has no realtime priorities")
    (folder / "tells.py").write_text(
        "import os, paddle\nprint(os.sched_getscheduler(0), os.sched_getparam(0).sched_priority)"
    )
    assert forks.stand_by(parent, order(folder))[0] == "ready"
    assert forks.run(parent, order(folder))[0].is_forked
    assert (folder / "log.0").read_text() == f"Paddle says hello\n{os.SCHED_RR} 2\n"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("starts_a_thread", "importing starts_a_thread starts 1 thread"),
        ("opens_a_device", "importing paddle, opens_a_device opens /dev/full"),
        ("fails", "fails cannot be imported in advance (ModuleNotFoundError"),
        ("exits", "exits cannot be imported in advance (SystemExit(3))"),
        ("changes_folder", "importing changes_folder changes the working folder"),
        ("changes_umask", "importing changes_umask changes the umask"),
        ("changes_limits", "importing changes_limits changes the limits"),
        ("buffers", "importing buffers changes standard output or error"),
        ("handles_a_signal", "importing handles_a_signal changes the handling of signals"),
        ("starts_a_process", "importing starts_a_process starts a process"),
        ("listens", "importing listens leaves socket:["),
        ("writes", "importing writes leaves /"),
    ],
)
def test_what_cannot_be_forked_is_not(
    folder: Path, parent: guard.Guard, module: str, why: str
) -> None:
    state, _, reason = forks.stand_by(parent, order(folder), module)
    assert state == "unfit"
    assert reason.startswith(why)
    started, ended = forks.run(parent, order(folder))
    assert (started.is_forked, started.why_not) == (False, reason)
    assert ended.status == (os.CLD_EXITED, 0)


def test_modules_that_load_when_they_are_needed_are_not_loaded(
    folder: Path, parent: guard.Guard
) -> None:
    (folder / "tells.py").write_text("import paddle, lazy, sys\nprint('fails' in sys.modules)")
    assert forks.stand_by(parent, order(folder), "lazy")[0] == "ready"
    started, ended = forks.run(parent, order(folder))
    assert (started.is_forked, ended.status) == (True, (os.CLD_EXITED, 0))


def test_a_module_may_disable_paddles_handlers_of_signals(
    folder: Path, parent: guard.Guard
) -> None:
    tells = "import signal, paddle, disables\nprint(paddle.base.core.started)\n"
    (folder / "tells.py").write_text(
        tells + "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    )
    assert forks.stand_by(parent, order(folder), "disables")[0] == "ready"
    assert forks.run(parent, order(folder, FLAGS_x="1"))[0].is_forked
    started = "['1', 'devices', 'no handlers']"
    assert (folder / "log.0").read_text() == f"Paddle says hello\n{started}\nTrue\n"


def test_a_module_that_keeps_a_file_open_to_read_is_no_obstacle(
    folder: Path, parent: guard.Guard
) -> None:
    assert forks.stand_by(parent, order(folder), "reads")[0] == "ready"
    assert forks.run(parent, order(folder))[0].is_forked


def test_a_script_that_sets_what_is_read_at_the_import_starts_again(
    folder: Path, parent: guard.Guard
) -> None:
    forks.stand_by(parent, order(folder, "OMP_NUM_THREADS"))
    started, ended = forks.run(parent, order(folder, "OMP_NUM_THREADS", FLAGS_x="x"))
    assert started.is_forked
    assert ended.status == (os.CLD_EXITED, 0)
    remark, *rest = (folder / "log.0").read_text().splitlines(keepends=True)
    assert "OMP_NUM_THREADS was set before paddle is imported" in remark
    assert "".join(rest) == NEW.format(0, "x", 2)


@pytest.mark.parametrize(
    "before",
    [
        "",
        "warnings.simplefilter('ignore')",
        "warnings.filterwarnings('ignore', module='warns')",
        "warnings.simplefilter('always')",
        "warnings.resetwarnings()",
        "sys.stderr = io.StringIO()",
        "warnings.showwarning = lambda *words: print('shown', words[0])",
        "warnings.simplefilter('error')",
    ],
)
def test_imports_warn_as_the_script_wants(folder: Path, parent: guard.Guard, before: str) -> None:
    (folder / "fake" / "warns.py").write_text(
        "import warnings\n"
        "warnings.warn('too old')\n"
        "warnings.warn('soon gone', DeprecationWarning)\n"
        "for _ in range(2): warnings.warn('slow', RuntimeWarning)\n"
        "warnings.filterwarnings('default', category=RuntimeWarning)\n"
    )
    (folder / "tells.py").write_text(
        f"import io, sys, warnings\n{before}\nimport paddle, warns\n"
        "warnings.warn('slow', RuntimeWarning)\nprint(*warnings.filters, sep='\\n')\n"
    )
    new, forked = in_both_ways(folder, parent, "warns")
    again = "fleetrun: importing paddle warns, which is an error here: this rank starts again"
    _, _, log = forked.rpartition(again)
    assert log.removeprefix(", and imports it then.\n") == new
    assert ("error" in before) == (log != new)


@pytest.mark.parametrize(
    "before",
    [
        "",
        "sys.stdout = Own('out', sys.stdout); sys.stderr = Own('error', sys.stderr)",
        "sys.stdout = io.StringIO()",
        "logging.basicConfig(level='DEBUG', format='%(levelname)s by %(name)s: %(message)s')",
        "logging.basicConfig(level='ERROR')",
        "logging.disable(); sys.stdout = Own('out', sys.stdout)",
        "logging.getLogger('talks').setLevel('INFO')",
        "logging.getLogger('talks').addFilter(lambda record: 'quiet' not in record.msg)",
    ],
)
def test_imports_print_and_log_where_the_script_wants(
    folder: Path, parent: guard.Guard, before: str
) -> None:
    (folder / "fake" / "talks.py").write_text(
        "import logging, os, sys\n"
        "print('printed', 1)\n"
        "os.write(1, b'written\\n')\n"
        "print('an error', file=sys.stderr)\n"
        "log = logging.getLogger('talks')\n"
        "for level in ('debug', 'info', 'warning', 'error'):\n"
        "    getattr(log, level)('%s of %d', level, os.getpid() > 0)\n"
        "log.warning('quiet')\n"
        "own = logging.getLogger('talks.own')\n"
        "own.addHandler(logging.StreamHandler(sys.stdout))\n"
        "own.propagate = False\n"
        "own.warning('by its own')\n"
        "sys.stdout.writelines(['several\\n', 'lines\\n'])\n"
    )
    (folder / "tells.py").write_text(
        "import io, logging, sys\n"
        "class Own:\n"
        "    def __init__(self, name, file): self.name, self.file = name, file\n"
        "    def write(self, text): return self.file.write(self.name + ' ' + text)\n"
        "    def writelines(self, lines): [*map(self.write, lines)]\n"
        "    def flush(self): self.file.flush()\n"
        f"{before}\nimport paddle, talks\n"
        "print('done')\n"
        "if isinstance(sys.stdout, io.StringIO): sys.__stdout__.write(sys.stdout.getvalue())\n"
    )
    new, forked = in_both_ways(folder, parent, "talks")
    assert forked == new


def test_a_lost_waiting_process_fails_no_rank(folder: Path, parent: guard.Guard) -> None:
    forks.stand_by(parent, order(folder))
    server, first, second = waiting(parent)
    os.kill(server, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    # Waiting processes may be used all the same.
    started, _ = forks.run(parent, order(folder))
    assert (started.is_forked, started.pid) == (True, second)
    started, ended = forks.run(parent, order(folder))
    assert (started.is_forked, started.why_not) == (False, "the waiting processes are gone")
    assert ended.status == (os.CLD_EXITED, 0)
    assert waiting(parent) == []


@pytest.mark.parametrize("stopped", [slice(1, 3), slice(0, 3)])
def test_stopped_waiting_processes_delay_no_rank(
    folder: Path, parent: guard.Guard, stopped: slice
) -> None:
    forks.stand_by(parent, order(folder))
    server, *parked = waiting(parent)
    for pid in [server, *parked][stopped]:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    started, ended = forks.run(parent, order(folder))
    # It may take twenty seconds until one that is not stopped answers.
    assert time.monotonic() - began < 15
    assert (started.is_forked, started.why_not) == (False, "the waiting processes are gone")
    assert ended.status == (os.CLD_EXITED, 0)
    # If the server is not stopped, it makes new ones.
    assert parent.standing_by()[0] == ("unfit" if stopped.start == 0 else "ready")
    assert set(waiting(parent)).isdisjoint([server, *parked][stopped])


@pytest.mark.parametrize(
    # How many forks of the server itself, and of the process in between, succeed.
    ("in_server", "in_between", "forked"),
    [(0, 9, [False, False, False]), (1, 9, [True, True, False]), (9, 1, [True, True, True])],
)
def test_where_no_more_processes_are_allowed_ranks_start_as_ever(
    folder: Path, parent: guard.Guard, in_server: int, in_between: int, forked: list[bool]
) -> None:
    # As a limit of processes does, which root has not.
    (folder / "fake" / "limited.py").write_text(
        "import os\nreal, server, calls = os.fork, os.getpid(), {}\n"
        "def fork():\n"
        "    pid = os.getpid()\n"
        "    calls[pid] = calls.get(pid, 0) + 1\n"
        f"    if calls[pid] > ({in_server} if pid == server else {in_between}):\n"
        "        raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return real()\n"
        "os.fork = fork\n"
    )
    forks.stand_by(parent, order(folder), "limited")
    for rank, is_forked in enumerate(forked):
        started, ended = forks.run(parent, order(folder, rank=rank))
        assert (started.is_forked, ended.status) == (is_forked, (os.CLD_EXITED, 0))
        assert is_forked or "the waiting processes are gone" in started.why_not
        if rank == 1:
            parent.standing_by()


def test_when_all_ranks_are_killed_those_who_wait_live_on(
    folder: Path, parent: guard.Guard
) -> None:
    forks.stand_by(parent, order(folder))
    waiting_before = waiting(parent)
    # As when a launcher gathers hosts for longer than others wait for its heartbeat.
    parent.kill_at(time.monotonic())
    started, ended = forks.run(parent, order(folder))
    assert (started.is_forked, ended.status) == (True, (os.CLD_EXITED, 0))
    assert waiting(parent) == [pid for pid in waiting_before if pid != started.pid]


def test_who_waits_ends_with_the_guard(folder: Path, parent: guard.Guard) -> None:
    forks.stand_by(parent, order(folder))
    pidfds = [os.pidfd_open(pid) for pid in waiting(parent)]
    assert len(pidfds) == 3
    os.kill(parent.pid, signal.SIGKILL)
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], LONG_S)[0]
        os.close(pidfd)
    started, ended = forks.run(parent, order(folder))
    assert (started.is_forked, started.why_not) == (False, "its guard was killed")
    assert ended.status == (os.CLD_EXITED, 0)


def test_a_guard_that_was_dismissed_was_not_killed(folder: Path, parent: guard.Guard) -> None:
    forks.stand_by(parent, order(folder))
    parent.retire()
    assert parent.standing_by() == ("unfit", 0, "the job is over")
