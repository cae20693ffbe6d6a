"""How click parses a command: typed options, launch options, and uniform errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fleetrun import argv, colors, configfile, gone, options, request, suggestions
from fleetrun.commands import values
from fleetrun.errors import UsageError
from fleetrun.model import Request
from fleetrun.options import RawOption
from fleetrun.printing import put

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


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


class Typed(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """The type of an options.Option: values are read and completed as those of a launch."""

    def __init__(self, row: options.Option) -> None:
        self.row = row
        self.name = row.kind

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> options.Value:
        """Return VALUE as the row's type; UsageError with what is allowed."""
        try:
            return options.parse(self.row, options.at_home(self.row, str(value), self.row.flag))
        except ValueError as error:
            problem = str(error)
        if isinstance(param, click.Argument):
            raise UsageError(f"{_where(ctx)}{value}: {problem}")
        raise UsageError(RawOption(self.row, str(value), self.row.flag).blame(problem))

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's
        param: click.Parameter,  # noqa: ARG002 - click's
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """Return the row's values that start with INCOMPLETE."""
        return completions(values.of(self.row, incomplete, ""))


def completions(candidates: Iterable[values.Completion]) -> list[CompletionItem[str]]:
    """Return CANDIDATES as click's."""
    from click.shell_completion import CompletionItem  # only for completion

    return [CompletionItem(*candidate) for candidate in candidates]


def option(name: str, kind: str, text: str, **row: Any) -> click.Option:  # noqa: ANN401 - Option checks
    """Return the option --NAME of a KIND of options.Option, with the help TEXT; ROW has the rest.

    Without a value and default it is None, or empty if it is repeatable.
    """
    row = {"metavar": "", "own_default": row.pop("default", None), **row}
    typed = Typed(options.Option(name, kind, "", help=text, **row))
    if kind == "flag":
        typed = Typed(typed.row._replace(bare="true"))
        return click.Option([typed.row.flag], type=typed, is_flag=True, default=False, help=text)
    return click.Option(
        [typed.row.flag, *(f"--{alias}" for alias in typed.row.aliases)],
        type=typed,
        default=typed.row.default,
        show_default=typed.row.default is not None,
        multiple=kind in options.REPEATABLE,
        metavar=typed.row.metavar or "|".join(typed.row.words) or kind.upper(),
        help=text,
    )


def value(param: click.Option, text: str) -> str:
    """Return TEXT read as the value of PARAM; UsageError if it is not allowed."""
    return str(param.type.convert(text, param, None))


def log_dir() -> click.Option:
    """Return --log_dir for commands that read runs."""
    return option("log_dir", "text", "The log folder.", default="log", metavar="DIR", path="dir")


def color(text: str) -> click.Option:
    """Return --color for commands that colour their output, with the help TEXT."""
    words = (colors.AUTO, colors.ALWAYS, colors.NEVER)
    return option("color", "choice", text, default=colors.AUTO, words=words)


def launch_option(name: str) -> click.Option:
    """Return the launch option NAME for a command that starts no job."""
    row = options.find(name)
    text = "The hosts, as for a launch; :N is ignored here." if name == "hosts" else row.help
    return click.Option([row.flag], type=Typed(row), metavar=row.metavar, help=text)


def launch_request(words: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Return the request of the launch WORDS, including the config file."""
    parsed = argv.split(list(words))
    return request.resolve(parsed, environ, configfile.find(parsed, environ))


class CommandGroup(click.Group):
    """A command with subcommands, which suggests one for a misspelling."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that ARGS begin with; UsageError if there is none."""
        if not ctx.resilient_parsing and args[0] not in self.commands:
            listed = f"there are {', '.join(self.commands)}."
            ending = suggestions.ending(args[0], self.commands, listed)
            raise UsageError(f"{_where(ctx)}no such command: {args[0]}{ending}")
        return super().resolve_command(ctx, args)


class Launch(NamedTuple):
    """A launch's command line: its options with values, and the script with its arguments."""

    options: tuple[RawOption, ...]
    # With the `--` before it, if there was one: the words after it may look like options.
    script: tuple[str, ...]


def rows(command: click.Command) -> list[options.Option]:
    """Return the rows of COMMAND's own options."""
    own = (param for param in command.params if isinstance(param, click.Option))
    return [param.type.row for param in own if isinstance(param.type, Typed)]


class LaunchCommand(click.Command):
    """A command before a launch's command line; its callback gets a Launch from the context."""

    def rows(self) -> tuple[options.Option, ...]:
        """Return the options allowed before the script: our own, and those of a launch."""
        return (*rows(self), *options.KNOWN)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Extract our own options from ARGS, parsed as a launch's, and keep the rest."""
        own = {param.name for param in self.params}
        head = argv.scan(args, self.rows())
        if any(setting.option.name == "help" for setting in head.settings):
            return super().parse_args(ctx, ["--help"])
        if head.pending is not None:
            row = head.pending.option
            raise UsageError(f"{head.pending.typed} needs a value: {options.wanted(row)}")
        at = len(args) if head.script_at is None else head.script_at
        dashes = ("--",) if args[at - 1 : at] == ["--"] else ()
        of_launch = tuple(setting for setting in head.settings if setting.option.name not in own)
        ctx.obj = Launch(of_launch, (*dashes, *args[at:]) if args[at:] else ())
        ours = [setting for setting in head.settings if setting.option.name in own]
        return super().parse_args(ctx, [word for setting in ours for word in _for_click(setting)])


def _for_click(setting: RawOption) -> tuple[str, ...]:
    """Return SETTING in click's syntax, where a flag has no value."""
    if setting.option.kind != "flag":
        return (f"{setting.option.flag}={setting.raw}",)
    return (setting.option.flag,) if setting.value() is True else ()


def load(name: str) -> click.Command:
    """Return the command NAME of COMMANDS."""
    command: click.Command = import_module(f"fleetrun.commands.{name}").command
    views = command.commands.values() if isinstance(command, click.Group) else ()
    for loaded in (command, *views):
        loaded.context_class = _Context
    return command


def run(name: str, words: Sequence[str]) -> int:
    """Run `fleetrun NAME WORDS` and return its exit code; UsageError if invalid."""
    command = load(name)
    try:
        with command.make_context(f"fleetrun {name}", list(words), None, **SETTINGS) as context:
            return int(command.invoke(context) or 0)
    except click.exceptions.Exit as end:
        # After --help.
        return end.exit_code
    except click.UsageError as error:
        raise UsageError(_sentence(error)) from None


def _where(context: click.Context | None) -> str:
    """Return the command in which a mistake was made, to follow `fleetrun: `."""
    return "" if context is None else f"{context.command_path.removeprefix('fleetrun ')}: "


def _sentence(error: click.UsageError) -> str:
    """Return click's complaint about the command line in fleetrun's words."""
    context = error.ctx
    where = _where(context)
    if isinstance(error, click.NoSuchOption) and context is not None:
        name = error.option_name.lstrip("-").replace("-", "_")
        gone.refuse(name, f"{where}{error.option_name}")
        known = [name for param in context.command.get_params(context) for name in param.opts]
        # Without hyphens, which would make all names similar.
        bare = [name.lstrip("-") for name in known if name.startswith("--")]
        otherwise = f"see `{context.command_path} --help`."
        if any(getattr(param, "metavar", "") == LAUNCH for param in context.command.params):
            otherwise = f"the launch and its options stand after --; {otherwise}"
        ending = suggestions.ending(error.option_name.lstrip("-"), bare, otherwise, "--")
        return f"{where}no such option: {error.option_name}{ending}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{where}give {error.param.human_readable_name}."
    if "Missing command" in error.format_message() and isinstance(context, click.Context):
        views = context.command.commands if isinstance(context.command, click.Group) else ()
        return f"{where}give one of {', '.join(views)}."
    message = error.format_message().rstrip(".")
    return f"{where}{message[:1].lower()}{message[1:]}."
