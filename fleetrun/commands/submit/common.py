"""Shared by all queues: the launch after `--`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from fleetrun.cli import argv, parser, types
from fleetrun.cli.option import Option
from fleetrun.cli.options import find
from fleetrun.errors import UsageError

# Launch options that the queue decides.
_OURS = (*("ips", "master", "nnodes", "rank", "host", "detach", "hosts", "hostfile"),)


class QueueCommand(click.Command):
    """A command whose own options stand before `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ARGS; UsageError for a word before `--` that belongs to no option."""
        at = args.index("--") if "--" in args else len(args)
        stray = self.make_parser(ctx).parse_args(args[:at])[0].get("words")
        if at < len(args) and isinstance(stray, tuple) and stray:
            raise UsageError(
                f"submit {self.name}: before --, {stray[0]} belongs to no option; a value is one "
                "word (--time=10h), and the launch stands after --."
            )
        return super().parse_args(ctx, args)


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return a reader of texts that PATTERN matches completely; its error says EXPECTED."""

    def read(text: str) -> str:
        if re.fullmatch(pattern, text, re.DOTALL) is None:
            raise ValueError(f"{expected}.")
        return text

    return read


_word = matching(r"\S+", "give one word without blanks")
# A single word, and several of them.
WORD, WORDS = types.Type("text", _word), types.Type("texts", _word)


def option(name: str, kind: types.Type, metavar: str, text: str, **more: Any) -> Option:  # noqa: ANN401 - those of parser.option
    """Return the option --NAME of a KIND."""
    return parser.option(name, kind, text, metavar=metavar, **more)


# The words after `--`: the `fleetrun` command on each host.
COMMAND_LINE = click.Argument(
    ["words"], nargs=-1, type=click.UNPROCESSED, metavar="-- ARGUMENTS..."
)


def launch(words: Sequence[str], command: str, *, most: int | None = None) -> argv.ParsedCommand:
    """Return WORDS, those of `fleetrun` on each host, parsed as on the hosts.

    A job of MOST hosts may be elastic: --nnodes=MIN:MOST.
    """
    if not words:
        raise UsageError(
            f"{command}: nothing to run: write `fleetrun {command} [its options] -- [fleetrun's "
            "options] train.py [its arguments]`."
        )
    parsed = argv.split(words)
    for given in parsed.given:
        if given.name == "nnodes" and most is not None:
            if not given.raw.endswith(f":{most}"):
                raise UsageError(
                    f"{command}: {given.typed}={given.raw}: the job has --nodes={most}; "
                    f"--nnodes=MIN:{most} lets the job continue with fewer."
                )
        elif given.name == "dry_run":
            raise UsageError(
                f"{command}: {given.typed} after -- starts nothing there: write it before --."
            )
        elif given.name in _OURS:
            raise UsageError(f"{command}: {given.typed} comes from the queue; leave it out.")
        find(given.name).read(given)
    if parsed.script is None:
        raise UsageError(f"{command}: {words[-1]} is not a script; name one.")
    return parsed


def name(parsed: argv.ParsedCommand) -> str:
    """Return the job's name, which is that of the script."""
    script = os.path.basename(parsed.script.target) if parsed.script else ""
    return os.path.splitext(script)[0] or "fleetrun"
