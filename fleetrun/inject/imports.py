"""Calls a function when a module has just been imported, before its importer goes on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Then = Callable[[ModuleType], None]

_waiting: dict[str, list[Then]] = {}
# What is told of a module that is not as it was expected.
_told: list[Callable[[str], None]] = []


def on_failure(tell: Callable[[str], None]) -> None:
    """Call TELL with a sentence when somebody fails who was called after an import."""
    _told.append(tell)


def after_import(name: str, then: Then) -> None:
    """Call THEN with the module NAME right after it was executed, at once if it is there."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _call(then, module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(then)


def _call(then: Then, module: ModuleType) -> None:
    try:
        then(module)
    except Exception as error:
        text = f"this {module.__name__} cannot be changed as the strategy needs it: {error!r}"
        for tell in _told:
            tell(text)


class _Finder:
    """Lets the others find the module, and puts itself between it and its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what the finders after this one find."""
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, name)
                return spec  # type: ignore[no-any-return]
        return None


class _Loader:
    """A module's own loader, and afterwards those who wait for the module."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Do as the loader does."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call those who wait."""
        # What is seen of the module afterwards is as without us.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for then in _waiting.pop(self._name, []):
            _call(then, module)
        if not _waiting:
            sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]
