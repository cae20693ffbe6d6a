"""Common to all queues: the words after `--`, and the site's settings."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from fleetrun import argv, configfile, options, suggestions, yamlfile
from fleetrun.errors import UsageError
from fleetrun.records import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Launch options that the queue decides here.
_OURS = (
    *("ips", "master", "nnodes", "rank", "host", "detach", "from_manifest"),
    *("hosts", "hostfile", "include", "exclude"),
)


def config() -> click.Option:
    """Return the option that names the config file; `launch` hands it on."""
    row = options.find("config")
    return click.Option([row.flag], metavar=row.metavar, help="The config file.", is_eager=True)


def command_line() -> click.Argument:
    """Return the argument for the words after `--`: the `fleetrun` command on each host.

    With it `submit:` of the config file, which --config names before `--` or behind it, becomes
    what is not typed; the launch reads the rest of that file.
    """
    return click.Argument(
        ["words"],
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="-- ARGUMENTS...",
        # Before options take their defaults.
        is_eager=True,
        callback=_with_site,
    )


def _with_site(
    ctx: click.Context,
    _param: click.Parameter,
    words: tuple[str, ...],
) -> tuple[str, ...]:
    """Return WORDS with the site's settings as defaults."""
    given = argv.scan(words).settings
    named = [one.raw for one in given if one.option.name == "config" and one.raw][-1:]
    named = [*filter(None, [ctx.params.get("config")]), *named]
    if len(named) > 1:
        raise UsageError(
            f"submit {ctx.command.name}: --config={named[0]} and, after --, --config={named[1]}: "
            "give one of them."
        )
    ctx.default_map = dict(site(named[0] if named else None, ctx.command))
    return words


def launch(
    given: Sequence[str], what: str, config: object = None, *, most: int | None = None
) -> argv.ParsedCommand:
    """Return GIVEN, the words of `fleetrun` on each host, read as it will read them there.

    They begin with CONFIG, the config file, where it was named before them. Of MOST hosts the job
    may go on with fewer, as --nnodes=MIN:MAX says.
    """
    if not given:
        raise UsageError(
            f"{what}: nothing to run: write `fleetrun {what} [its options] -- [fleetrun's "
            "options] train.py [its arguments]`."
        )
    parsed = argv.split(given if config is None else (f"--config={config}", *given))
    for setting in parsed.settings:
        if setting.option.target == "nnodes" and most is not None:
            if not setting.raw.endswith(f":{most}"):
                raise UsageError(
                    f"{what}: {setting.typed}={setting.raw}: the job has --nodes={most}; "
                    f"--nnodes=MIN:{most} lets the job continue with fewer."
                )
        elif setting.option.target in _OURS:
            raise UsageError(f"{what}: {setting.typed} is what the queue says; leave it out.")
        setting.value()
    if parsed.script is None:
        raise UsageError(f"{what}: {given[-1]} runs nothing; give a script.")
    return parsed


def name(parsed: argv.ParsedCommand) -> str:
    """Return the job's name, that of the script."""
    target = parsed.script.target if parsed.script else ""
    return os.path.splitext(os.path.basename(target))[0] or "fleetrun"


class Form(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """Text that FITS; UsageError says what is WANTED, and names a SECRET value only."""

    def __init__(
        self, fits: Callable[[str], object], wanted: str, *, is_secret: bool = False
    ) -> None:
        self._fits, self._wanted, self._is_secret = fits, wanted, is_secret
        self.name = "text"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return VALUE as it is."""
        assert param is not None
        assert ctx is not None
        return self.checked(str(value), f"submit {ctx.command.name}: --{param.name}")

    def checked(self, text: str, what: str) -> str:
        """Return TEXT, the value of WHAT."""
        if not self._fits(text):
            shown = text.partition("=")[0] if self._is_secret else text
            shown = shown if text.isprintable() else repr(shown)
            raise UsageError(f"{what}={shown}: {self._wanted}.")
        return text


WORD = Form(
    lambda text: text.isprintable() and len(text.split()) == 1 and text == text.strip(),
    "give one word without blanks",
)


def option(
    name: str, form: Form, metavar: str, text: str, default: str | None = None
) -> click.Option:
    """Return the option NAME, whose value has a FORM; one that is `(repeatable)` has several."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    return click.Option(
        [*spellings],
        type=form,
        metavar=metavar,
        help=text,
        default=default,
        show_default=default is not None,
        multiple="(repeatable)" in text,
    )


def site(named: str | None, command: click.Command) -> Mapping[str, str | list[str]]:
    """Return the settings for COMMAND in the file NAMED, under `submit:` and its name.

    None is fleetrun.yaml, if it is there. What it lacks is taken from the user's own. Raises
    UsageError as file:line.
    """
    here = configfile.DEFAULT if os.path.exists(configfile.DEFAULT) else None
    paths = (configfile.of_user(os.environ), named or here)
    return {
        name: value
        for path in paths
        if path is not None
        for name, value in _site(path, command).items()
    }


def _site(path: str, command: click.Command) -> Mapping[str, str | list[str]]:
    """Return the settings for COMMAND in the file at PATH."""
    from yaml import MappingNode, ScalarNode, SequenceNode  # only with a file

    with yamlfile.loading(yamlfile.text_of(path, "this config file"), path) as loader:
        node = loader.get_single_node()
    for level in (configfile.SUBMIT, command.name):
        if not isinstance(node, MappingNode):
            return {}
        node = next((value for key, value in node.value if key.value == level), None)
    if node is None:
        return {}
    if not isinstance(node, MappingNode):
        raise UsageError(f"{path}:{node.start_mark.line + 1}: write one `option: value` a line.")
    known = {param.name: param for param in command.params if isinstance(param, click.Option)}
    settings: dict[str, str | list[str]] = {}
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        param = known.get(str(key.value).replace("-", "_"))
        if param is None or param.name in {None, "dry_run", "config"}:
            meant = suggestions.ending(str(key.value), list(known), "see its --help.")
            raise UsageError(f"{where}: no such option of {command.name}: {key.value}{meant}")
        if isinstance(value, ScalarNode):
            settings[param.name] = [str(value.value)] if param.multiple else str(value.value)
        elif param.multiple and isinstance(value, SequenceNode | MappingNode):
            items = value.value
            pairs = isinstance(value, MappingNode)
            settings[param.name] = [
                f"{one[0].value}={one[1].value}" if pairs else str(one.value) for one in items
            ]
        else:
            raise UsageError(f"{where}: {key.value}: give one value.")
    return settings


def shown(words: Sequence[str]) -> tuple[str, ...]:
    """Return WORDS without the values of secrets, as they may be seen."""
    return tuple(arguments.conceal(words)[0])


def remark_on_secrets(words: Sequence[str]) -> None:
    """Remark if `shown` has hidden a part of WORDS."""
    if shown(words) != tuple(words):
        print(
            "fleetrun: secret values are shown as ***; without --dry-run they are handed in.",
            file=sys.stderr,
        )
