"""How click parses a command: its own options, those of a launch, and uniform errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, cast

import click
from click.shell_completion import CompletionItem

from fleetrun.cli import argv, configfile, elsewhere, request, types
from fleetrun.cli.option import Option
from fleetrun.cli.options import KNOWN
from fleetrun.cli.types import Type
from fleetrun.errors import UsageError
from fleetrun.model import Given, Request
from fleetrun.printing import ALWAYS, AUTO, NEVER, put
from fleetrun.text import suggestion

# The module of fleetrun.commands with the click command of each name, and what it does.
COMMANDS = {
    "logs": ("logs", "show the output of all ranks, of the latest run or any other"),
    "top": ("top", "show the state of a running job, live"),
    "ui": ("pages", "show all runs on a live page, in the browser of this machine"),
    "report": ("pages", "write a page with charts of one run, or of two side by side"),
    "ps": ("job_commands", "list your running jobs"),
    "attach": ("job_commands", "show the console of a job in the background"),
    "stop": ("job_commands", "end a job"),
    "stacks": ("job_commands", "show where the ranks of a running job stand"),
    "doctor": ("doctor", "check whether this host is fit for a job, and how to fix it"),
    "strategy": ("strategy", "show presets and fields, and what takes effect"),
    "verify": ("verify", "compare a strategy with plain Paddle: weights, speed, memory"),
    "tune": ("tune", "find the fastest strategy by training with each"),
    "submit": ("submit", "submit a job to Slurm or Kubernetes"),
    "exec": ("exec", "launch where a command would start Paddle's launcher"),
    "completion": ("completion", "print the script for completion by Tab"),
}


def option(
    names: str, kind: Type, text: str, *, metavar: str = "", default: str | None = None
) -> Option:
    """Return an option of a command; without a value and default it is None."""
    return Option(names, kind, "", metavar, text, default=default)


# Of commands that read runs, and of those that colour their output.
LOG_DIR = option("log_dir", types.FOLDER, "The log folder.", default="log", metavar="DIR")
COLOR = option("color", types.choice(AUTO, ALWAYS, NEVER), "Whether to use colours.", default=AUTO)


def launch_request(command_line: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Return the request of a launch's COMMAND_LINE, including the config file."""
    parsed = argv.split(command_line)
    return request.resolve(parsed, environ, configfile.find(parsed.given))


class Launch(NamedTuple):
    """A launch's command line: its options with values, and the script with its arguments."""

    options: tuple[Given, ...]
    # With the `--` before it, if there was one: the words after it may look like options.
    script: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The options as words of a command line."""
        return tuple(f"{given.typed}={given.raw}" for given in self.options)


class _CompletedLaunch(click.Command):
    """The options of a launch, for completion; what follows the script is the script's."""

    allow_interspersed_args, allow_extra_args = False, True

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own options, and for completion those of a launch."""
        return [*super().get_params(ctx), *(KNOWN if ctx.resilient_parsing else ())]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[types.Item]:
        """Return options, or else files (and commands for `fleetrun` itself), for INCOMPLETE."""
        if incomplete.startswith("-") and not ctx.args:
            return super().shell_complete(ctx, incomplete)
        words = COMMANDS if incomplete and not (ctx.args or self.name) else ()
        return [CompletionItem(incomplete, type="file"), *types.among(words, incomplete)]


class LaunchCommand(_CompletedLaunch):
    """A command before a launch's command line; its callback gets a Launch from the context."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let click parse our own options among ARGS, read as a launch's, and keep the rest."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        own = {param.label: param for param in self.params if isinstance(param, Option)}
        head = argv.scan(args, (*own.values(), *KNOWN))
        if head.asks("help"):
            return super().parse_args(ctx, ["--help"])
        start = len(args) if head.script_at is None else head.script_at
        start -= args[start - 1 : start] == ["--"] and start > 0
        of_launch = tuple(given for given in head.given if given.name not in own)
        ctx.obj = Launch(of_launch, tuple(args[start:]))
        words = []
        for given in (given for given in head.given if given.name in own):
            row = own[given.name]
            if not row.is_flag or row.read(given):
                words.append(row.opts[0] if row.is_flag else f"{row.opts[0]}={given.raw}")
        return super().parse_args(ctx, words)


class _Context(click.Context):
    def get_help(self) -> str:
        """Print the help text and exit; click's own printing ignores a full disk."""
        put(super().get_help() + "\n")
        self.exit(0)


class Fleetrun(click.Group):
    """The commands, and for completion a launch in place of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let what is no command be a launch."""
        return super().parse_args(ctx, args if args[:1] and args[0] in COMMANDS else ["", *args])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Return the command CMD_NAME, or the launch."""
        del ctx
        if cmd_name in COMMANDS:
            module = import_module(f"fleetrun.commands.{COMMANDS[cmd_name][0]}")
            # A module with several commands names each.
            loaded = getattr(module, "command", None) or getattr(module, cmd_name)
            loaded.context_class = _Context
            return cast("click.Command", loaded)
        return _CompletedLaunch("")


ROOT = Fleetrun(
    "fleetrun",
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)


def run(words: Sequence[str]) -> int:
    """Run `fleetrun WORDS`, which name a command; return its exit code, UsageError if invalid."""
    # Not by click's `main`, which makes other errors of Ctrl-C and of a reader that has gone.
    try:
        with ROOT.make_context("fleetrun", list(words)) as context:
            return int(ROOT.invoke(context) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        raise UsageError(_sentence(error)) from None


def _sentence(error: click.UsageError) -> str:
    """Return click's complaint about the command line in fleetrun's words."""
    context = error.ctx
    message = error.format_message().rstrip(".")
    if isinstance(error, click.MissingParameter) and error.param is not None:
        message = f"give {error.param.human_readable_name}"
    where = "" if context is None else f"{context.command_path.removeprefix('fleetrun ')}: "
    if isinstance(error, click.NoSuchOption):
        typed = error.option_name
        elsewhere.refuse_gone(typed.lstrip("-").replace("-", "_"), f"{where}{typed}")
        known = () if context is None else context.command.get_params(context)
        # Without hyphens, which would make all names similar.
        names = [name[2:] for param in known for name in param.opts if name[:2] == "--"]
        see = f"see `fleetrun {where[:-2]} --help`."
        return f"{where}no such option: {typed}{suggestion(typed.lstrip('-'), names, see, '--')}"
    if context is not None and isinstance(context.command, click.Group):
        return f"{where}give one of {', '.join(context.command.commands)}."
    return f"{where}{message[:1].lower()}{message[1:]}."
