"""The config file: options as `option: value` lines of YAML, with the user's own as defaults."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from fleetrun import argv, gone, options
from fleetrun.errors import UsageError
from fleetrun.options import Option, RawOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yaml import Node

DEFAULT = "fleetrun.yaml"
# The section that `fleetrun submit` reads.
SUBMIT = "submit"


class Config(NamedTuple):
    """A config file: its path, and its settings.

    If the user has one, too, BENEATH is its path; the settings include those that only it has.
    """

    path: str | None
    settings: tuple[RawOption, ...]
    beneath: str | None = None


def named(settings: Iterable[RawOption]) -> str | None:
    """Return the file that --config names in SETTINGS."""
    paths = [setting.raw for setting in settings if setting.option.name == "config" and setting.raw]
    return paths[-1] if paths else None


def find(parsed: argv.ParsedCommand, environ: Mapping[str, str]) -> Config | None:
    """Return the config file that PARSED names, or the one here, on top of the user's."""
    path = named(parsed.settings)
    if path is None and os.path.exists(DEFAULT):
        path = DEFAULT
    own = of_user(environ)
    above = None if path is None else read(path)
    if own is None:
        return above
    chosen = () if above is None else above.settings
    settled = {setting.option.target for setting in chosen if setting.option.kind != "pairs"}
    beneath = read(own).settings
    added = [setting for setting in beneath if setting.option.target not in settled]
    return Config(path, (*added, *chosen), own)


def of_user(environ: Mapping[str, str]) -> str | None:
    """Return the user's own config file, if there is one."""
    folder, home = environ.get("XDG_CONFIG_HOME", ""), environ.get("HOME", "")
    if not folder.startswith("/"):
        folder = f"{home}/.config" if home.startswith("/") else ""
    path = f"{folder}/fleetrun/{DEFAULT}"
    return path if folder and os.path.exists(path) else None


def read(path: str) -> Config:
    """Read the config file at PATH; UsageError with file:line if it is invalid."""
    return Config(path, tuple(_read_entries(_mapping(path), path, options.by_name())))


def of_command(path: str, command: str, rows: Mapping[str, Option]) -> Iterable[RawOption]:
    """Read the options ROWS of `fleetrun submit COMMAND` in the config file at PATH."""
    return _read_entries(_mapping(path, (SUBMIT, command)), path, rows, command)


def _mapping(path: str, keys: Iterable[str] = ()) -> Sequence[tuple[Node, Node]]:
    """Return the entries of the config file at PATH, or of the mapping below KEYS in it."""
    from yaml import MappingNode  # only imported for a config file

    from fleetrun import yamlfile

    with yamlfile.loading(yamlfile.text_of(path, "this config file"), path) as loader:
        node = loader.get_single_node()
    for key in keys:
        entries = node.value if isinstance(node, MappingNode) else ()
        node = next((value for name, value in entries if name.value == key), None)
    if node is None:
        return ()
    if not isinstance(node, MappingNode):
        raise UsageError(f"{path}:{node.start_mark.line + 1}: write one `option: value` a line.")
    pairs: Sequence[tuple[Node, Node]] = node.value
    return pairs


def _read_entries(
    entries: Iterable[tuple[Node, Node]], path: str, rows: Mapping[str, Option], command: str = ""
) -> Iterable[RawOption]:
    """Read each line of the file as one of ROWS, the options of a launch or of COMMAND."""
    lines: dict[str, int] = {}
    for key, node in entries:
        line = key.start_mark.line + 1
        where = f"{path}:{line}"
        typed = str(key.value)
        if typed == SUBMIT and not command:
            continue
        name = typed.replace("-", "_")
        option = rows.get(name) or (None if command else options.of_kind(name))
        if option is None:
            gone.refuse(name, f"{where}: {typed}")
            known = [name for name, row in rows.items() if row.in_file]
            of = f" of {command}" if command else ""
            ending = argv.suggest(typed, known, prefix="")
            raise UsageError(f"{where}: no such option{of}: {typed}{ending}")
        if not option.in_file:
            raise UsageError(f"{where}: {typed} belongs on the command line.")
        if option.target in lines:
            raise UsageError(f"{where}: {typed} is already set in line {lines[option.target]}.")
        lines[option.target] = line
        for raw, at in _read_values(option, node, where):
            home = options.at_home(option, raw, f"{path}:{at}: {typed}")
            setting = RawOption(option, home, typed, f"{path}:{at}")
            if not option.reason:
                setting.value()
            # Arguments and paths cannot hold NUL; request checks variables.
            if "\0" in raw and option.kind != "pairs":
                raise UsageError(f"{path}:{at}: {typed} contains a NUL character; remove it.")
            if raw.strip():
                yield setting


def _read_values(option: Option, node: Node, where: str) -> Iterable[tuple[str, int]]:
    """Yield the texts that NODE stands for on the command line, each with its line."""
    from yaml import MappingNode, ScalarNode, SequenceNode

    from fleetrun import yamlfile

    match node:
        case ScalarNode():
            if not yamlfile.is_null(node):
                yield node.value, node.start_mark.line + 1
        case MappingNode() if option.kind in options.REPEATABLE:
            for key, value in node.value:
                pair = f"{_scalar(key, where, option)}={_scalar(value, where, option)}"
                yield pair, key.start_mark.line + 1
        case SequenceNode() if option.kind in options.REPEATABLE:
            for item in node.value:
                yield _scalar(item, where, option), item.start_mark.line + 1
        case SequenceNode() if option.kind == "list":
            texts = [_scalar(item, where, option) for item in node.value]
            yield ",".join(texts), node.start_mark.line + 1
        case _:
            kind = "a list" if isinstance(node, SequenceNode) else "a mapping"
            problem = f"{kind} does not fit: {options.wanted(option)}"
            raise UsageError(f"{where}: {option.name}: {problem}")


def _scalar(node: Node, where: str, option: Option) -> str:
    """Return NODE's text; UsageError if it is a list or a mapping."""
    from yaml import ScalarNode

    from fleetrun import yamlfile

    if not isinstance(node, ScalarNode):
        raise UsageError(f"{where}: {option.name}: give plain values: {options.wanted(option)}")
    return "" if yamlfile.is_null(node) else str(node.value)
