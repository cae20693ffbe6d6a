"""One option: a click option that knows how it was written, and where."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click

from fleetrun.cli.types import FLAG, Type, Value
from fleetrun.errors import UsageError
from fleetrun.model import COMMAND_LINE, DEFAULT, DEFAULTS, Given, flag
from fleetrun.text import is_digits

# The groups of the help, by what --help= calls them.
GROUPS = {
    "common": "Most used",
    "strategy": "Strategy",
    "devices": "Devices",
    "hosts": "Hosts",
    "job": "Job and logs",
    "servers": "Parameter servers and heterogeneous trainers",
    "about": "About",
    "paddle": "Taken from Paddle's command lines, without effect here",
    "later": "Not in this version: each answers with one sentence and exit code 2",
}
# Where a command that takes a launch has its own options, in click's context.
OWN = "fleetrun.own"
# Values that switch an option off, as a variable exported once for all jobs does.
_OFF = frozenset(("", "-1", "none", "0", "false", "no", "off", "n", "f"))

Kind = TypeVar("Kind", int, float, str, tuple[str, ...])


class Resolved(NamedTuple):
    """The value of an option, and what it came from."""

    value: Value
    given: Given

    def of(self, kind: type[Kind]) -> Kind | None:
        """Return the value if it is of KIND."""
        return self.value if isinstance(self.value, kind) else None


class Option(click.Option):
    """One option, called by any of NAMES; FIELD is the request's, if it is not the first name.

    BARE is the value of an option that is written without one. ENV are variables, of which the
    first that is not empty counts. REASON: why an option of Paddle's launchers has no effect, or,
    in the group `later`, what to do instead.
    """

    def __init__(
        self,
        names: str,
        kind: Type,
        group: str,
        metavar: str,
        text: str,
        *,
        field: str = "",
        env: tuple[str, ...] = (),
        default: str | None = None,
        bare: str | None = None,
        in_file: bool = True,
        reason: str = "",
    ) -> None:
        self.spellings = tuple(names.split())
        self.field = field or self.spellings[0]
        self.kind = kind
        self.group = group
        self.env = env
        self.bare = "true" if kind is FLAG else bare
        self.in_file = in_file
        self.reason = reason
        self.is_pair = kind.name in {"pairs", "fields"}
        self.is_repeatable = self.is_pair or kind.name == "texts"
        is_field = group != "" and self.field.removesuffix("_s") in self.spellings
        usual = DEFAULTS.get(self.field) if is_field else None
        if default is None and usual is not None and usual != ():
            default = f"{usual:g}" if isinstance(usual, float) else str(usual).lower()
        self.usual = "false" if kind is FLAG and default is None else default
        is_flag = kind is FLAG
        super().__init__(
            [*(flag(name) for name in self.spellings), self.field],
            type=kind,
            is_flag=is_flag,
            default=False if is_flag else default,
            show_default=default is not None and not is_flag,
            multiple=self.is_repeatable,
            metavar=None if is_flag else metavar or "|".join(kind.words) or kind.name.upper(),
            help=text,
        )

    def consume_value(
        self, ctx: click.Context, opts: Mapping[str, Any]
    ) -> tuple[object, click.core.ParameterSource]:
        """Return what `argv.scan` has read where the command takes a launch, else click's."""
        scanned: Sequence[Given] | None = ctx.meta.get(OWN)
        if scanned is None:
            return super().consume_value(ctx, opts)
        raws = [given.raw for given in scanned if given.name == self.label]
        if not raws:
            return self.get_default(ctx), click.core.ParameterSource.DEFAULT
        value = tuple(raws) if self.is_repeatable else raws[-1]
        return value, click.core.ParameterSource.COMMANDLINE

    @property
    def label(self) -> str:
        """Its first name, as in a config file."""
        return self.spellings[0]

    @property
    def flag(self) -> str:
        """Its first name, as help and messages write it."""
        return self.opts[0]

    @property
    def wanted(self) -> str:
        """What it takes, for an error message."""
        return self.kind.wanted(self.metavar)

    def takes_next(self, word: str) -> bool:
        """Whether WORD, standing after the option, is its value and not the script.

        An optional value never eats a script: only what can be nothing else is taken. A negative
        number is a value; any other word with a hyphen is more likely an option.
        """
        if word.startswith("-"):
            return self.bare is None and is_digits(word[1:])
        return self.bare is None or self.kind.fits(word)

    def needs_next(self, word: str | None) -> bool:
        """Whether the option lacks its value if WORD, or nothing, stands after it."""
        return self.bare is None and (word is None or not self.takes_next(word))

    def switches_off(self, raw: str) -> bool:
        """Whether RAW says no to the option."""
        return raw.strip().lower() in _OFF

    def given(self, raw: str, typed: str = "", source: str = "", spelling: str = "") -> Given:
        """Return the option as given: typed so, in SOURCE (the command line if empty).

        A ~ that begins a path becomes the home folder; UsageError if there is no such user.
        """
        typed = typed or self.flag
        is_variable = self.kind.name == "pairs"
        spelling = spelling or self.label
        given = Given(self.label, raw, typed, source or COMMAND_LINE, spelling, is_variable)
        if not self.kind.complete or "~" not in raw:
            return given
        # As in $PATH.
        between = ":" if source.startswith("$") and ":" in raw else ","
        paths = raw.split(between) if self.kind.name == "list" else [raw]
        return given._replace(raw=between.join(_at_home(path, given) for path in paths))

    def read(self, given: Given) -> Value:
        """Return the value of GIVEN; UsageError that says where it came from."""
        try:
            return self.kind.read(given.raw)
        except ValueError as error:
            raise UsageError(given.blame(str(error) or self.wanted)) from None

    def is_readable(self, raw: str) -> bool:
        """Whether the option takes RAW."""
        try:
            self.kind.read(raw)
        except ValueError:
            return False
        return True

    def of_environment(self, environ: Mapping[str, str], ignored: Iterable[str]) -> list[Given]:
        """Return what the first of its variables in ENVIRON says, but for IGNORED ones."""
        for name in self.env:
            raw = environ.get(name, "")
            if raw.strip() and name not in ignored:
                return [self.given(raw, f"${name}", f"${name}")]
        return []

    def by_default(self) -> Resolved:
        """Return the default."""
        given = self.given(self.usual or "", source=DEFAULT)
        return Resolved(None if self.usual is None else self.kind.read(self.usual), given)

    @property
    def value_shown(self) -> str:
        """Its value as help and pages write it after the option."""
        if self.kind is FLAG:
            return ""
        return f"[={self.metavar}]" if self.bare is not None else f" {self.metavar}"


def _at_home(path: str, given: Given) -> str:
    begin = path[: len(path) - len(path.lstrip())]
    home = os.path.expanduser(path.lstrip())
    if home.startswith("~"):
        user = home.partition("/")[0]
        problem = f"{user} is nobody's home folder here; for a file of that name write ./{home}."
        raise UsageError(given.blame(problem))
    return f"{begin}{home}"


def by_spelling(options: Iterable[Option]) -> dict[str, Option]:
    """Map every spelling, with underscores and without hyphens, to its option."""
    return {name: option for option in options for name in option.spellings}
