"""The house keeps its floors: who may import whom, and what a plain launch may not load."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "fleetrun"

# From the ground up. A module may import from floors below its own and from its own; the longest
# name that fits counts. A new room must be put on a floor here.
FLOORS = (
    # The entrance runs in other programs' Pythons, and imports nothing.
    ("fleetrun.errors", "fleetrun.text", "fleetrun.entrance"),
    ("fleetrun.model", "fleetrun.printing", "fleetrun.rundir.variables", "fleetrun.run.events"),
    # Names, schemas, writers and readers of what a run leaves; /proc and the system's own calls.
    (
        "fleetrun.rundir",
        "fleetrun.run.libc",
        "fleetrun.run.loop",
        "fleetrun.run.proc",
    ),
    (
        "fleetrun.plan",
        # It also resolves the strategy, whose fields are options.
        "fleetrun.plan.planner",
        "fleetrun.run.policy",
        "fleetrun.cli",
        # Pure, unlike the engines beside them: variables to options.
        "fleetrun.engines.detect",
        "fleetrun.engines.cluster",
        "fleetrun.yamlfile",
        "fleetrun.strategy",
    ),
    # What of run/ is not named elsewhere is a tool of the supervisor, and does one thing.
    (
        "fleetrun.engines",
        "fleetrun.postmortem",
        "fleetrun.run",
        "fleetrun.host",
        "fleetrun.session",
    ),
    ("fleetrun.sinks", "fleetrun.watch", "fleetrun.run.supervisor"),
    ("fleetrun.run.job", "fleetrun.doctor", "fleetrun.remote"),
    (
        "fleetrun.cli.app",
        "fleetrun.cli.help",
        "fleetrun.cli.shells",
        "fleetrun.cli.parser",
        "fleetrun.commands",
        "fleetrun.api",
        "fleetrun.__main__",
    ),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The packages themselves hold a docstring and a version at most, so they may stand anywhere.
BARE = ("fleetrun", "fleetrun.postmortem", "fleetrun.rundir", "fleetrun.run")
# It runs inside the training process and is linked to the rest by names and files alone.
ISLAND = "fleetrun.inject"

# Where a package from outside may be imported at all, and whether only inside functions.
OUTSIDE = {
    "pynvml": ("fleetrun.host.nvml",),
    "rich": ("fleetrun.sinks", "fleetrun.commands"),
    "prometheus_client": ("fleetrun.sinks.metrics",),
    "paddle": (ISLAND, "fleetrun.commands"),
    "numpy": (ISLAND,),
}
ONLY_IN_FUNCTIONS = {"pynvml", "prometheus_client", "paddle", "numpy"}
# A launch never loads these at all, so they may import at their top.
LATER = ("fleetrun.commands",)
# What no launch loads that was not asked for it.
HEAVY = (*OUTSIDE, "etcd3", "torch", "psutil")

# Decide, then do: these rooms and modules are given what they need to know and touch nothing.
PURE = (
    "fleetrun.model",
    "fleetrun.errors",
    "fleetrun.plan",
    "fleetrun.engines.cluster",
    "fleetrun.engines.detect",
    "fleetrun.run.events",
    "fleetrun.run.policy",
    "fleetrun.session.coordinator",
    "fleetrun.session.messages",
    "fleetrun.session.rank_assignment",
    "fleetrun.strategy.fields",
    "fleetrun.strategy.explanation",
    "fleetrun.strategy.resolve",
    "fleetrun.strategy.document",
)
_WORLD = """
ctypes fcntl glob io multiprocessing pathlib platform random select selectors shutil signal
socket subprocess sys tempfile threading time urllib
"""
WORLD = frozenset(_WORLD.split())


class Import(NamedTuple):
    """One imported name: by whom, in which line, and whether only when a function runs."""

    by: str
    line: int
    target: str
    in_function: bool
    for_types: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(HOUSE.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    """Return what the module NAME says, which several tests ask."""
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports_of(name: str, path: Path) -> list[Import]:
    imported: list[Import] = []

    def visit(node: ast.AST, *, in_function: bool, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            # No import is within an expression, and most of a tree is expressions.
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                continue
            types = for_types or (
                isinstance(child, ast.If)
                and isinstance(child.test, ast.Name)
                and child.test.id == "TYPE_CHECKING"
            )
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Import | ast.ImportFrom):
                imported.extend(
                    Import(name, child.lineno, target, inside, types) for target in targets(child)
                )
            visit(child, in_function=inside, for_types=types)

    def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        # `from fleetrun import probe` imports a module, `from fleetrun.model import Rank` a name.
        return [
            f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
            for alias in node.names
        ]

    visit(tree(name), in_function=False, for_types=False)
    return imported


@cache
def imports() -> list[Import]:
    """Return all imports of the house; not when tests are collected, which every worker does."""
    return [imported for name, path in MODULES.items() for imported in imports_of(name, path)]


def within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


@cache
def room(name: str) -> str:
    """Return the longest room that holds module NAME."""
    rooms = [room for room in FLOOR_OF if within(name, (room,))]
    assert rooms, f"{name} stands on no floor; give it one in FLOORS of tests/test_floors.py"
    return max(rooms, key=len)


def floor(name: str) -> int:
    """Return the floor of module NAME."""
    return FLOOR_OF[room(name)]


def show(breaches: list[Import]) -> str:
    return "\n".join(
        f"{breach.by} line {breach.line} imports {breach.target}" for breach in breaches
    )


def test_every_module_stands_on_a_floor() -> None:
    for name in MODULES:
        if name not in BARE and not within(name, (ISLAND,)):
            floor(name)


def test_nobody_imports_from_a_floor_above() -> None:
    breaches = [
        edge
        for edge in imports()
        if within(edge.target, ("fleetrun",))
        and edge.target not in BARE
        and not within(edge.by, (ISLAND,))
        and not within(edge.target, (ISLAND,))
        and (edge.by in BARE or floor(edge.target) > floor(edge.by))
    ]
    assert not breaches, show(breaches)


def test_the_island_is_linked_to_nobody() -> None:
    breaches = [
        imported
        for imported in imports()
        if within(imported.target, ("fleetrun",))
        and within(imported.by, (ISLAND,)) != within(imported.target, (ISLAND,))
    ]
    assert not breaches, show(breaches)


def circle(edges: set[tuple[str, str]]) -> list[str]:
    """Return names that import each other in a circle, if any do."""
    graph: dict[str, set[str]] = {}
    for by, target in edges:
        graph.setdefault(by, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@cache
def edges() -> set[tuple[str, str]]:
    return {
        (imported.by, imported.target)
        for imported in imports()
        if imported.target in MODULES and imported.by != imported.target
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(edges()) == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    # Those of different floors cannot.
    apart = {
        (room(by), room(target))
        for by, target in edges()
        if not within(by, (ISLAND,)) and by not in BARE and target not in BARE
    }
    assert circle({edge for edge in apart if edge[0] != edge[1]}) == []


@pytest.mark.parametrize("package", sorted(OUTSIDE))
def test_packages_from_outside_are_imported_where_they_belong(package: str) -> None:
    breaches = [
        edge
        for edge in imports()
        if within(edge.target, (package,))
        and (
            not within(edge.by, OUTSIDE[package])
            or (
                package in ONLY_IN_FUNCTIONS
                and not (edge.in_function or edge.for_types or within(edge.by, LATER))
            )
        )
    ]
    assert not breaches, show(breaches)


def test_what_decides_touches_nothing() -> None:
    assert MODULES.keys() >= {*PURE}
    breaches = [
        edge
        for edge in imports()
        if within(edge.by, PURE) and edge.target.partition(".")[0] in WORLD and not edge.for_types
        # It names signals.
        if (edge.by, edge.target) != ("fleetrun.run.events", "signal")
    ]
    assert not breaches, show(breaches)


def test_every_tool_is_told_the_oldest_python_that_we_promise() -> None:
    # Else what only newer ones have, such as typing.assert_never, goes unseen.
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = {
        name: re.findall(rf'(?m)^{name} = "\D*(\d)\.?(\d+)"', project)
        for name in ("requires-python", "target-version", "python_version")
    }
    assert versions == {key: [("3", "10")] for key in versions}


def test_a_launch_loads_neither_paddle_nor_what_is_as_heavy(tmp_path: Path) -> None:
    # The rank is no Python, so every line that -X importtime writes is the launcher's.
    words = ("--nproc_per_node=1", "--device_kind=cpu", f"--log_dir={tmp_path / 'log'}")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fleetrun", *words, "/bin/true"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines()}
    assert "fleetrun.run.job" in loaded
    heavy = {name for name in loaded if within(name, HEAVY)}
    assert not heavy, f"a launch loads {sorted(heavy)}"
