"""One option: a click option that knows how it was written, and where."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import click

from fleetrun.cli.types import FLAG, Type, Value
from fleetrun.errors import UsageError
from fleetrun.model import COMMAND_LINE, DEFAULT, DEFAULTS, Given, flag
from fleetrun.text import FALSE_WORDS, is_digits

# The groups of the help, by what --help= calls them.
GROUPS = {
    "common": "Most used",
    "strategy": "Strategy",
    "devices": "Devices",
    "hosts": "Hosts",
    "job": "Job and logs",
    "servers": "Parameter servers and heterogeneous trainers",
    "paddle": "Taken from Paddle's command lines, without effect here",
}


class Option(click.Option):
    """One option, called by any of NAMES; FIELD is the request's, if it is not the first name.

    Those of NAMES with a $ are variables, of which the first that is not empty counts. BARE is the
    value of an option that is written without one. HIDDEN are names that help does not list.
    REASON: why an option of Paddle's launchers has no effect.
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
        hidden: Iterable[str] = (),
        default: str | None = None,
        bare: str | None = None,
        reason: str = "",
    ) -> None:
        shown = [name for name in names.split() if not name.startswith("$")]
        self.env = [name[1:] for name in names.split() if name.startswith("$")]
        self.spellings = tuple(dict.fromkeys((*shown, *hidden)))
        self.label = self.spellings[0]
        self.field = field or self.label
        self.kind = kind
        self.group = group
        self.bare = "true" if kind is FLAG else bare
        self.reason = reason
        # KEY=VALUE; several add up.
        self.is_pair = kind.name in {"pairs", "fields"}
        self.is_repeatable = self.is_pair or kind.name == "texts"
        usual = DEFAULTS.get(self.field) if group else None
        if default is None and usual not in (None, ()):
            default = f"{usual:g}" if isinstance(usual, float) else str(usual).lower()
        is_flag = kind is FLAG
        self.usual = "false" if is_flag and default is None else default
        metavar = metavar or "|".join(kind.words) or kind.name.upper()
        # For an error message.
        self.wanted = kind.wanted or f"give {metavar}."
        super().__init__(
            [*map(flag, shown), self.field],
            type=kind,
            is_flag=is_flag,
            default=False if is_flag else default,
            show_default=default is not None and not is_flag,
            multiple=self.is_repeatable,
            metavar=None if is_flag else metavar,
            help=text,
        )

    def type_cast_value(self, ctx: click.Context, value: object) -> object:  # noqa: ARG002 - click's
        """Return VALUE, which click has found, as `read` reads it."""
        if self.is_repeatable and isinstance(value, list | tuple | None):
            return tuple(self.read(self.given(str(item))) for item in value or ())
        return None if value is None else self.read(self.given(str(value)))

    @property
    def value_shown(self) -> str:
        """Its value as help and pages write it after the option."""
        if self.kind is FLAG:
            return ""
        return f"[={self.metavar}]" if self.bare is not None else f" {self.metavar}"

    def takes_next(self, word: str) -> bool:
        """Whether WORD, standing after the option, is its value and not the script.

        An optional value never eats a script: only what can be nothing else is taken. A negative
        number is a value; any other word with a hyphen is more likely an option.
        """
        if word.startswith("-"):
            return self.bare is None and is_digits(word[1:])
        return self.bare is None or (self.kind is not FLAG and self.kind.parse(word) is not None)

    def given(self, raw: str, typed: str = "", source: str = "", spelling: str = "") -> Given:
        """Return the option as given: typed so, in SOURCE (the command line if empty).

        A ~ that begins a path becomes the home folder.
        """
        if self.kind.complete and "~" in raw:
            raw = ",".join(map(os.path.expanduser, raw.split(",")))
        typed, source = typed or self.opts[0], source or COMMAND_LINE
        spelling = spelling or self.label
        return Given(self.label, raw, typed, source, spelling, self.kind.name == "pairs")

    def of_environment(self, environ: Mapping[str, str], ignored: Iterable[str]) -> list[Given]:
        """Return what the first of its variables in ENVIRON says, but for IGNORED ones."""
        names = [name for name in self.env if environ.get(name, "").strip() and name not in ignored]
        return [self.given(environ[name], f"${name}", f"${name}") for name in names[:1]]

    def read(self, given: Given) -> Value:
        """Return the value of GIVEN; UsageError that says where it came from."""
        if given.source == DEFAULT and self.usual is None:
            return None
        try:
            return self.kind.read(given.raw)
        except ValueError as error:
            raise UsageError(given.blame(str(error))) from None

    def remarks(self, given: Given) -> Iterator[str]:
        """Yield why GIVEN has no effect or a hole."""
        if self.kind.name == "list" and not all(map(str.strip, given.raw.split(","))):
            # With `--ips=$A,$B` and an unset variable, the job would be smaller than meant.
            yield f"{given.typed}={given.raw} has an empty entry, which counts as not given."
        if self.reason and not is_off(given.raw):
            self.read(given)
            yield f"{given.typed} has no effect: {self.reason}"


def is_off(raw: str) -> bool:
    """Whether RAW says no to an option, as a variable exported once for all jobs does."""
    return raw.strip().lower() in {*FALSE_WORDS, "-1", "none", ""}


def by_spelling(options: Iterable[Option]) -> dict[str, Option]:
    """Map every spelling, with underscores and without hyphens, to its option."""
    return {name: option for option in options for name in option.spellings}
