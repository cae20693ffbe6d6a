"""The table of Paddle's private names lists the names that `inject` uses, and no others."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from freezing import frozen

from fleetrun import inject
from fleetrun.inject.paddle_api import private_names

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(inject.__file__).parent
# Names with an underscore that are Python's or our own.
NOT_PADDLES = {
    "sys._getframe",
    "os._exit",
    "atexit._run_exitfuncs",
    # Methods of a NamedTuple.
    "spec._replace",
    "outcome._replace",
    "row._replace",
    "StaticRanks._instances",
}
# Strings with an underscore that are not names of Paddle: parts of names, and Python's names.
NO_NAMES = {"_", "_Distributed", "_configs", "_initializing", "_degree"}
NO_NAMES |= {"_parallel_group", "_parallel_world_size"}
# Everything in these modules is private, even without an underscore.
PRIVATE_MODULE = re.compile(r"(paddle\.base|core|_core\(\)|eager)\.")
MODULES = {
    "paddle.base.core",
    "paddle.base.core.eager",
    "paddle.base.data_feeder",
    "paddle.base.dygraph",
    "paddle.base.dygraph.base",
    "paddle.base.framework",
    "paddle.base.layer_helper",
    "core.eager",
    "_core().eager",
}


@cache
def sources() -> tuple[tuple[str, ast.AST], ...]:
    """Return the path and the code of each module that imports Paddle, without the table."""
    with frozen():
        return tuple(
            (str(path.relative_to(ROOT)), ast.parse(path.read_text()))
            for path in sorted(ROOT.rglob("*.py"))
            if path.name != "private_names.py" and path.parent.name != "site"
        )


def spelled_by(node: ast.AST) -> Iterator[str]:
    """Yield the private names of Paddle that NODE spells."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return
        case ast.Attribute(attr=attribute):
            text = ast.unparse(node)
            if text not in NOT_PADDLES | MODULES and (
                is_private(attribute) or PRIVATE_MODULE.match(text)
            ):
                yield attribute
        case ast.Constant(value=str(text)):
            if text.isidentifier() and is_private(text) and text not in NO_NAMES:
                yield text
        case ast.ImportFrom(module=str(module), names=several):
            inner = module.startswith(("paddle.base.", "paddle.framework"))
            yield from (
                alias.name
                for alias in several
                if (inner or (module.startswith("paddle") and is_private(alias.name)))
            )


def is_private(name: str) -> bool:
    """Whether NAME is private to Paddle; names with the prefix `fleetrun` are not."""
    return name.startswith("_") and not name.startswith(("__", "_fleetrun"))


def parts(name: private_names.PrivateName) -> set[str]:
    """Return every name in the row NAME."""
    return {*re.split(r"[.|]", name.path), *name.attributes}


def test_every_private_name_that_is_used_is_in_the_table() -> None:
    known = {part for name in private_names.NAMES for part in parts(name)}
    unknown = [
        f"{path}:{getattr(node, 'lineno', 0)}: {spelled}"
        for path, tree in sources()
        for node in ast.walk(tree)
        for spelled in spelled_by(node)
        if spelled not in known
    ]
    assert not unknown, "\n".join(unknown)


def test_every_name_of_the_table_is_used() -> None:
    spelled: set[str] = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                    spelled.add(name)
                case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                    spelled.add(name)
                case ast.ImportFrom(names=several):
                    spelled.update(alias.name for alias in several)
    stale = [
        f"{name}: {part}"
        for name in private_names.NAMES
        # A function that is not called may be listed for the attributes that it sets.
        for part in (name.attributes or (name.path.rpartition(".")[2],))
        if spelled.isdisjoint(part.split("|"))
    ]
    assert not stale, "\n".join(stale)


def test_no_row_of_the_table_is_there_twice() -> None:
    names = [str(name) for name in private_names.NAMES]
    assert len(names) == len(set(names))


def test_a_capability_of_the_table_has_a_fallback() -> None:
    used = {capability for name in private_names.NAMES for capability in name.capabilities}
    assert used == set(private_names.FALLBACKS)
