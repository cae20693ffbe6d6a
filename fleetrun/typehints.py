"""The names of typing that modules on the path of a launch need, without its import.

The import of typing takes a twentieth of a launch. Its `NamedTuple` compiles a constructor for each
class and checks each annotation, 80 µs in all, and a launch defines a hundred of them; here a class
takes 10, and nothing is compiled. No `from __future__ import annotations`, for the reason given in
`cli`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # Exported.
    from typing import Annotated as Annotated  # noqa: PLC0414
    from typing import Any as Any  # noqa: PLC0414
    from typing import NamedTuple as NamedTuple  # noqa: PLC0414
    from typing import NoReturn as NoReturn  # noqa: PLC0414
    from typing import TypeAlias as TypeAlias  # noqa: PLC0414
    from typing import cast as cast  # noqa: PLC0414

else:
    from _collections import _tuplegetter

    def _construct(_cls: "type[tuple[object, ...]]") -> "tuple[object, ...]":
        # Its parameters become the names of fields. Compiling a text takes as long as 50 calls.
        return tuple.__new__(_cls, tuple(locals().values())[1:])

    _Function = type(_construct)
    # Return the first field of a tuple, the second, ...
    _getters: list[object] = []

    class _Record(tuple):
        __slots__ = ()

        def __new__(cls, /, *values: object, **named: object) -> "_Record":  # noqa: PYI034 - a checker reads typing's
            if not named and len(values) == len(cls._fields):
                return tuple.__new__(cls, values)
            owner = next(kind for kind in cls.__mro__ if "_fields" in vars(kind))
            names = ("_cls", *owner._fields)
            code = _construct.__code__.replace(
                co_argcount=len(names), co_nlocals=len(names), co_varnames=names
            )
            made = _Function(code, globals(), "__new__", tuple(owner._field_defaults.values()))
            made.__qualname__ = f"{owner.__qualname__}.__new__"
            owner.__new__ = staticmethod(made)
            return cls.__new__(cls, *values, **named)

        @classmethod
        def _make(cls, values: "Iterable[object]") -> "_Record":
            made = tuple.__new__(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, /, **named: object) -> "_Record":
            made = self._make(map(named.pop, self._fields, self))
            if named:
                raise ValueError(f"Got unexpected field names: {list(named)!r}")
            return made

        def _asdict(self) -> "dict[str, object]":
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            shown = (f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({', '.join(shown)})"

        def __getnewargs__(self) -> "tuple[object, ...]":
            return tuple(self)

    _METHODS = {
        name: value
        for name, value in vars(_Record).items()
        if name not in {"__doc__", "__module__"}
    }

    class _Maker(type):
        def __new__(cls, name: str, bases: "tuple[type, ...]", members: "dict[str, Any]") -> type:
            if not bases:
                return super().__new__(cls, name, bases, members)
            fields = tuple(members.get("__annotations__", ()))
            defaults = {field: members[field] for field in fields if field in members}
            while len(_getters) < len(fields):
                _getters.append(_tuplegetter(len(_getters), None))
            members.update(zip(fields, _getters, strict=False))
            members["__slots__"], members["_field_defaults"] = (), defaults
            members["_fields"] = members["__match_args__"] = fields
            # No _Maker: what derives from it is an ordinary class. No common base: each class looks
            # for some 90 names in all of its bases when it is made.
            return type(name, (tuple,), {**_METHODS, **members})

    class NamedTuple(metaclass=_Maker):
        """As typing's, to derive from."""

    class Annotated:
        """As typing's, but `Annotated[KIND, TEST]` is a class, so that `|` takes it."""

        def __class_getitem__(cls, given: "tuple[Any, ...]") -> type:
            return type("Annotated", (), {"__origin__": given[0], "__metadata__": given[1:]})

    # In annotations only.
    Any = NoReturn = TypeAlias = object

    def cast(kind: object, value: object) -> object:
        """Return VALUE, as typing's does."""
        del kind
        return value
