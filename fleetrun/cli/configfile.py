"""The config file: options as `option: value` lines of YAML, one a line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from fleetrun import yamlfile
from fleetrun.cli import elsewhere
from fleetrun.cli.option import Option
from fleetrun.cli.options import BY_SPELLING
from fleetrun.errors import UsageError
from fleetrun.model import Given

if TYPE_CHECKING:  # most launches have no such file
    from yaml import Node

_DEFAULT = "fleetrun.yaml"
# Options for one launch. By ssh, each host would start the others again.
_NOT_HERE = ("config", "detach", "dry_run", "help", "hostfile", "hosts", "version")


class Config(NamedTuple):
    """The config file: its path (None: there is none), and the options that it gives."""

    path: str | None = None
    given: tuple[Given, ...] = ()


def find(given: Iterable[Given]) -> Config:
    """Return the file that --config names in GIVEN, or else that of this folder, if it exists."""
    named = [item.raw for item in given if item.name == "config"]
    path = named[-1] if named else _DEFAULT if os.path.exists(_DEFAULT) else None
    return read(path) if path else Config()


def read(path: str) -> Config:
    """Read the config file at PATH; UsageError with file:line if it is invalid."""
    return Config(path, tuple(_entries(path)))


def _entries(path: str) -> Iterator[Given]:
    from yaml import MappingNode, ScalarNode

    with yamlfile.loading(yamlfile.text_of(path, "this config file"), path) as loader:
        node = loader.get_single_node()
    is_map = node is None or isinstance(node, MappingNode)
    for key, value in () if node is None else node.value if is_map else [(node, node)]:
        where, typed = f"{path}:{key.start_mark.line + 1}", str(key.value)
        if not is_map or not isinstance(key, ScalarNode):
            raise UsageError(f"{where}: write one `option: value` a line.")
        option = BY_SPELLING.get(name := typed.replace("-", "_"))
        if option is None:
            elsewhere.refuse_gone(name, f"{where}: {typed}")
            ending = elsewhere.suggest(typed, BY_SPELLING, "")
            raise UsageError(f"{where}: no such option: {typed}{ending}")
        if option.label in _NOT_HERE:
            raise UsageError(f"{where}: {typed} belongs on the command line.")
        for raw, line in _values(option, value, f"{where}: {typed}"):
            given = option.given(raw, typed, f"{path}:{line}", name)
            if not option.reason:
                option.read(given)
            yield given


def _values(option: Option, node: Node, where: str) -> Iterator[tuple[str, int]]:
    """Yield the texts that NODE stands for on the command line, each with its line."""
    from yaml import MappingNode, ScalarNode, SequenceNode

    def text(item: Node) -> str:
        # Arguments and paths cannot hold NUL.
        if not isinstance(item, ScalarNode) or "\0" in item.value:
            raise UsageError(f"{where}: give plain values: {option.wanted}")
        return "" if item.tag.endswith(":null") else str(item.value)

    if isinstance(node, MappingNode) and option.is_repeatable:
        for key, value in node.value:
            yield f"{text(key)}={text(value)}", key.start_mark.line + 1
    elif isinstance(node, SequenceNode) and option.is_repeatable:
        for item in node.value:
            yield text(item), item.start_mark.line + 1
    elif isinstance(node, SequenceNode) and option.kind.name == "list":
        yield ",".join(map(text, node.value)), node.start_mark.line + 1
    elif text(node).strip():
        yield text(node), node.start_mark.line + 1
