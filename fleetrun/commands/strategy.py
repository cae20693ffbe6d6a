"""`fleetrun strategy ...`: shows presets and fields, checks files, predicts their effect."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from fleetrun import yamlfile
from fleetrun.cli import parser, types
from fleetrun.cli.types import among
from fleetrun.commands import tables
from fleetrun.model import VARIABLE_SECTIONS
from fleetrun.printing import put, remark
from fleetrun.rundir import secrets
from fleetrun.strategy import explanation, fields, load
from fleetrun.text import counted, visible, visible_lines

_HOW_TO = """
fleetrun --strategy NAME train.py     apply one; repeatable, later ones win
fleetrun strategy show NAME           show its contents
fleetrun strategy list --fields       list every field
"""


def _names(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    names = dict.fromkeys((*load.PRESETS, *(field.name for field in fields.TABLE)))
    return [CompletionItem(incomplete, type="file"), *among(names, incomplete)]


@click.group("strategy", no_args_is_help=False)
def command() -> None:
    """Show, check and explain strategies: what --strategy enables in an unmodified script."""


@command.command("list", help="List the presets, or all fields.")
@click.option("--fields", "is_fields", is_flag=True, help="Show every field, type and default.")
def _list(*, is_fields: bool) -> int:
    width = tables.width()
    if not is_fields:
        rows = [*load.PRESETS.items()]
        return put(f"{tables.layout(rows, heads=('preset', 'purpose'), width=width)}\n{_HOW_TO}")
    about = []
    for field in fields.TABLE:
        # As it is written for --set.
        section = "" if field.section == fields.STRATEGY else f"{field.section}."
        about.append((section + field.name, explanation.kind(field), explanation.describe(field)))
        about += [(f"  {k.name}", explanation.kind(k), explanation.describe(k)) for k in field.keys]
    heads = ("field", "value", "meaning")
    return put(f"{tables.layout(about, heads=heads, width=width)}\n")


@command.command("show", help="Show a preset file, or all about one field.")
@click.argument("name", metavar="PRESET|FIELD", shell_complete=_names)
def _show(name: str) -> int:
    section, dot, rest = name.partition(".")
    word = rest if dot and section in fields.FIELD_SECTIONS else name
    known = fields.by_name(fields.STRATEGY).get(word)
    matches = [
        field
        for field in fields.TABLE
        if field is known
        # Of parts the last names are enough: pp_configs of hybrid_configs.
        or (not known and any(f".{word}." in f".{field.name}.{k.name}." for k in field.keys))
    ]
    # A preset's text alone, so that it can be saved as a file; amp is a field, too.
    if name in load.PRESETS or not matches:
        path = load.find(name, fields.by_name(fields.STRATEGY))
        return put(visible_lines(yamlfile.text_of(path, "this strategy")))
    return put(visible_lines("\n".join(map(explanation.page, matches))))


@command.command("validate", help="Check strategy files; the exit code is 2 if there is an error.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=_names)
def _validate(files: tuple[str, ...]) -> int:
    """Print the errors of all FILES."""
    worst = 0
    for name in files:
        layer, faults = load.checked(name)
        for fault in faults:
            remark(str(fault))
            worst = fault.exit_code
        if layer is None or faults:
            continue
        put(f"{visible(name)}: valid, {counted(len(layer.settings), 'setting')}.\n")
    return worst


def _explain(name: str, *, paddle: str | None, graph: str | None, device: str | None) -> int:
    """Print the outcome of each field of NAME, places with the same outcome in one row."""
    layer = load.read(name)
    if not layer.settings:
        return put(f"{visible(name)} sets nothing.\n")
    graphs = [graph] if graph else fields.GRAPHS
    paddles = [paddle] if paddle else fields.PADDLES
    devices = [device] if device else fields.DEVICES
    places = [(p, g, d) for g in graphs for p in paddles for d in devices]
    rows: list[tuple[str, ...]] = []
    seen = set()
    for setting in layer.settings:
        field, dot, _ = setting.name.partition(".")
        if setting.section in VARIABLE_SECTIONS:
            value = secrets.redact(setting.name, str(setting.value))
            why = "in every rank; what is exported wins"
            rows.append((f"{setting.name}: {value}", "set", "everywhere", why))
        elif (setting.section, field) not in seen:
            # A field with parts has a single verdict.
            seen.add((setting.section, field))
            is_off = setting.value is False and not dot
            known = fields.find(setting.section, field)
            title = field if dot else f"{field}: {explanation.written(setting.value)}"
            for (status, reason), where in explanation.outcomes(
                known, places, is_off=is_off
            ).items():
                rows.append((title, status, where, reason))
                title = ""
    notes = [fields.LEGACY_IR] if "3.3.1" in paddles and "static" in graphs else []
    notes += [fields.GPUS] if "gpu" in devices else []
    table = tables.layout(rows, heads=("field", "status", "where", "why"), width=tables.width())
    remarks = "".join(f"\nnote: {note}" for note in notes)
    return put(visible_lines(f"{table}\n{remarks}".rstrip("\n") + "\n"))


command.add_command(
    click.Command(
        "explain",
        help="Predict for each field whether it takes effect, without a run.",
        callback=_explain,
        params=[
            click.Argument(["name"], metavar="FILE|NAME", shell_complete=_names),
            parser.option("paddle", types.choice(*fields.PADDLES), "With this Paddle only."),
            parser.option("graph", types.choice(*fields.GRAPHS), "In these graphs only."),
            parser.option("device", types.choice(*fields.DEVICES), "On this device only."),
        ],
    )
)
