"""Loads YAML with line numbers, and explains in one sentence what cannot be read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleetrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yaml import Mark, Node, SafeLoader


def text_of(path: str, what: str) -> str:
    """Return the text of the file at PATH, which is WHAT; UsageError if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: {what} cannot be read.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: {what} is not UTF-8 text.") from None


@contextmanager
def loading(text: str, path: str) -> Iterator[SafeLoader]:
    """Yield a loader of TEXT, found at PATH; UsageError for what it raises."""
    # Only imported for a YAML file.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        yield loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else at(path, mark)
        problem = getattr(error, "problem", None) or "there is a character that YAML does not allow"
        if mark is not None and text[mark.index : mark.index + 1] == "\t":
            problem = "there is a tab; indent with spaces"
        if "another document" in problem:
            message = f"{path}: there are several documents in it: give each a file of its own."
            raise UsageError(message) from None
        raise UsageError(f"{where}: this is not YAML: {problem}.") from None
    finally:
        loader.dispose()


def at(path: str, mark: Mark) -> str:
    """Return the position MARK as file:line; the text of an option has no lines."""
    return path if path.startswith("-") else f"{path}:{mark.line + 1}"


def is_null(node: Node) -> bool:
    """Whether NODE is null in YAML: null, ~ or nothing."""
    return str(node.tag).endswith(":null")
