"""`fleetrun completion`, and the answers to shells that have sourced its output."""

from __future__ import annotations

import os

import click
from click import shell_completion
from click.shell_completion import CompletionItem, ShellComplete

from fleetrun import argv, options
from fleetrun.commands import COMMANDS, parser, values
from fleetrun.commands import help as help_text
from fleetrun.errors import UsageError
from fleetrun.plan import kinds
from fleetrun.printing import put
from fleetrun.records.variables import COMPLETE

# The scripts that shells source. Unlike click's, they add no blank after a word that ends in =, run
# the command as it was typed (.venv/bin/fleetrun), complete both of its names, and allow commas in
# values.
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
complete -o nosort -F %(complete_func)s %(prog_name)s %(prog_name)sx
"""
_ZSH = """\
#compdef %(prog_name)s %(prog_name)sx
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
    compdef %(complete_func)s %(prog_name)s %(prog_name)sx
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
complete --no-files --command %(prog_name)s --command %(prog_name)sx \\
    --arguments "(%(complete_func)s)"
"""

_PROGRAM = "fleetrun"


def _with_script(base: type[ShellComplete], script: str) -> type[ShellComplete]:
    """Return BASE, one of click's shells, with our SCRIPT for it."""
    return type(base.__name__, (base,), {"source_template": script})


_SHELL_CLASSES = {
    "bash": _with_script(shell_completion.BashComplete, _BASH),
    "zsh": _with_script(shell_completion.ZshComplete, _ZSH),
    "fish": _with_script(shell_completion.FishComplete, _FISH),
}
SHELLS = tuple(_SHELL_CLASSES)
_SHELL = options.Option("shell", "choice", "", "", "", words=SHELLS)


@click.command(
    "completion",
    help="Print the script that makes a shell complete fleetrun's command line.",
    epilog="\b\n" + "\n".join(f"{shell + ':':<6}{text}" for shell, text in help_text.COMPLETION),
)
@click.argument("shell", type=parser.Typed(_SHELL), metavar="|".join(SHELLS))
def command(shell: str) -> int:
    """Print the script for SHELL."""
    return complete(f"{shell}_source")


def complete(instruction: str) -> int:
    """Answer a shell's INSTRUCTION in click's form: bash_complete, zsh_source."""
    shell, _, task = instruction.partition("_")
    if shell not in _SHELL_CLASSES or task not in ("source", "complete"):
        raise UsageError(
            f"{COMPLETE}={instruction}: give SHELL_source or SHELL_complete, "
            f"where SHELL is one of {', '.join(SHELLS)}."
        )
    shell_class = _SHELL_CLASSES[shell](click.Command(_PROGRAM), {}, _PROGRAM, COMPLETE)
    if task == "source":
        return put(f"{shell_class.source()}\n")
    words, incomplete = shell_class.get_completion_args()
    # Bash splits words at = and : unlike other shells, and replaces only the last piece.
    if shell == "bash":
        words, incomplete = _rejoin(words, incomplete)
        cut = max(map(incomplete.rfind, "=:")) + 1
    else:
        cut = 0
    for item in candidates(words, incomplete):
        item.value = item.value[cut:] if item.type == "plain" else item.value
        click.echo(shell_class.format_completion(item))
    return 0


def candidates(words: list[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return the completions of INCOMPLETE after WORDS.

    >>> [item.value for item in candidates(["--gpus=0"], "--nproc")]
    ['--nproc_per_node']
    """
    command = parser.load(words[0]) if words and words[0] in COMMANDS else None
    if command is not None and not isinstance(command, parser.LaunchCommand):
        return _of_command(command, words, incomplete)
    if command is None:
        items = _launch(words, incomplete, (*options.TABLE, *_of_kinds()))
    else:
        items = _launch(words[1:], incomplete, command.rows())
    if items is not None:
        return items
    files = [CompletionItem(incomplete, type="file")]
    return files if words or not incomplete else files + values.among(COMMANDS, incomplete)


def _of_command(
    command: click.Command, words: list[str], incomplete: str
) -> list[CompletionItem[str]]:
    """Return click's completions after WORDS, the first of which is COMMAND's name."""
    click_shell = _SHELL_CLASSES["bash"](
        command, dict(parser.SETTINGS), f"{_PROGRAM} {words[0]}", COMPLETE
    )
    items = click_shell.get_completions(words[1:], incomplete)
    typed, equals, _ = incomplete.partition("=")
    if equals and typed.startswith("-"):
        # Shells replace the whole word, and click knows only its value.
        for item in items:
            item.value = f"{typed}={item.value}"
    return items


def _launch(
    words: list[str], incomplete: str, table: tuple[options.Option, ...]
) -> list[CompletionItem[str]] | None:
    """Return options of TABLE or their values; None for a file or the script's words."""
    try:
        head = argv.scan(words, table)
    except UsageError:
        # Complete after an earlier mistake, too; running the line reports it.
        head = argv.ParsedOptions((), (), None)
    if head.script_at is not None or words[-1:] == ["--"]:
        return None
    if head.pending is not None:
        return values.of(head.pending.option, incomplete, "")
    typed, equals, value = incomplete.partition("=")
    if equals and typed.startswith("--"):
        option = options.by_name(table).get(typed[2:].replace("-", "_"))
        return values.of(option, value, f"{typed}=") if option else []
    return _options(incomplete, table) if incomplete.startswith("-") else None


def _of_kinds() -> list[options.Option]:
    """Return the options of the known device kinds and of the exported one."""
    names = dict.fromkeys((*kinds.VENDORS, os.environ.get(kinds.XCCL, "")))
    known = options.by_name()
    rows = [options.of_kind(f"{kind}s", "all") for kind in names if f"{kind}s" not in known]
    return [row for row in rows if row is not None]


def _options(incomplete: str, table: tuple[options.Option, ...]) -> list[CompletionItem[str]]:
    """Return the options that start with INCOMPLETE, spelled with its kind of hyphens."""
    items = []
    for option in table:
        if option.status == "later":
            continue
        for name in (option.name, *option.aliases):
            flag = option.flag if name == option.name else f"--{name}"
            for spelling in dict.fromkeys((flag, f"--{name}", f"--{name.replace('_', '-')}")):
                if spelling.startswith(incomplete):
                    items.append(CompletionItem(spelling, help=option.help or None))
                    break
    return items


def _rejoin(words: list[str], incomplete: str) -> tuple[list[str], str]:
    """Rejoin the words that bash split at = and :.

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
