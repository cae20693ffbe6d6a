"""`typehints`: what typing's `NamedTuple` and `cast` do, ours do."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest

from fleetrun import typehints


class Ours(typehints.NamedTuple):
    """A record."""

    name: str
    port: int = 80
    words: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """NAME:PORT."""
        return f"{self.name}:{self.port}"


class Theirs(typing.NamedTuple):
    """A record."""

    name: str
    port: int = 80
    words: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """NAME:PORT."""
        return f"{self.name}:{self.port}"


class Derived(Ours):
    """With a constructor of its base."""


class Empty(typehints.NamedTuple):
    """Without fields."""


def attempt(action: typing.Callable[[], object]) -> object:
    try:
        return action()
    except (TypeError, ValueError) as error:
        message = str(error).replace("Theirs", "Ours")
        # That of `_replace` is a TypeError from Python 3.13 on.
        return "Got unexpected" in message or type(error), message


ACTIONS: tuple[typing.Callable[[Any], object], ...] = (
    lambda kind: kind("a"),
    lambda kind: kind("a", words=("b",)),
    lambda kind: kind(),
    lambda kind: kind("a", 1, (), 2),
    lambda kind: kind("a", other=1),
    lambda kind: kind._make(["a", 1, ()]),
    lambda kind: kind._make("a"),
    lambda kind: kind("a")._replace(port=1),
    lambda kind: kind("a")._replace(other=1),
    lambda kind: kind("a")._asdict(),
    lambda kind: kind("a").shown,
    lambda kind: repr(kind("a")).partition("(")[2],
    lambda kind: hash(kind("a")),
    lambda kind: copy.deepcopy(kind("a")) == kind("a"),
    lambda kind: type(pickle.loads(pickle.dumps(kind("a")))) is kind,  # noqa: S301 - our own
    lambda kind: (kind._fields, kind._field_defaults, kind.__match_args__, kind.__doc__),
    lambda kind: list(kind.__annotations__),
    lambda kind: isinstance(kind("a"), tuple) and not hasattr(kind("a"), "__dict__"),
)


@pytest.mark.parametrize("at", range(len(ACTIONS)))
def test_it_does_what_typings_does(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first call makes the constructor.
    monkeypatch.setattr(Ours, "__new__", vars(Empty)["__new__"])
    for _ in range(2):
        assert attempt(lambda: ACTIONS[at](Ours)) == attempt(lambda: ACTIONS[at](Theirs))


def test_what_derives_from_one_is_made_by_its_constructor() -> None:
    assert (type(Derived("a")), Derived("a").shown, Empty()) == (Derived, "a:80", ())
    match Derived("a", 1):
        case Ours(name=name, port=1):
            assert name == "a"
