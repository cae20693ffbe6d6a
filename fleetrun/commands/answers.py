"""The answers to shells that complete a command line, without click, which takes longer to load."""

from __future__ import annotations

import os
from shlex import shlex

import click

from fleetrun import argv, options
from fleetrun.commands import COMMANDS, values
from fleetrun.commands.values import Completion
from fleetrun.errors import UsageError
from fleetrun.plan import kinds
from fleetrun.printing import put
from fleetrun.records.variables import COMPLETE

SHELLS = ("bash", "zsh", "fish")


def answer(instruction: str) -> int:
    """Answer a shell's INSTRUCTION in click's form: bash_complete, zsh_source."""
    shell, _, task = instruction.partition("_")
    if shell not in SHELLS or task not in ("source", "complete"):
        raise UsageError(
            f"{COMPLETE}={instruction}: give SHELL_source or SHELL_complete, "
            f"where SHELL is one of {', '.join(SHELLS)}."
        )
    if task == "source":
        from fleetrun.commands import completion

        return put(completion.script(shell))
    words, incomplete = _typed(shell)
    # Bash splits words at = and : unlike other shells, and replaces only the last piece.
    cut = 0
    if shell == "bash":
        words, incomplete = _rejoin(words, incomplete)
        cut = max(map(incomplete.rfind, "=:")) + 1
    lines = []
    for candidate in candidates(words, incomplete):
        is_plain = candidate.type == "plain"
        value = candidate.value[cut:] if is_plain else candidate.value
        lines.append(_line(shell, candidate._replace(value=value)))
    return put("".join(lines))


def _typed(shell: str) -> tuple[list[str], str]:
    """Return the words that SHELL has before the one to complete, and that one."""
    words = _split(os.environ["COMP_WORDS"])
    if shell == "fish":
        incomplete = "".join(_split(os.environ["COMP_CWORD"])[:1])
        before = words[1:]
        # It is among the words, too.
        if incomplete and before[-1:] == [incomplete]:
            before.pop()
        return before, incomplete
    at = int(os.environ["COMP_CWORD"])
    return words[1:at], "".join(words[at : at + 1])


def _split(line: str) -> list[str]:
    """Split LINE as a shell does; the last word may lack its closing quote.

    >>> _split("fleetrun 'a b' --set='c d")
    ['fleetrun', 'a b', '--set=c d']
    """
    if not set(line).intersection("'\"\\"):
        return line.split()

    lexer = shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token)
    return words


def _line(shell: str, candidate: Completion) -> str:
    """Return CANDIDATE in the form that the script of SHELL reads."""
    value, kind, help_ = candidate
    if shell == "zsh":
        # Its script takes the first colon for the end of a value that has a description.
        return f"{kind}\n{value.replace(':', chr(92) + ':') if help_ else value}\n{help_ or '_'}\n"
    description = f"\t{help_}" if help_ and shell == "fish" else ""
    return f"{kind},{value}{description}\n"


def candidates(words: list[str], incomplete: str) -> list[Completion]:
    """Return the completions of INCOMPLETE after WORDS.

    >>> [candidate.value for candidate in candidates(["--gpus=0"], "--nproc")]
    ['--nproc_per_node']
    """
    if words and words[0] in COMMANDS:
        from fleetrun.commands import parser

        command = parser.load(words[0])
        if not isinstance(command, parser.LaunchCommand):
            return _of_command(command, words, incomplete)
        launch_completions = _launch(words[1:], incomplete, command.rows())
    else:
        launch_completions = _launch(words, incomplete, (*options.KNOWN, *_of_kinds()))
    if launch_completions is not None:
        return launch_completions
    files = values.files(incomplete)
    return files if words or not incomplete else files + values.among(COMMANDS, incomplete)


def _of_command(command: click.Command, words: list[str], incomplete: str) -> list[Completion]:
    """Return click's completions after WORDS, the first of which is COMMAND's name."""
    from click.shell_completion import ShellComplete

    from fleetrun.commands import parser

    shell = ShellComplete(command, dict(parser.SETTINGS), f"fleetrun {words[0]}", COMPLETE)
    completions = [
        Completion(item.value, item.type, item.help)
        for item in shell.get_completions(words[1:], incomplete)
    ]
    typed, equals, _ = incomplete.partition("=")
    if equals and typed.startswith("-"):
        # Shells replace the whole word, and click knows only its value.
        return [candidate._replace(value=f"{typed}={candidate.value}") for candidate in completions]
    return completions


def _launch(
    words: list[str], incomplete: str, table: tuple[options.Option, ...]
) -> list[Completion] | None:
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


def _options(incomplete: str, table: tuple[options.Option, ...]) -> list[Completion]:
    """Return the options that start with INCOMPLETE, spelled with its kind of hyphens."""
    completions = []
    for option in table:
        if option.group == options.LATER:
            continue
        for name in (option.name, *option.aliases):
            flag = option.flag if name == option.name else f"--{name}"
            for spelling in dict.fromkeys((flag, f"--{name}", f"--{name.replace('_', '-')}")):
                if spelling.startswith(incomplete):
                    completions.append(Completion(spelling, help=option.help or None))
                    break
    return completions


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
