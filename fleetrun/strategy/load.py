"""Reads strategies: presets, YAML files and --set, checked against the table of fields."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import normalize

from fleetrun import yamlfile
from fleetrun.errors import UsageError
from fleetrun.model import (
    VARIABLE_SECTIONS,
    FieldSetting,
    FieldValue,
    Given,
    Layer,
    Setting,
    Strategy,
)
from fleetrun.strategy import fields
from fleetrun.strategy.fields import Field
from fleetrun.text import closest, suggestion

if TYPE_CHECKING:
    from yaml import Node, SafeLoader


# The purpose of each preset; the one to begin with comes first.
PRESETS = {
    "recommended": "fewer allreduces, overlapped with the backward pass; same results",
    "comm_fusion": "send many small gradients in one allreduce",
    "compute_fusion": "fuse small operators (static graphs)",
    "overlap": "send gradients while the backward pass still runs",
    "hierarchical_allreduce": "sum within each host first, then among the hosts",
    "gradient_merge": "one update for several backward passes, as with a larger batch",
    "amp": "compute in 16 bits where that is safe, with a scaled loss",
    "resnet50_32gpu": "ResNet50 on 4 hosts with 8 GPUs each, as in Paddle's documentation",
}
SET = "--set"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# YAML's tag of the key <<.
_MERGE = "tag:yaml.org,2002:merge"


class NamedStrategy(NamedTuple):
    """One preset or file, and where it was requested."""

    name: str
    given: Given


def names(raw_options: Iterable[Given]) -> list[NamedStrategy]:
    """Return the names in RAW_OPTIONS, separated by commas, or by colons in a variable."""
    named = []
    for option in raw_options:
        raw = option.raw.replace(":", ",") if option.source.startswith("$") else option.raw
        named += [NamedStrategy(name.strip(), option) for name in raw.split(",") if name.strip()]
    return named


def requested(requests: Iterable[NamedStrategy], sets: Iterable[Given]) -> Strategy:
    """Combine REQUESTS and SETS."""
    return combine(list(map(_read, requests)), [_set(option) for option in sets])


def _read(request: NamedStrategy) -> Layer:
    try:
        find(request.name)
    except UsageError as error:
        option = request.given._replace(raw=request.name)
        plain = normalize("NFKC", request.name)
        wide = plain != request.name
        problem = f"it has full-width characters: write {plain}." if wide else str(error)
        raise UsageError(option.blame(problem)) from None
    layer, faults = checked(request.name)
    if faults:
        raise UsageError(*map(str, faults))
    assert layer is not None
    return layer


def checked(name: str) -> tuple[Layer | None, list[UsageError]]:
    """Read NAME as far as possible; return its layer, and its errors by line."""
    faults: list[UsageError] = []
    try:
        return read(name, faults.append), faults
    except UsageError as error:
        # It cannot be parsed at all.
        return None, [error]


def _set(option: Given) -> FieldSetting:
    plain = normalize("NFKC", option.raw)
    if plain != option.raw and not plain.startswith("env."):
        raise UsageError(option.blame(f"it has full-width characters: write {plain}."))
    setting = parse_set(option.raw)
    # In a config file the source has a line.
    return setting if option.source == "command line" else setting._replace(source=option.source)


def settings(requests: Sequence[NamedStrategy], sets: Iterable[Given]) -> list[Setting]:
    """Return the lines of the settings: all names together, and each field that was set."""
    source = requests[-1].given.source if requests else "default"
    named = ",".join(request.name for request in requests) or "None"
    lines = [Setting("strategy", named, source)]
    for option in sets:
        key, _, value = option.raw.partition("=")
        lines.append(Setting(f"set.{key.strip()}", value, option.source))
    return lines


def preset_path(name: str) -> str:
    """Return the file of the preset NAME: in the wheel, or in a checkout beside the package."""
    for folder in (_PACKAGE, os.path.dirname(_PACKAGE)):
        path = os.path.join(folder, "configs", f"{name}.yaml")
        if os.path.exists(path):
            return path
    raise UsageError(f"The preset {name} is missing from this fleetrun: install fleetrun again.")


def find(name: str, others: Iterable[str] = ()) -> str:
    """Return the path of the preset NAME, or else of the file NAME; OTHERS may also be meant."""
    if name in PRESETS:
        return preset_path(name)
    if os.path.isfile(name):
        return name
    if os.path.exists(name):
        kind = "a folder" if os.path.isdir(name) else "not a regular file"
        raise UsageError(f"{name} is {kind}, not a strategy file.")
    presets = f"presets are {', '.join(PRESETS)}."
    hint = suggestion(name, {*PRESETS, *others}, presets)
    shown = name or '""'
    raise UsageError(f"there is no file {shown}, nor a preset of that name{hint}")


def _stop(error: UsageError) -> None:
    raise error


def read(name: str, report: Callable[[UsageError], None] = _stop) -> Layer:
    """Read the preset or file NAME; raise UsageError with file:line if it is invalid.

    REPORT gets each error; if it returns, reading continues.
    """
    path = find(name)
    # Messages name a preset by its name, and a file by its path.
    shown = name if name in PRESETS else path
    text = yamlfile.text_of(path, "this strategy")
    return Layer(name, tuple(parse(text, shown, report)))


def parse(
    text: str, path: str, report: Callable[[UsageError], None] = _stop
) -> Iterator[FieldSetting]:
    """Yield the settings in TEXT, the YAML of PATH; REPORT gets its errors."""
    lines: dict[tuple[str, str], int] = {}
    with yamlfile.loading(text, path) as loader:
        root = loader.get_single_node()
        for entry in _Document(path, report).entries(root) if root is not None else ():
            try:
                setting = _line_setting(entry, loader)
            except UsageError as error:
                report(error)
                continue
            place = (setting.section, setting.name)
            if place in lines:
                message = f"{entry.name} is already set in line {lines[place]}."
                report(UsageError(f"{entry.where}: {message}"))
                continue
            lines[place] = entry.node.start_mark.line + 1
            yield setting


def parse_set(text: str) -> FieldSetting:
    """Read TEXT, `key=value` of --set: `fuse_grad_size_in_MB=16`, `flags.FLAGS_x=1`.

    >>> parse_set("gradient_merge_configs.k_steps=4")[:3]
    ('strategy', 'gradient_merge_configs.k_steps', 4)
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    where = f"{SET} {key}"
    if not equals or not key:
        typed = f"{SET} {text}".rstrip()
        raise UsageError(f"{typed}: give KEY=VALUE, as in fuse_grad_size_in_MB=16.")
    section, dot, name = key.partition(".")
    if not (dot and section in fields.SECTIONS):
        section, name = _section_of(key), key
    if section in VARIABLE_SECTIONS:
        return FieldSetting(
            section, _variable(section, name, where), _variable_text(section, raw), SET
        )
    field = _field(section, name, where)
    if field.kind == "configs":
        listed = ", ".join(key.name for key in field.keys)
        raise UsageError(f"{where}: set one of its parts: {listed}.")
    with yamlfile.loading(raw, where) as loader:
        node = loader.get_single_node()
        value = None if node is None else _constructed(loader, node, where)
    return _setting(section, name, value, where)._replace(source=SET)


def combine(layers: Sequence[Layer], sets: Sequence[FieldSetting] = ()) -> Strategy:
    """Combine LAYERS part by part; later ones override earlier ones, and SETS override all."""
    last: dict[tuple[str, str], FieldSetting] = {}
    for setting in (*(setting for layer in layers for setting in layer.settings), *sets):
        last[setting.section, setting.name] = setting
    settings = tuple(last.values())
    sources = [layer.name for layer in layers] + [SET] * bool(sets)
    return Strategy(tuple(sources), settings, digest(settings))


def digest(settings: Iterable[FieldSetting]) -> str:
    """Return a digest of FIELDS that does not depend on their order."""
    import hashlib  # needed only with a strategy

    lines = sorted(f"{setting.section}.{setting.name}={setting.value!r}" for setting in settings)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


# -- a file ----------------------------------------------------------------------------------------


class _FileLine(NamedTuple):
    """A line of a file: the NAME in SECTION, dotted for a part of configs, and its value's NODE."""

    section: str
    name: str
    node: "Node"
    where: str


class _Document:
    """The file PATH being read; REPORT gets its errors."""

    def __init__(self, path: str, report: Callable[[UsageError], None]) -> None:
        self._path = path
        self._report = report

    def entries(self, root: "Node") -> Iterator[_FileLine]:
        """Yield the lines of all sections below ROOT."""
        for section in self._pairs("", root, "write sections: " + ", ".join(fields.SECTIONS)):
            if section.name not in fields.SECTIONS:
                self._report(UsageError(f"{section.where}: {_unknown_section(section.name)}"))
            elif not section.node.tag.endswith(":null"):
                yield from self._lines(section.name, section.node)

    def _lines(self, section: str, node: "Node") -> Iterator[_FileLine]:
        """Yield the lines of SECTION, below NODE; those of configs part by part."""
        known = {} if section in VARIABLE_SECTIONS else fields.by_name(section)
        for entry in self._pairs(section, node, f"{section}: write one `name: value` a line"):
            name = entry.name
            if section == fields.STRATEGY and name in (fields.BUILD, fields.EXECUTION):
                # As in Python: strategy.build_strategy = ...
                yield from self._lines(name, entry.node)
            elif name in known and known[name].kind == "configs":
                yield from self._parts(entry, [key.name for key in known[name].keys])
            else:
                yield entry

    def _parts(self, whole: _FileLine, known: Sequence[str]) -> Iterator[_FileLine]:
        """Yield the lines of WHOLE, a mapping; dots in KNOWN, its parts, stand for inner ones."""
        expected = f"{whole.name}: give a mapping with {', '.join(known)}"
        for part in self._pairs(whole.section, whole.node, expected):
            entry = part._replace(name=f"{whole.name}.{part.name}")
            dotted = f"{part.name}."
            inner = [name.removeprefix(dotted) for name in known if name.startswith(dotted)]
            yield from self._parts(entry, inner) if inner else (entry,)

    def _pairs(self, section: str, node: "Node", expected: str) -> Iterator[_FileLine]:
        """Yield the entries of the mapping NODE of SECTION; EXPECTED is for the error."""
        from yaml import MappingNode, ScalarNode  # needed only with a strategy

        if not isinstance(node, MappingNode):
            where = yamlfile.at(self._path, node.start_mark)
            self._report(UsageError(f"{where}: {expected}."))
            return
        for key, value in node.value:
            where = yamlfile.at(self._path, key.start_mark)
            if not isinstance(key, ScalarNode):
                self._report(UsageError(f"{where}: {expected}."))
            elif key.tag == _MERGE:
                message = "<< is not supported: give several files, of which the later wins."
                self._report(UsageError(f"{where}: {message}"))
            else:
                yield _FileLine(section, str(key.value), value, where)


def _line_setting(entry: _FileLine, loader: "SafeLoader") -> FieldSetting:
    """Return the setting of the line ENTRY, whose value LOADER constructs."""
    from yaml import ScalarNode

    section, name, node, where = entry
    if section not in VARIABLE_SECTIONS:
        return _setting(section, name, _constructed(loader, node, where), where)
    variable = _variable(section, name, where)
    if not isinstance(node, ScalarNode) or node.tag.endswith(":null"):
        raise UsageError(f"{where}: {name}: give one value.")
    return FieldSetting(section, variable, _variable_text(section, str(node.value)), where)


def _constructed(loader: "SafeLoader", node: "Node", where: str) -> object:
    from yaml import MappingNode

    if isinstance(node, MappingNode):
        return {}
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError) as error:
        # Such as a date with a 13th month, or a word that is not of its tag.
        problem = error if isinstance(error, ValueError) else f"this is not a {node.tag}"
        raise UsageError(f"{where}: this is not YAML: {problem}.") from None


# -- names and values ------------------------------------------------------------------------------


def _setting(section: str, name: str, value: object, where: str) -> FieldSetting:
    """Return the setting of the field NAME, dotted for a part of configs, to VALUE."""
    field = _field(section, name, where)
    whole, dot, _ = name.partition(".")
    full = f"{fields.by_name(section)[whole].name}.{field.name}" if dot else field.name
    return FieldSetting(field.section, full, _converted(field, value, where), where)


def _field(section: str, name: str, where: str) -> Field:
    """Return the field NAME of SECTION, dotted for a part of configs."""
    known = fields.by_name(section)
    first, dot, key = name.partition(".")
    if first not in known:
        raise UsageError(f"{where}: {_unknown_field(section, first)}")
    field = known[first]
    parts = {part.name: part for part in field.keys}
    if not dot or key in parts:
        return parts[key] if dot else field
    if not parts:
        raise UsageError(f"{where}: {field.name} has no parts: {fields.wanted(field)}.")
    inner = [part for part in parts if part.startswith(f"{key}.")]
    if inner:
        raise UsageError(f"{where}: set one of its parts: {', '.join(inner)}.")
    hint = suggestion(key, parts, f"it has {', '.join(parts)}.")
    raise UsageError(f"{where}: {field.name} has no {key}{hint}")


def _unknown_field(section: str, name: str) -> str:
    for other_section in fields.FIELD_SECTIONS:
        if name in fields.by_name(other_section):
            return f"{name} belongs to the section {other_section}, not to {section}."
    parts = [f"{field.name}.{key.name}" for field in fields.TABLE for key in field.keys]
    inside = [part for part in parts if part.partition(".")[2] == name]
    if inside:
        return f"{name} is a part: did you mean {' or '.join(inside)}?"
    known = fields.by_name(section)
    # A part is suggested in full: `k_stps` may be meant for gradient_merge_configs.k_steps.
    nearest = closest(name, {*known, *(part.partition(".")[2] for part in parts)})
    whole = [part for part in parts if part.partition(".")[2] == nearest]
    if whole and nearest not in known:
        return f"no such field: {name}; did you mean {' or '.join(whole)}?"
    otherwise = "`fleetrun strategy list --fields` shows all."
    return f"no such field: {name}{suggestion(name, known, otherwise)}"


def _unknown_section(name: str) -> str:
    known = fields.by_name(fields.STRATEGY)
    section = known[name].section if name in known else _section_of(name)
    if name in known or section != fields.STRATEGY:
        return f"{name} is in no section; put it under `{section}:`."
    listed = f"sections are {', '.join(fields.SECTIONS)}."
    return f"no such section: {name}{suggestion(name, fields.SECTIONS, listed)}"


def _section_of(key: str) -> str:
    """Return the section of KEY, for a --set that names none."""
    for section, prefix in fields.PREFIXES.items():
        if prefix and key.startswith(prefix):
            return section
    return fields.STRATEGY


def _converted(field: Field, value: object, where: str) -> FieldValue:
    """Return VALUE as FIELD's type; UsageError if that is impossible, or breaks training."""
    try:
        converted = fields.convert(field, value)
    except ValueError as error:
        raise UsageError(f"{_written(field, value, where)}: {error}.") from None
    if field.refused is not None and field.refused[0] == converted:
        raise UsageError(f"{_written(field, converted, where)} is refused: {field.refused[1]}.")
    return converted


def _written(field: Field, value: object, where: str) -> str:
    """Return WHERE the VALUE of FIELD is written, and the value."""
    shown = "null" if value is None else "a mapping" if value == {} else str(value)
    if isinstance(value, bool):
        shown = shown.lower()
    # --set names the field already.
    named = f"{where}=" if where.startswith(SET) else f"{where}: {field.name}: "
    return f"{named}{shown:.60}"


def _variable(section: str, name: str, where: str) -> str:
    prefix = fields.PREFIXES[section]
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"{where}: {name} is not a variable name.")
    if not name.startswith(prefix):
        raise UsageError(f"{where}: {name}: did you mean {prefix}{name}?")
    return name


def _variable_text(section: str, raw: str) -> str:
    """Return RAW, with true and false as 1 and 0 for NCCL, which reads numbers only."""
    numbers = {"true": "1", "false": "0"}
    return numbers.get(raw.strip().lower(), raw) if section == fields.NCCL else raw
