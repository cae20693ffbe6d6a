"""Hosts detect whether they share a log folder, and leave no traces of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.session.messages import JoinRequest
from fleetrun.session.sharing import LogFolder

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHERS = [f"{number:016x}" for number in range(4)]


def folders(*paths: Path) -> list[LogFolder]:
    made = [
        LogFolder(str(path), launcher) for path, launcher in zip(paths, LAUNCHERS, strict=False)
    ]
    for folder in made:
        folder.announce()
    return made


def entries(*numbers: int) -> tuple[JoinRequest, ...]:
    """Return a roster's hosts with these NUMBERS."""
    return tuple(
        JoinRequest("", "node", 1, (), (), launcher=LAUNCHERS[n], run=f"2026-default-{n}")
        for n in numbers
    )


def test_hosts_with_folders_of_their_own_keep_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = folders(tmp_path / "a", tmp_path / "b", tmp_path / "file")
    assert [folder.look(entries(0, 1, 2), 0) for folder in made] == [None, None, None]
    for folder in made:
        folder.settle(has_begun=True)
    assert not list(tmp_path.rglob(".host-*"))


def test_folders_keep_their_names_when_ranks_change_and_newcomers_get_others(
    tmp_path: Path,
) -> None:
    first, second, third = folders(*[tmp_path] * 3)
    for folder in (first, second, third):
        folder.look(entries(0, 1, 2), 0)
        folder.settle(has_begun=True)
    # The second host is lost, the third takes its place, and another one joins.
    newcomer = LogFolder(str(tmp_path), LAUNCHERS[3])
    newcomer.announce()
    now = entries(0, 2, 3)
    told, same, new = (folder.look(now, 1) for folder in (first, third, newcomer))
    assert told is not None
    assert told.folders == {1: "node2", 2: "node2.1"}
    assert same is not None
    assert same.own == "node2"
    assert new is not None
    assert (new.own, new.run_name) == ("node2.1", "2026-default-0")


def test_a_job_that_does_not_begin_leaves_no_folder(tmp_path: Path) -> None:
    (folder,) = folders(tmp_path / "deep" / "log")
    folder.settle(has_begun=False)
    assert not (tmp_path / "deep" / "log").exists()
