"""The names of typing that modules on the path of a launch need, without its import.

The import of typing takes a twentieth of a launch. Its `NamedTuple` compiles a constructor for each
class and checks each annotation, 80 µs in all, and a launch defines a hundred of them; here a class
takes 10, and its constructor is compiled when some instances have been made: most have one or two.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # Exported.
    from typing import Annotated as Annotated  # noqa: PLC0414
    from typing import Any as Any  # noqa: PLC0414
    from typing import NamedTuple as NamedTuple  # noqa: PLC0414
    from typing import NoReturn as NoReturn  # noqa: PLC0414
    from typing import Protocol as Protocol  # noqa: PLC0414
    from typing import TypeAlias as TypeAlias  # noqa: PLC0414
    from typing import cast as cast  # noqa: PLC0414

else:
    from _collections import _tuplegetter

    # A compiled constructor is worth it from this instance on.
    _SEVERAL = 4
    # The instances of each class so far.
    _made: dict[type, int] = {}

    class _Record(tuple):
        __slots__ = ()
        _fields: tuple[str, ...] = ()
        _field_defaults: dict[str, Any] = {}  # noqa: RUF012 - as typing has it

        def __new__(cls, /, *values: object, **named: object) -> _Record:  # noqa: PYI034 - a checker reads typing's
            owner = next(kind for kind in cls.__mro__ if "_fields" in vars(kind))
            _made[owner] = _made.get(owner, 0) + 1
            given, rest = {**owner._field_defaults, **named}, owner._fields[len(values) :]
            is_valid = len(values) + len(rest) == len(owner._fields) and named.keys() <= set(rest)
            if _made[owner] < _SEVERAL and is_valid and given.keys() >= set(rest):
                return tuple.__new__(cls, (*values, *map(given.__getitem__, rest)))
            names = "".join(f"{name}, " for name in owner._fields)
            made = eval(f"lambda _cls, {names}: _new(_cls, ({names}))", {"_new": tuple.__new__})  # noqa: S307 - names of fields
            made.__defaults__ = tuple(owner._field_defaults.values())
            made.__name__, made.__qualname__ = "__new__", f"{owner.__qualname__}.__new__"
            owner.__new__ = staticmethod(made)
            return cls.__new__(cls, *values, **named)

        @classmethod
        def _make(cls, values: Iterable[object]) -> _Record:
            made = tuple.__new__(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, /, **named: object) -> _Record:
            made = self._make(map(named.pop, self._fields, self))
            if named:
                raise ValueError(f"Got unexpected field names: {list(named)!r}")
            return made

        def _asdict(self) -> dict[str, object]:
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            shown = (f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({', '.join(shown)})"

        def __getnewargs__(self) -> tuple[object, ...]:
            return tuple(self)

    class _Maker(type):
        def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, members)
            fields = tuple(members.get("__annotations__", ()))
            defaults = {field: members[field] for field in fields if field in members}
            getters = {field: _tuplegetter(at, None) for at, field in enumerate(fields)}
            members |= {"__slots__": (), "_field_defaults": defaults, **getters}
            members["_fields"] = members["__match_args__"] = fields
            # No _Maker: what derives from it is an ordinary class.
            return type(name, (_Record,), members)

    class NamedTuple(metaclass=_Maker):
        """As typing's, to derive from."""

    class Protocol:
        """As typing's, to derive from."""

    class Annotated:
        """As typing's, but `Annotated[KIND, TEST]` is a class, so that `|` takes it."""

        def __class_getitem__(cls, given: tuple[Any, ...]) -> type:
            return type("Annotated", (), {"__origin__": given[0], "__metadata__": given[1:]})

    # In annotations only.
    Any = NoReturn = TypeAlias = object

    def cast(kind: object, value: object) -> object:
        """Return VALUE, as typing's does."""
        del kind
        return value
