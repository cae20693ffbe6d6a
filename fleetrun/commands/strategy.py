"""`fleetrun strategy ...`: shows presets and fields, checks files, predicts their effect."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from fleetrun.cli import parser
from fleetrun.cli.pager import page as through_pager
from fleetrun.cli.types import among
from fleetrun.commands import tables
from fleetrun.model import VARIABLE_SECTIONS, Knob
from fleetrun.printing import AUTO, NEVER, is_colored_stream, message_prefix, put, remark
from fleetrun.rundir import secrets
from fleetrun.strategy import explanation, fields, load, schema
from fleetrun.text import visible, visible_lines


def _presets(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    return [CompletionItem(incomplete, type="file"), *among(load.PRESETS, incomplete)]


def _names(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    names = (*load.PRESETS, *(field.name for field in fields.TABLE), *VARIABLE_SECTIONS)
    words = among(dict.fromkeys(names), incomplete)
    return [CompletionItem(incomplete, type="file"), *words]


@click.group("strategy", cls=parser.CommandGroup, no_args_is_help=False)
def command() -> None:
    """Show, check and explain strategies: what --strategy enables in an unmodified script."""


@command.command("list", help="List the presets, or all fields.")
@click.option(
    "--fields", "is_fields", is_flag=True, help="Show every field with its type, range and default."
)
def _list(*, is_fields: bool) -> int:
    # The presets fit on any screen.
    text = listed_fields if is_fields else listed
    return through_pager(text(tables.width()), NEVER, os.environ)


@command.command("show", help="Show a preset file, or all about one field.")
@click.argument("name", metavar="PRESET|FIELD", shell_complete=_names)
def _show(name: str) -> int:
    # A preset's text alone, so that it can be saved as a file.
    code = _put_visible(shown(name))
    if name in load.PRESETS and name in fields.by_name(fields.STRATEGY):
        remark(f"{name} is a field, too: `fleetrun strategy show strategy.{name}`.")
    return code


@command.command("validate", help="Check strategy files; the exit code is 2 if there is an error.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=_presets)
def _validate(files: tuple[str, ...]) -> int:
    """Print the errors of all FILES."""
    worst = 0
    for name in files:
        layer, faults = load.checked(name)
        for fault in faults:
            print(f"{_fault_prefix()}{visible(str(fault))}", file=sys.stderr)
            worst = fault.exit_code
        if layer is None or faults:
            continue
        for note in load.combine([layer]).notes:
            remark(note)
        count = len(layer.knobs)
        print(f"{visible(name)}: valid, {count} {'setting' if count == 1 else 'settings'}.")
    return worst


@command.command("schema", help="Print the JSON Schema of strategy files, for editors.")
def _schema() -> int:
    return _put_visible(json.dumps(schema.schema(), indent=2) + "\n")


def _explain(name: str, *, paddle: str | None, graph: str | None, device: str | None) -> int:
    text = explained(
        name,
        paddles=[paddle] if paddle else fields.PADDLES,
        graphs=[graph] if graph else fields.GRAPHS,
        devices=[device] if device else fields.DEVICES,
        width=tables.width(),
    )
    return _put_visible(text)


command.add_command(
    click.Command(
        "explain",
        help="Predict for each field whether it takes effect, without a run.",
        callback=_explain,
        params=[
            click.Argument(["name"], metavar="FILE|NAME", shell_complete=_presets),
            parser.option("paddle", "choice", "With this Paddle only.", words=fields.PADDLES),
            parser.option("graph", "choice", "In these graphs only.", words=fields.GRAPHS),
            parser.option("device", "choice", "On this device only.", words=fields.DEVICES),
        ],
    )
)


def _put_visible(text: str) -> int:
    """Print TEXT, with control characters made visible."""
    return put(visible_lines(text))


# -- list and show ---------------------------------------------------------------------------------


def listed(width: int = 0) -> str:
    """Return all presets, each with its purpose."""
    lines = [
        "Presets",
        tables.layout(list(load.PRESETS.items()), width=width),
        "",
        "fleetrun --strategy NAME train.py     apply one; repeatable, later ones win",
        "fleetrun strategy show NAME           show its contents",
        "fleetrun strategy list --fields       list every field",
    ]
    return "\n".join(lines) + "\n"


def listed_fields(width: int = 0) -> str:
    """Return all fields with type, unit, range and default, section by section."""
    lines: list[str] = []
    for section in fields.FIELD_SECTIONS:
        rows: list[tuple[str, str, str]] = []
        for field in fields.TABLE:
            if field.section == section:
                rows.append((field.name, explanation.kind(field), schema.describe(field)))
                rows += [
                    (f"  {k.name}", explanation.kind(k), schema.describe(k)) for k in field.keys
                ]
        heads = ("field", "value", "meaning")
        lines += [f"Fields of {section}", tables.layout(rows, heads=heads, width=width)]
        lines.append("")
    lines += [
        "Sections flags (FLAGS_*), nccl (NCCL_*) and env set environment variables of all ranks.",
        "Details of a field, with an example: fleetrun strategy show FIELD",
    ]
    return "\n".join(lines) + "\n"


def shown(name: str) -> str:
    """Return the text of the preset or file NAME, or a page about the field NAME."""
    # amp and gradient_merge are fields, too: write strategy.amp for those.
    if name in load.PRESETS:
        return _text(load.preset_path(name))
    if name in VARIABLE_SECTIONS:
        return explanation.variables(name)
    section, dot, rest = name.partition(".")
    if dot and section in VARIABLE_SECTIONS:
        return explanation.variables(section)
    for kind, prefix in fields.PREFIXES.items():
        if prefix and name.startswith(prefix):
            return explanation.variables(kind)
    matches = _fields(rest if dot and section in fields.FIELD_SECTIONS else name)
    if not matches:
        return _text(load.find(name))
    presets = {preset: load.read(preset) for preset in load.PRESETS}
    return "\n".join(explanation.page(field, presets) for field in matches)


def _fields(name: str) -> list[fields.Field]:
    """Return the field NAME, or all fields with a part of that name."""
    known = fields.by_name(fields.STRATEGY)
    if name in known:
        return [known[name]]
    return [field for field in fields.TABLE if _has_part(field, name)]


def _has_part(field: fields.Field, name: str) -> bool:
    """Whether NAME is a part of FIELD, in the form of --set or alone."""
    return any(name in (key.name, f"{field.name}.{key.name}") for key in field.keys)


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


# -- validate --------------------------------------------------------------------------------------


def _fault_prefix() -> str:
    is_coloured = is_colored_stream(AUTO, os.environ, sys.stderr)
    return message_prefix(is_coloured=is_coloured, is_fault=True)


# -- explain ---------------------------------------------------------------------------------------


def explained(
    name: str,
    *,
    paddles: Sequence[str],
    graphs: Sequence[str],
    devices: Sequence[str],
    width: int = 0,
) -> str:
    """Return the outcome of each knob of NAME, places with the same outcome in one row."""
    layer = load.read(name)
    # Raises what a launch would raise.
    notes = load.combine([layer]).notes
    places = [
        (paddle, graph, device) for graph in graphs for paddle in paddles for device in devices
    ]
    if not layer.knobs:
        return f"{name} sets nothing.\n"
    # A field with parts has a single verdict.
    knobs: dict[tuple[str, str], Knob] = {}
    for knob in layer.knobs:
        knobs.setdefault((knob.section, knob.name.partition(".")[0]), knob)
    rows: list[tuple[str, ...]] = []
    for (section, field), knob in knobs.items():
        rows += _explained(knob, section, field, places)
    lines = [tables.layout(rows, heads=("field", "status", "where", "why"), width=width), ""]
    if any(place[:2] == ("3.3.1", "static") for place in places):
        lines.append(f"note: {fields.LEGACY_IR}")
    if any(place[2] == "gpu" for place in places):
        lines.append(f"note: {fields.GPUS}")
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def _explained(
    knob: Knob, section: str, name: str, places: list[tuple[str, str, str]]
) -> list[tuple[str, ...]]:
    """Return the rows of the field NAME, of which KNOB may be a part; the first names it."""
    if section in VARIABLE_SECTIONS:
        value = secrets.redact(name, str(knob.value))
        return [(f"{name}: {value}", "set", "everywhere", "in every rank; what is exported wins")]
    is_part = "." in knob.name
    title = name if is_part else f"{name}: {explanation.written(knob.value)}"
    field = fields.find(section, name)
    outcomes = explanation.outcomes(field, places, is_off=knob.value is False and not is_part)
    return [
        ("" if place else title, status, where, reason)
        for place, ((status, reason), where) in enumerate(outcomes.items())
    ]
