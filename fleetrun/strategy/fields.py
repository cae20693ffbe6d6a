"""The fields of strategies: type, unit, range, default and outcomes, read from `table`; pure."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import re
from collections.abc import Iterator
from typing import NamedTuple

from fleetrun.model import VARIABLE_SECTIONS, FieldValue
from fleetrun.strategy import table
from fleetrun.text import number_in_words, parse_bool, parse_number

STRATEGY = "strategy"
BUILD = "build_strategy"
EXECUTION = "execution_strategy"
FLAGS, NCCL, ENV = VARIABLE_SECTIONS

FIELD_SECTIONS = (STRATEGY, BUILD, EXECUTION)
SECTIONS = (*FIELD_SECTIONS, *VARIABLE_SECTIONS)
# The prefixes of the variables of each section.
PREFIXES = {FLAGS: "FLAGS_", NCCL: "NCCL_", ENV: ""}

AUTO = "auto"
PADDLES = ("2.6.2", "3.3.1")
GRAPHS = ("dygraph", "static")
DEVICES = ("cpu", "gpu")
EFFECTIVE, NO_EFFECT, REFUSED = "effective", "no effect", "refused"
# The job trains the same without it.
NO_DIFFERENCE = "no difference"
# What is effective elsewhere, on devices where nothing has run.
EXPECTED = "expected"
# It needs a GPU and has not been run on one.
UNTESTED = "untested"
# The caveat about everything that concerns GPUs.
GPUS = (
    "GPUs: expected, but not yet run on one; derived from the programs that Paddle's GPU build "
    "generates."
)
LEGACY_IR = (
    "Paddle 3.3.1 supports static strategies only in its older program representation: "
    "FLAGS_enable_pir_api=0, and networks without paddle.matmul and similar operators."
)
_LARGEST_INT = 2**31 - 1
# The kind of each item of a list.
_ITEMS = {"ints": "int", "floats": "float", "texts": "text"}


class FieldOutcome(NamedTuple):
    """The outcome of a field in some places, with its reason; an empty place means all."""

    status: str
    reason: str
    graph: str = ""
    paddle: str = ""
    device: str = ""
    # The reason to report if a run does not confirm the outcome.
    unseen: str = ""


class Field(NamedTuple):
    """One field: a row of the table.

    `kind` is one of bool, int, float, choice, text, ints, floats, texts, configs (with `keys`).
    `auto` describes this value; an empty description means that it is invalid.
    `refused` is a value that is never passed on, and why.
    `only` is the one version of Paddle that has the field; `is_own`: none has it, because only
    fleetrun implements it.
    `on` lists its outcomes, of which the first match counts, and `off` those if it is false.
    """

    name: str
    section: str
    kind: str
    doc: str
    default: FieldValue = False
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    words: tuple[str, ...] = ()
    auto: str = ""
    aliases: tuple[str, ...] = ()
    keys: "tuple[Field, ...]" = ()
    refused: "tuple[FieldValue, str] | None" = None
    only: str = ""
    is_own: bool = False
    on: tuple[FieldOutcome, ...] = ()
    off: tuple[FieldOutcome, ...] = ()


# The outcomes of fields without a matching line, by section, and of fields that are off.
_ELSEWHERE = {
    BUILD: FieldOutcome(
        NO_EFFECT, "not available in dygraph: it fuses operators of a static program", "dygraph"
    ),
    EXECUTION: FieldOutcome(NO_EFFECT, "dygraph has no executor", "dygraph"),
}
_OFF_BY_DEFAULT = FieldOutcome(NO_DIFFERENCE, "off, the same as if not set")
_IDLE = "nothing in these versions of Paddle acts on it"
_IDLE_DOC = "Accepted, without effect."
_NUMBER = re.compile(r"(-?[\d.]+)(?: (\w+))?(?:, (-?\d+)\.\.(\d*))?")


def _entries(text: str) -> list[list[str]]:
    """Return the lines of each field and section of TEXT."""
    entries: list[list[str]] = []
    for line in text.strip().split("\n"):
        indent = len(line) - len(line.lstrip())
        if not indent:
            entries.append([line])
        elif indent == 2:
            entries[-1].append(line.strip())
        else:
            entries[-1][-1] += " " + line.strip()
    return entries


def _parsed(text: str) -> Iterator[Field]:
    """Yield the fields of TEXT, as the docstring of `table` describes it."""
    parsed: dict[str, Field] = {}
    section = ""
    for head, *lines in _entries(text):
        if head.startswith("["):
            section = head.strip("[]")
            continue
        if head.startswith("nowhere: "):
            yield from _idle(head[len("nowhere: ") :], section, *lines)
            continue
        field = _headed(head, section)
        for line in lines:
            field = _with(field, line, parsed)
        switch = parsed.get(field.name.removesuffix("_configs"))
        if switch is not None and field.kind == "configs":
            field = field._replace(on=field.on + switch.on)
        parsed[field.name] = field
        yield field


def _idle(text: str, section: str, *lines: str) -> Iterator[Field]:
    """Yield the fields that TEXT lists, which have no effect anywhere; LINES hold for each.

    >>> [field.default for field in _idle("a|b = 3; c = true", "strategy")]
    [3, True]
    """
    for entry in text.split("; "):
        names, _, value = entry.partition(" = ")
        name, *aliases = names.split("|")
        field = _headed(f"{name} = {value}  {_IDLE_DOC}", section)
        outcome = FieldOutcome(NO_EFFECT, _IDLE)
        field = field._replace(aliases=tuple(aliases), on=(outcome,), off=(outcome,))
        for line in lines:
            field = _with(field, line, {})
        yield field


def _headed(text: str, section: str) -> Field:
    """Return the field that a first line declares.

    >>> _headed("k_steps = 2 steps, 0..9  How many.", "strategy")[2:8]
    ('int', 'How many.', 2, 'steps', 0, 9)
    """
    head, _, doc = text.partition("  ")
    name, _, value = head.rstrip(":").partition(" = ")
    field = Field(name, section, "configs", doc, default="")
    if not value:
        return field
    if value in ("true", "false"):
        return field._replace(kind="bool", default=value == "true")
    if value.startswith("["):
        return field._replace(kind=value.strip("[]"), default=())
    if value == '""':
        return field._replace(kind="text")
    if " | " in value:
        words = tuple(value.split(" | "))
        return field._replace(kind="choice", default=words[0], words=words)
    parts = _NUMBER.fullmatch(value)
    assert parts is not None, text
    number, unit, least, most = parts.groups(default="")
    is_whole = "." not in number
    return field._replace(
        kind="int" if is_whole else "float",
        default=int(number) if is_whole else float(number),
        unit=unit,
        minimum=int(least) if least else int(is_whole),
        maximum=int(most) if most else None,
    )


def _with(field: Field, line: str, known: dict[str, Field]) -> Field:
    """Return FIELD with LINE, one of the lines below it, applied."""
    keyword, _, text = line.partition(": ")
    changes: dict[str, object]
    match keyword:
        case _ if line.startswith("."):
            changes = {"keys": (*field.keys, _headed(line[1:], STRATEGY))}
        case "also":
            changes = {"aliases": tuple(text.split(", "))}
        case "auto" | "only":
            changes = {keyword: text}
        case "own":
            changes = {"is_own": True}
        case "as":
            changes = {"on": known[text].on, "off": known[text].off}
        case "never true" | "never false":
            changes = {"refused": (keyword == "never true", text)}
        case _:
            kind = "off" if keyword.startswith("false") else "on"
            changes = {kind: (*getattr(field, kind), _outcome(keyword.split(), text))}
    return field._replace(**changes)  # type: ignore[arg-type]


def _outcome(places: list[str], text: str) -> FieldOutcome:
    """Return the outcome TEXT for PLACES.

    >>> _outcome(["static", "gpu"], "no effect: why (unseen: why not)")[:6]
    ('no effect', 'why', 'static', '', 'gpu', 'why not')
    """
    status, _, reason = text.partition(": ")
    reason, _, unseen = reason.partition(" (unseen: ")
    graph, paddle, device = (
        next((place for place in places if place in known), "")
        for known in (GRAPHS, PADDLES, DEVICES)
    )
    return FieldOutcome(status, reason, graph, paddle, device, unseen.removesuffix(")"))


TABLE = tuple(_parsed(table.TEXT.format(**table.WORDS)))


def outcomes(field: Field, *, is_off: bool = False) -> tuple[FieldOutcome, ...]:
    """Return the outcomes of FIELD, or with IS_OFF of the value false; the first match counts.

    >>> [outcome.status for outcome in outcomes(find("strategy", "asp"))]
    ['refused']
    """
    if field.refused is not None and field.refused[0] is not is_off:
        return (FieldOutcome(REFUSED, field.refused[1]),)
    missing = [
        FieldOutcome(NO_EFFECT, f"Paddle {paddle} has no such field", paddle=paddle)
        for paddle in PADDLES
        if field.only not in ("", paddle)
    ]
    if is_off:
        return (*missing, *field.off, _OFF_BY_DEFAULT)
    return (
        *missing,
        *field.on,
        *([_ELSEWHERE[field.section]] if field.section in _ELSEWHERE else []),
    )


def outcome(
    field: Field, *, paddle: str, graph: str, device: str, is_off: bool = False
) -> FieldOutcome:
    """Return the outcome of FIELD in one place; IS_OFF: if it is false.

    >>> nccl = find("strategy", "nccl_comm_num")
    >>> outcome(nccl, paddle="3.3.1", graph="dygraph", device="cpu").status
    'effective'
    >>> outcome(nccl, paddle="3.3.1", graph="dygraph", device="gpu").status
    'expected'
    """
    for candidate in outcomes(field, is_off=is_off):
        asked = ((candidate.graph, graph), (candidate.paddle, paddle), (candidate.device, device))
        if all(place in ("", here) for place, here in asked):
            if device == "gpu" and candidate.status == EFFECTIVE:
                return candidate._replace(status=EXPECTED)
            return candidate
    raise KeyError(field.name)


def by_name(section: str) -> dict[str, Field]:
    """Map the names allowed under SECTION to their fields; `strategy` accepts all.

    >>> by_name("strategy")["thread_num"].section
    'execution_strategy'
    """
    return {
        spelling: field
        for field in TABLE
        if section in (field.section, STRATEGY)
        for spelling in (field.name, *field.aliases)
    }


def find(section: str, name: str) -> Field:
    """Return the field NAME of SECTION, dotted for a key of its configs.

    >>> find("strategy", "gradient_merge_configs.k_steps").unit
    'steps'
    """
    first, _, key = name.partition(".")
    field = next(row for row in TABLE if row.section == section and row.name == first)
    return next(part for part in field.keys if part.name == key) if key else field


def wanted(field: Field) -> str:
    """Return the allowed values of FIELD, for an error message.

    >>> wanted(find("strategy", "fuse_grad_size_in_MB"))
    'give a whole number of MB from 1 to 65536, or auto'
    """
    match field.kind:
        case "bool":
            values = "give true or false"
        case "int" | "float":
            values = "give " + number_in_words(
                is_whole=field.kind == "int",
                minimum=field.minimum,
                maximum=field.maximum,
                unit=field.unit,
            )
        case "choice":
            values = f"give one of {', '.join(field.words)}"
        case "ints" | "floats":
            values = "give a list of " + ("whole numbers" if field.kind == "ints" else "numbers")
        case "texts":
            values = "give a list of words"
        case "configs":
            values = f"give a mapping with {', '.join(key.name for key in field.keys)}"
        case _:
            values = "give a word"
    return f"{values}, or auto" if field.auto else values


def convert(field: Field, value: object) -> FieldValue:
    """Return VALUE as FIELD's type if that loses nothing; ValueError says what is allowed.

    >>> convert(find("strategy", "fuse_grad_size_in_MB"), 16.0)
    16
    >>> convert(find("strategy", "gradient_merge"), 1)
    True
    """
    if value == AUTO and field.auto:
        return value
    items = _ITEMS.get(field.kind)
    entries = list(value) if items and isinstance(value, list | tuple) else [value]
    converted = [_single(field, items or field.kind, entry) for entry in entries]
    valid = tuple(entry for entry in converted if entry is not None)
    if len(valid) < len(converted):
        raise ValueError(wanted(field))
    return valid if items else valid[0]


def _single(field: Field, kind: str, value: object) -> bool | int | float | str | None:
    """Return VALUE as KIND within FIELD's bounds; None if invalid."""
    match kind:
        case "bool":
            return parse_bool(value)
        case "int" | "float":
            maximum = _LARGEST_INT if field.maximum is None else field.maximum
            return parse_number(
                value, is_whole=kind == "int", minimum=field.minimum, maximum=maximum
            )
        case "choice":
            return value if isinstance(value, str) and value in field.words else None
        case "text":
            is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
            return str(value) if is_plain else None
        case _:
            return None
