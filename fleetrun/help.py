"""What click shows of the option table: the help text and the shells' completion."""

from __future__ import annotations

import click
from click import shell_completion
from click.shell_completion import CompletionItem

from fleetrun import argv, options
from fleetrun.cli import COMMANDS, COMPLETE_VARIABLE
from fleetrun.errors import UsageError
from fleetrun.printing import put
from fleetrun.strategy import fields, load
from fleetrun.strategy_commands import OPTIONS as STRATEGY_OPTIONS
from fleetrun.tune import wishes

SHELLS = ("bash", "zsh", "fish")

# What the shells source. Unlike click's own: nothing is put behind a word that ends in =, the
# command is run as it was typed (.venv/bin/fleetrun), and values may hold commas.
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' response type value
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
        %(complete_var)s=bash_complete $1 2>/dev/null)
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $type == plain ]]; then
            COMPREPLY+=("$value")
            if [[ $value == *= ]]; then compopt -o nospace; fi
        fi
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_ZSH = """\
#compdef %(prog_name)s
%(complete_func)s() {
    local -a plain unfinished described response
    local type key descr
    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
        %(complete_var)s=zsh_complete ${(Q)words[1]} 2>/dev/null)}")
    for type key descr in ${response}; do
        case $type in
            plain)
                if [[ $key == *= ]]; then unfinished+=("$key")
                elif [[ $descr == _ ]]; then plain+=("$key")
                else described+=("$key:$descr"); fi ;;
            dir) _path_files -/ ;;
            file) _path_files -f ;;
        esac
    done
    if (( $#described )); then _describe -V unsorted described -U; fi
    if (( $#plain )); then compadd -U -V unsorted -a plain; fi
    if (( $#unfinished )); then compadd -U -V unsorted -S '' -a unfinished; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH = """\
function %(complete_func)s
    set -l typed (commandline -opc)
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \\
        COMP_CWORD=(commandline -t) $typed[1] 2>/dev/null)
    for completion in $response
        set -l metadata (string split -m 1 "," $completion)
        switch $metadata[1]
            case dir
                __fish_complete_directories $metadata[2]
            case file
                __fish_complete_path $metadata[2]
            case plain
                echo $metadata[2]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""

_PROGRAM = "fleetrun"
_WIDTH = 100
_USAGE = "[OPTIONS] [--] SCRIPT [ARGUMENTS]..."
_EXAMPLES = (
    ("fleetrun train.py", "one process per device"),
    ("fleetrun --gpus=0,1 train.py --epochs 3", "two processes; --epochs is the script's"),
    ("fleetrun --nproc_per_node=2 -m pkg.train", "a module, two processes (also without GPUs)"),
    ("fleetrun --ips=10.0.0.1,10.0.0.2 train.py", "two hosts; the same command on each"),
    ("fleetrun --dry-run --gpus=0-7 train.py", "what would run, and why"),
    ("fleetrun --strategy=comm_fusion train.py", "with fused allreduces, train.py as it is"),
    ("fleetrun strategy list|show|explain ...", "presets, fields, and what comes of them"),
    ("fleetrun tune --vary KEY=A,B train.py", "the fastest values, by training with each"),
    ("fleetrun completion bash|zsh|fish", "completion for the shell, to be sourced"),
)
EXIT_CODES = (
    ("0", "every process ended well"),
    ("N", "the exit code of the process that failed first"),
    ("128+N", "signal N killed the process that failed first"),
    ("124", "the job hung, and --hang_timeout was given"),
    ("126, 127", "a process could not be started: not a program, or there is none"),
    ("129, 130, 143", "fleetrun lost its terminal, was interrupted (Ctrl-C) or stopped (SIGTERM)"),
    ("2", "the command line, a variable or the config file asks for what cannot be"),
    ("3", "the host is not as the command needs it: device, port, script, system"),
    ("4", "hosts did not find each other"),
    ("5", "--strategy_strict: something asked for is not in effect; the report says what"),
)
_SWITCHES = (
    ("bash", 'eval "$(fleetrun completion bash)" in ~/.bashrc'),
    ("zsh", 'eval "$(fleetrun completion zsh)" in ~/.zshrc, after compinit'),
    ("fish", "fleetrun completion fish > ~/.config/fish/completions/fleetrun.fish"),
)
_NOTES = (
    "Options may be written with _ or -, as --x=v or --x v. Everything after SCRIPT is its own.",
    "What counts: command line, then environment, then config file, then default.",
)


class _Bash(shell_completion.BashComplete):
    source_template = _BASH


class _Zsh(shell_completion.ZshComplete):
    source_template = _ZSH


class _Fish(shell_completion.FishComplete):
    source_template = _FISH


_SHELL_CLASSES: dict[str, type[shell_completion.ShellComplete]] = {
    "bash": _Bash,
    "zsh": _Zsh,
    "fish": _Fish,
}


class Command(click.Command):
    """A command whose help has examples, groups and exit codes."""

    # One of options.SECTIONS, codes, or all.
    section = "all"

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the whole help text, or one section of it."""
        if self.section == "all":
            formatter.write_usage(ctx.command_path, _USAGE)
            formatter.write_paragraph()
            formatter.write_text(self.help or "")
            with formatter.section("Examples"):
                formatter.write_dl(_EXAMPLES, col_max=45)
        groups = options.SECTIONS.get(self.section)
        for group in options.GROUPS if self.section == "all" else filter(None, (groups,)):
            self._format_group(group, formatter)
        if self.section in {"all", "codes"}:
            with formatter.section("Exit codes"):
                formatter.write_dl(EXIT_CODES)
        if self.section == "all":
            with formatter.section("Completion by Tab"):
                formatter.write_dl(_SWITCHES)
        formatter.write_paragraph()
        for note in _NOTES:
            formatter.write_text(note)

    def _format_group(self, group: str, formatter: click.HelpFormatter) -> None:
        shown = dict(zip(options.TABLE, self.params, strict=True))
        with formatter.section(group):
            rows = [_row(option, shown[option]) for option in shown if option.group == group]
            if group == options.LATER:
                # Only so that people find the name they know; no use can be made of it yet.
                formatter.write_text(", ".join(name for name, _ in rows))
            else:
                formatter.write_dl(rows)


def command() -> Command:
    """Return the option table as a click command."""
    return Command(
        _PROGRAM,
        help="Start PaddlePaddle training: one process per device, on one host or several.",
        params=[_parameter(option) for option in options.TABLE],
        add_help_option=False,
        context_settings={
            "allow_interspersed_args": False,
            "ignore_unknown_options": False,
            "allow_extra_args": True,
            "token_normalize_func": _normalize,
        },
    )


def text(section: str = "all") -> str:
    """Return the help text, or the SECTION of it, as wide as the terminal."""
    shown = command()
    shown.section = section
    with click.Context(shown, info_name=_PROGRAM, max_content_width=_WIDTH) as ctx:
        return ctx.get_help() + "\n"


def completion(words: list[str]) -> int:
    """Print the script that teaches a shell to complete fleetrun's command line."""
    shell = words[0] if len(words) == 1 else ""
    if shell in ("-h", "--help"):
        return put(f"Usage: fleetrun completion {'|'.join(SHELLS)}\n\n{_how_to_source()}\n")
    if shell not in SHELLS:
        raise UsageError(f"completion needs one shell's name: {', '.join(SHELLS)}.")
    return complete(f"{shell}_source")


def complete(instruction: str) -> int:
    """Do what a shell asks for by INSTRUCTION, click's word for it: bash_complete, zsh_source."""
    shell, _, task = instruction.partition("_")
    if shell not in _SHELL_CLASSES or task not in ("source", "complete"):
        raise UsageError(
            f"{COMPLETE_VARIABLE}={instruction}: give SHELL_source or SHELL_complete, "
            f"where SHELL is one of {', '.join(SHELLS)}."
        )
    spoken = _SHELL_CLASSES[shell](command(), {}, _PROGRAM, COMPLETE_VARIABLE)
    if task == "source":
        return put(f"{spoken.source()}\n")
    words, incomplete = spoken.get_completion_args()
    # Bash cuts words at = and : where other shells do not, and wants only the last piece back.
    if shell == "bash":
        words, incomplete = _rejoin(words, incomplete)
        cut = max(map(incomplete.rfind, "=:")) + 1
    else:
        cut = 0
    for item in candidates(words, incomplete):
        item.value = item.value[cut:] if item.type == "plain" else item.value
        click.echo(spoken.format_completion(item))
    return 0


def candidates(words: list[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return what may stand where INCOMPLETE stands, after WORDS.

    >>> [item.value for item in candidates(["--gpus=0"], "--nproc")]
    ['--nproc_per_node']
    """
    if words and words[0] in COMMANDS:
        return _after(words[0], words[1:], incomplete)
    files = [CompletionItem(incomplete, type="file")]
    found = _launch(words, incomplete, options.TABLE)
    if found is None and incomplete and not words:
        return files + _words(tuple(COMMANDS), incomplete)
    return files if found is None else found


def _launch(
    words: list[str], incomplete: str, table: tuple[options.Option, ...]
) -> list[CompletionItem[str]] | None:
    """Return options of TABLE or their values; None where a file or the script's words stand."""
    try:
        head = argv.scan(words, table)
    except UsageError:
        # A slip earlier in the line is no reason to fall silent; running it will tell.
        head = argv.Head((), (), None)
    if head.script_at is not None or words[-1:] == ["--"]:
        return None
    if head.pending is not None:
        return _values(head.pending.option, incomplete, "")
    typed, equals, value = incomplete.partition("=")
    if equals and typed.startswith("--"):
        option = options.by_name(table).get(_normalize(typed[2:]))
        return _values(option, value, f"{typed}=") if option else []
    return _options(incomplete, table) if incomplete.startswith("-") else None


def _after(name: str, words: list[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return what may stand after the command NAME and WORDS."""
    files = [CompletionItem(incomplete, type="file")]
    match name, words:
        case "completion", []:
            return _words((*SHELLS, "--help"), incomplete) if incomplete else _words(SHELLS, "")
        case "completion", _:
            return []
        case "strategy", []:
            views = (*STRATEGY_OPTIONS, *(("--help",) if incomplete else ()))
            return _words(views, incomplete)
        case "strategy", [view, *others]:
            return _view(view, others, incomplete)
        case "tune", _:
            table = (*wishes.OWN, *options.TABLE)
            found = _launch(words, incomplete, table)
            return files if found is None else found
        case _:
            # Other commands take a launch's options.
            found = _launch(words, incomplete, options.TABLE)
            return files if found is None else found


def _view(view: str, words: list[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return what may stand after `fleetrun strategy VIEW` and WORDS."""
    flags = {**STRATEGY_OPTIONS.get(view, {}), "--help": ()}
    if words and flags.get(words[-1]):
        return _words(flags[words[-1]], incomplete)
    typed, equals, _ = incomplete.partition("=")
    if equals:
        return _words(tuple(f"{typed}={word}" for word in flags.get(typed, ())), incomplete)
    if incomplete.startswith("-"):
        return _words(tuple(flags), incomplete)
    files = [CompletionItem(incomplete, type="file")]
    match view:
        case "show":
            names = (*load.PRESETS, *_field_names(), *fields.VARIABLE_SECTIONS)
            return files + _words(tuple(dict.fromkeys(names)), incomplete)
        case "explain" | "validate":
            return files + _words(load.PRESETS, incomplete)
        case _:
            return []


def _field_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields.TABLE)


def _normalize(name: str) -> str:
    """Write NAME as the table does."""
    return name.replace("-", "_")


def _parameter(option: options.Option) -> click.Option:
    """Turn OPTION into click's kind of option; its values stay texts, as ours do at first."""
    spellings = [f"--{name}" for name in (option.name, *option.aliases)]
    spellings += ["-h"] if option.name == "help" else []
    # Words, so that a name like "set" or "help" cannot meet a keyword or an attribute.
    declared = (*spellings, f"option_{option.name}")
    match option.kind:
        case "flag":
            return click.Option(declared, is_flag=True, help=option.help)
        case "pairs":
            return click.Option(declared, multiple=True, metavar=option.metavar, help=option.help)
        case _ if option.bare is not None:
            # Without is_flag=False click takes it for a flag that allows no value.
            return click.Option(
                declared,
                is_flag=False,
                flag_value=option.bare,
                metavar=option.metavar,
                help=option.help,
            )
        case _:
            return click.Option(declared, metavar=option.metavar, help=option.help)


def _row(option: options.Option, parameter: click.Parameter) -> tuple[str, str]:
    """Return OPTION's line of the help text."""
    spellings = [option.flag, *(f"--{alias}" for alias in option.aliases)]
    if option.kind == "flag":
        value = ""
    elif option.bare is not None:
        value = f"[={parameter.metavar}]"
    else:
        value = f" {parameter.metavar}"
    shown = [option.help]
    if option.default not in (None, "false"):
        shown.append(f"[default: {option.default}]")
    if option.env:
        shown.append(f"[{', '.join(f'${name}' for name in option.env)}]")
    return ", ".join(spellings) + value, "  ".join(shown)


def _options(incomplete: str, table: tuple[options.Option, ...]) -> list[CompletionItem[str]]:
    """Return the options that start as INCOMPLETE does, written with its kind of hyphen."""
    found = []
    for option in table:
        if option.status == "later":
            continue
        for name in (option.name, *option.aliases):
            flag = option.flag if name == option.name else f"--{name}"
            for spelling in dict.fromkeys((flag, f"--{name}", f"--{name.replace('_', '-')}")):
                if spelling.startswith(incomplete):
                    found.append(CompletionItem(spelling, help=option.help or None))
                    break
    return found


def _values(option: options.Option, incomplete: str, before: str) -> list[CompletionItem[str]]:
    """Return what OPTION's value may be; BEFORE is what stands before it in the same word."""
    match option.name:
        case "strategy":
            # Files first: bash would forget what came before them.
            earlier, comma, last = incomplete.rpartition(",")
            found = _words(load.PRESETS, last, before=before + earlier + comma)
            return [CompletionItem(before + incomplete, type=option.path), *found]
        case "set":
            return _knobs(incomplete, before)
        case "vary":
            key, equals, values = incomplete.partition("=")
            earlier, comma, last = values.rpartition(",")
            return _knobs(f"{key}{equals}{last}", before, between=earlier + comma)
    if option.path:
        return [CompletionItem(before + incomplete, type=option.path)]
    if option.kind in ("bool", "flag"):
        words: tuple[str, ...] = ("true", "false")
    else:
        words = option.words or ((option.bare,) if option.bare else ())
    return _words(words, incomplete, before=before)


def _knobs(incomplete: str, before: str, between: str = "") -> list[CompletionItem[str]]:
    """Return fields as KEY=, or the values of one; BETWEEN stands between its = and the last."""
    key, equals, value = incomplete.partition("=")
    known = _settable()
    if not equals:
        return _words(tuple(f"{name}=" for name in known), key, before=before)
    field = known.get(key)
    if field is None:
        return []
    words = {"bool": ("true", "false"), "choice": field.words}.get(field.kind, ())
    words += ("auto",) if field.auto else ()
    return _words(words, value, before=f"{before}{key}={between}")


def _settable() -> dict[str, fields.Field]:
    """Return what --set takes: fields, and parts of those that have parts."""
    found: dict[str, fields.Field] = {}
    for field in fields.TABLE:
        # A field of the strategy's sections needs no name of its section.
        parts = {f"{field.name}.{key.name}": key for key in field.keys}
        found |= parts or {field.name: field}
    return found


def _words(
    words: tuple[str, ...], incomplete: str, *, before: str = ""
) -> list[CompletionItem[str]]:
    """Return those of WORDS that start as INCOMPLETE does, after BEFORE in the same word."""
    return [CompletionItem(before + word) for word in words if word.startswith(incomplete)]


def _rejoin(words: list[str], incomplete: str) -> tuple[list[str], str]:
    """Put together what bash cut at = and :.

    >>> _rejoin(["--master", "a", ":", "1", "--dry-run"], "=")
    (['--master', 'a:1'], '--dry-run=')
    """
    joined: list[str] = []
    glued = False
    for word in (*words, incomplete):
        if joined and (glued or word in ("=", ":")):
            joined[-1] += word
        else:
            joined.append(word)
        glued = word in ("=", ":")
    return joined[:-1], joined[-1]


def _how_to_source() -> str:
    """Say what to write into which shell's start-up file."""
    return "\n".join(f"{shell + ':':<6}{what}" for shell, what in _SWITCHES)
