"""The report names a child of a rank that a signal has killed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import Command
from training import PYTHONS

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADER = """
import os, signal, time
import numpy
import paddle
from paddle.io import DataLoader, Dataset, get_worker_info
paddle.set_device("cpu")
class Samples(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 20:
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return numpy.full([4], index, "float32")
WITHOUT_HANDLER
for _ in DataLoader(Samples(), batch_size=1, num_workers=2):
    pass
"""
# As in threads other than the main one: the thread that reads the workers' results notices first.
WITHOUT_HANDLER = """
import paddle.io.dataloader.dataloader_iter as dataloader
dataloader._set_SIGCHLD_handler = lambda: None
"""
HOG = """
import multiprocessing
def hog():
    hoard = bytearray(1 << 30)
    for place in range(0, len(hoard), 4096):
        hoard[place] = 1
child = multiprocessing.Process(target=hog)
child.start()
child.join()
raise RuntimeError(f"no data from {child.pid}")
"""


@pytest.mark.train
@pytest.mark.parametrize("handler", ["", WITHOUT_HANDLER], ids=["main", "reader"])
@pytest.mark.parametrize("paddle", PYTHONS)
def test_a_killed_worker_of_a_data_loader_is_named(
    tmp_path: Path, paddle: str, handler: str
) -> None:
    code = LOADER.replace("WITHOUT_HANDLER", handler)
    command = Command.python(tmp_path, code, ranks=1)
    command.argv[0] = str(PYTHONS[paddle])
    done = command.run(env={"PYTHONPATH": str(ROOT)})
    assert done.code == 1, done.stderr
    pid = (tmp_path / "pid").read_text()
    assert f"Process {pid}, which it had started, was killed by SIGKILL (" in done.stderr


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Return a memory cgroup (version 1 or 2) that holds no more than 256 MiB."""
    for top, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        folder = Path("/sys/fs/cgroup", top, f"fleetrun-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(256 << 20))
            yield folder
        except OSError:
            continue
        finally:
            folder.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


def test_the_out_of_memory_killer_of_a_child_is_named(tmp_path: Path, small_cgroup: Path) -> None:
    command = Command.python(tmp_path, HOG, ranks=1)
    enter = f'echo $$ >{small_cgroup}/cgroup.procs; exec "$@"'
    command.argv[:0] = ["sh", "-c", enter, "sh"]
    done = command.run()
    pid = re.search(r"no data from (\d+)", done.out.decode() + done.stderr)
    assert pid is not None, done.stderr
    assert f"Process {pid[1]}, which it had started, was killed by SIGKILL (" in done.stderr
    assert "The kernel's out-of-memory killer did it" in done.stderr
