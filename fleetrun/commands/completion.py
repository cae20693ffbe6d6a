"""`fleetrun completion`: the scripts that shells source; `answers` has the completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click import shell_completion

from fleetrun import options
from fleetrun.commands import help as help_text
from fleetrun.commands import parser
from fleetrun.printing import put
from fleetrun.records.variables import COMPLETE

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete

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
_SHELL = options.Option("shell", "choice", "", "", "", words=tuple(_SHELL_CLASSES))


@click.command(
    "completion",
    help="Print the script that makes a shell complete fleetrun's command line.",
    epilog="\b\n" + "\n".join(f"{shell + ':':<6}{text}" for shell, text in help_text.COMPLETION),
)
@click.argument("shell", type=parser.Typed(_SHELL), metavar="|".join(_SHELL_CLASSES))
def command(shell: str) -> int:
    """Print the script for SHELL."""
    return put(script(shell))


def script(shell: str) -> str:
    """Return the script for SHELL."""
    return f"{_SHELL_CLASSES[shell](click.Command(_PROGRAM), {}, _PROGRAM, COMPLETE).source()}\n"
