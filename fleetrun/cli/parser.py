"""How click parses a command: its own options, those of a launch, and uniform errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

import click

from fleetrun.cli import argv, configfile, elsewhere, request, types
from fleetrun.cli.option import Option
from fleetrun.cli.options import KNOWN
from fleetrun.cli.types import Type
from fleetrun.errors import UsageError
from fleetrun.model import Given, Request
from fleetrun.printing import ALWAYS, AUTO, NEVER, put
from fleetrun.text import suggestion

# The module of fleetrun.commands with the click command of each name.
COMMANDS = {
    "attach": "job_commands",
    "completion": "completion",
    "doctor": "doctor",
    "exec": "exec",
    "logs": "logs",
    "ps": "job_commands",
    "report": "pages",
    "stop": "job_commands",
    "stacks": "job_commands",
    "strategy": "strategy",
    "submit": "submit",
    "top": "top",
    "tune": "tune",
    "ui": "pages",
    "verify": "verify",
}
# The metavar of a command that takes a launch after its own options.
LAUNCH = "-- ARGUMENTS..."
# The settings of every command's context.
SETTINGS = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}


class _Context(click.Context):
    """A context that prints its help completely, or says why it cannot."""

    def get_help(self) -> str:
        """Print the help text and exit; click's own printing ignores a full disk."""
        put(super().get_help() + "\n")
        self.exit()


def option(
    name: str,
    kind: Type,
    text: str,
    *,
    metavar: str = "",
    default: str | None = None,
    aliases: Iterable[str] = (),
    in_file: bool = True,
) -> Option:
    """Return the option --NAME of a KIND with the help TEXT.

    Without a value and default it is None, or empty if it is repeatable.
    """
    spellings = " ".join((name, *aliases))
    return Option(spellings, kind, "", metavar, text, default=default, in_file=in_file)


def value(param: click.Option, text: str) -> str:
    """Return TEXT read as the value of PARAM; UsageError if it is not allowed."""
    assert isinstance(param, Option)
    return str(param.read(param.given(text)))


def log_dir() -> Option:
    """Return --log_dir for commands that read runs."""
    return option("log_dir", types.FOLDER, "The log folder.", default="log", metavar="DIR")


def color(text: str) -> Option:
    """Return --color for commands that colour their output, with the help TEXT."""
    return option("color", types.choice(AUTO, ALWAYS, NEVER), text, default=AUTO)


def launch_request(command_line: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Return the request of a launch's COMMAND_LINE, including the config file."""
    parsed = argv.split(list(command_line))
    file = configfile.find(parsed.given)
    made = request.resolve(parsed, environ, file)
    return made._replace(given=(*file.given, *parsed.given))


class CommandGroup(click.Group):
    """A command with subcommands, which suggests one for a misspelling."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that ARGS begin with; UsageError if there is none."""
        if not ctx.resilient_parsing and args[0] not in self.commands:
            listed = f"there are {', '.join(self.commands)}."
            ending = suggestion(args[0], self.commands, listed)
            raise UsageError(f"{self.name}: no such command: {args[0]}{ending}")
        return super().resolve_command(ctx, args)


class Launch(NamedTuple):
    """A launch's command line: its options with values, and the script with its arguments."""

    options: tuple[Given, ...]
    # With the `--` before it, if there was one: the words after it may look like options.
    script: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The options as words of a command line."""
        return tuple(f"{given.typed}={given.raw}" for given in self.options)


def rows(command: click.Command) -> list[Option]:
    """Return COMMAND's own options."""
    return [param for param in command.params if isinstance(param, Option)]


class LaunchCommand(click.Command):
    """A command before a launch's command line; its callback gets a Launch from the context."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let click parse our own options among ARGS, read as a launch's, and keep the rest."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        own = {option.label: option for option in rows(self)}
        head = argv.scan(args, (*own.values(), *KNOWN))
        if head.asks("help"):
            return super().parse_args(ctx, ["--help"])
        head.refuse_pending()
        start = len(args) if head.script_at is None else head.script_at
        start -= args[start - 1 : start] == ["--"] and start > 0
        of_launch = tuple(given for given in head.given if given.name not in own)
        ctx.obj = Launch(of_launch, tuple(args[start:]))
        words = []
        for given in (given for given in head.given if given.name in own):
            row = own[given.name]
            if not row.is_flag or row.read(given):
                words.append(row.flag if row.is_flag else f"{row.flag}={given.raw}")
        return super().parse_args(ctx, words)


def load(name: str) -> click.Command:
    """Return the command NAME of COMMANDS."""
    module = import_module(f"fleetrun.commands.{COMMANDS[name]}")
    # A module with several commands names each.
    command: click.Command = getattr(module, "command", None) or getattr(module, name)
    views = command.commands.values() if isinstance(command, click.Group) else ()
    for loaded in (command, *views):
        loaded.context_class = _Context
    return command


def run(name: str, arguments: Sequence[str]) -> int:
    """Run `fleetrun NAME ARGUMENTS` and return its exit code; UsageError if invalid."""
    command = load(name)
    try:
        with command.make_context(f"fleetrun {name}", list(arguments), None, **SETTINGS) as context:
            return int(command.invoke(context) or 0)
    except click.exceptions.Exit as end:
        # After --help.
        return end.exit_code
    except click.UsageError as error:
        raise UsageError(_sentence(error)) from None


def _sentence(error: click.UsageError) -> str:
    """Return click's complaint about the command line in fleetrun's words."""
    context = error.ctx
    where = types.place(context)
    match error:
        case click.NoSuchOption() if context is not None:
            typed = error.option_name
            elsewhere.refuse_gone(typed.lstrip("-").replace("-", "_"), f"{where}{typed}")
            params = context.command.get_params(context)
            # Without hyphens, which would make all names similar.
            known = [name[2:] for param in params for name in param.opts if name[:2] == "--"]
            otherwise = f"see `{context.command_path} --help`."
            if any(getattr(param, "metavar", "") == LAUNCH for param in params):
                otherwise = f"the launch and its options stand after --; {otherwise}"
            ending = suggestion(typed.lstrip("-"), known, otherwise, "--")
            return f"{where}no such option: {typed}{ending}"
        case click.MissingParameter() if error.param is not None:
            return f"{where}give {error.param.human_readable_name}."
        case _ if context is not None and isinstance(context.command, click.Group):
            return f"{where}give one of {', '.join(context.command.commands)}."
    message = error.format_message().rstrip(".")
    return f"{where}{message[:1].lower()}{message[1:]}."
