"""Checks whether a strategy can reach a script, by its command line; pure."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import os

from fleetrun.model import Script

# With any of these options, Python ignores PYTHONPATH or our start-up file.
_DEAF = {"I": "isolated", "E": "without its environment", "S": "without the module site"}
# These options take a value, perhaps as the next word.
_WITH_VALUE = frozenset("WX")
# After these options, words are no longer options of Python.
_LAST = frozenset("cm")


def obstacle(script: Script) -> str | None:
    """Return why no strategy can reach SCRIPT; None if nothing prevents it.

    >>> obstacle(Script("file", "python3", ("-uI", "train.py")))
    'the strategy cannot reach the script: python3 -I runs isolated; leave -I out.'
    >>> obstacle(Script("file", "python3", ("train.py", "-I")))
    """
    name = os.path.basename(script.target)
    if script.form != "file" or not is_python(name):
        return None
    is_value = False
    for word in script.args:
        if is_value:
            is_value = False
            continue
        if not word.startswith("-") or word.startswith("--"):
            return None
        for at, letter in enumerate(word[1:], 2):
            if letter in _DEAF:
                return (
                    f"the strategy cannot reach the script: {name} -{letter} runs "
                    f"{_DEAF[letter]}; leave -{letter} out."
                )
            if letter in _LAST:
                return None
            if letter in _WITH_VALUE:
                is_value = at == len(word)
                break
    return None


def is_python(name: str) -> bool:
    """Whether NAME is the name of a Python interpreter.

    >>> is_python("python3.11"), is_python("pythonic"), is_python("train.py")
    (True, False, False)
    """
    rest = name.removeprefix("python")
    return rest != name and not rest.strip("0123456789.")
