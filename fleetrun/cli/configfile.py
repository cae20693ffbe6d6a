"""The config file: options as `option: value` lines of YAML, one a line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fleetrun import yamlfile
from fleetrun.cli import elsewhere
from fleetrun.cli.option import Option
from fleetrun.cli.options import BY_SPELLING
from fleetrun.errors import UsageError
from fleetrun.model import Given

if TYPE_CHECKING:  # most launches have no such file
    from yaml import Node

DEFAULT = "fleetrun.yaml"
# The section that `fleetrun submit` reads.
SUBMIT = "submit"


class Config(NamedTuple):
    """The config file: its path (None: there is none), and the options that it gives."""

    path: str | None = None
    given: tuple[Given, ...] = ()


NONE = Config()


def here(given: Iterable[Given]) -> str | None:
    """Return the file that --config names in GIVEN, or else that of this folder, if it exists."""
    named = [item.raw for item in given if item.name == "config"]
    return named[-1] if named else DEFAULT if os.path.exists(DEFAULT) else None


def find(given: Iterable[Given]) -> Config:
    """Return the config file that GIVEN names, or the one here, if there is one."""
    path = here(given)
    return read(path) if path else NONE


def read(path: str) -> Config:
    """Read the config file at PATH; UsageError with file:line if it is invalid."""
    return Config(path, tuple(_entries(path, BY_SPELLING)))


def of_command(path: str, command: str, options: Mapping[str, Option]) -> Iterator[Given]:
    """Read the OPTIONS of `fleetrun submit COMMAND` in the config file at PATH."""
    return _entries(path, options, SUBMIT, command)


def _entries(path: str, options: Mapping[str, Option], *section: str) -> Iterator[Given]:
    """Read each line of SECTION of the file at PATH as one of OPTIONS."""
    lines: dict[str, int] = {}
    for key, node in _mapping(path, section):
        line, typed = key.start_mark.line + 1, str(key.value)
        if typed == SUBMIT and not section:
            continue
        where, name = f"{path}:{line}", typed.replace("-", "_")
        option = options.get(name)
        if option is None:
            elsewhere.refuse_gone(name, f"{where}: {typed}")
            of = f" of {section[-1]}" if section else ""
            ending = elsewhere.suggest(typed, options, "")
            raise UsageError(f"{where}: no such option{of}: {typed}{ending}")
        if not option.in_file:
            raise UsageError(f"{where}: {typed} belongs on the command line.")
        if lines.setdefault(option.label, line) != line:
            raise UsageError(f"{where}: {typed} is already set in line {lines[option.label]}.")
        for raw, at in _values(option, node, f"{where}: {typed}"):
            given = option.given(raw, typed, f"{path}:{at}", name)
            if not option.reason:
                option.read(given)
            yield given


def _mapping(path: str, keys: Iterable[str]) -> Sequence[tuple[Node, Node]]:
    """Return the entries of the config file at PATH, or of the mapping below KEYS in it."""
    from yaml import MappingNode

    with yamlfile.loading(yamlfile.text_of(path, "this config file"), path) as loader:
        node = loader.get_single_node()
    for key in keys:
        entries = node.value if isinstance(node, MappingNode) else ()
        node = next((value for name, value in entries if name.value == key), None)
    if node is not None and not isinstance(node, MappingNode):
        raise UsageError(f"{path}:{node.start_mark.line + 1}: write one `option: value` a line.")
    pairs: Sequence[tuple[Node, Node]] = () if node is None else node.value
    return pairs


def _values(option: Option, node: Node, where: str) -> Iterator[tuple[str, int]]:
    """Yield the texts that NODE stands for on the command line, each with its line."""
    from yaml import MappingNode, ScalarNode, SequenceNode

    def text(item: Node) -> str:
        if not isinstance(item, ScalarNode):
            raise UsageError(f"{where}: give plain values: {option.wanted}")
        return "" if item.tag.endswith(":null") else str(item.value)

    line = node.start_mark.line + 1
    if isinstance(node, MappingNode) and option.is_repeatable:
        for key, value in node.value:
            yield f"{text(key)}={text(value)}", key.start_mark.line + 1
    elif isinstance(node, SequenceNode) and option.is_repeatable:
        for item in node.value:
            yield text(item), item.start_mark.line + 1
    elif isinstance(node, SequenceNode) and option.kind.name == "list":
        yield ",".join(map(text, node.value)), line
    elif text(node).strip():
        yield text(node), line
