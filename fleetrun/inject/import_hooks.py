"""Callbacks right after a module was executed, and before and after calls of methods."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Callback = Callable[[ModuleType], object]

_callbacks: dict[str, list[Callback]] = {}
# The modules whose callbacks have been called.
_executed: set[str] = set()
_failure_callbacks: list[Callable[[str, str], None]] = []


def on_failure(callback: Callable[[str, str], None]) -> None:
    """Call CALLBACK with a sentence and a module's name if a callback after an import raises.

    The module is the one that defines the callback that has raised.
    """
    _failure_callbacks.append(callback)


def after_import(name: str, callback: Callback) -> None:
    """Call CALLBACK with the module NAME right after its execution; now if it is imported."""
    module = sys.modules.get(name)
    is_initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if module is not None and (name in _executed or not is_initializing):
        _call(callback, module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _callbacks.setdefault(name, []).append(callback)


def watch_method(
    kind: Any,
    name: str,
    *,
    before: Callable[[Any], object] | None = None,
    after: Callable[[Any], object] | None = None,
) -> None:
    """Call BEFORE and AFTER with the object around each call of the method NAME of the class KIND.

    AFTER is not called if the method raises.
    """
    method = getattr(kind, name)

    @functools.wraps(method)
    def watched(owner: Any, /, *args: Any, **options: Any) -> Any:
        if before is not None:
            before(owner)
        result = method(owner, *args, **options)
        if after is not None:
            after(owner)
        return result

    setattr(kind, name, watched)


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace the function NAME of OWNER by the decorated one, which gets the original first.

    This costs one call more than a plain replacement: too much for what runs per gradient.
    """
    original = getattr(owner, name)

    def replace(replacement: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            return replacement(original, *args, **options)

        setattr(owner, name, replaced)
        return replaced

    return replace


def _call(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:
        text = f"this {module.__name__} cannot be patched: {error!r}"
        function: Any = getattr(callback, "func", callback)
        for report in _failure_callbacks:
            report(text, function.__module__)


class _Finder:
    """Finds modules through the other finders, and gives them a loader that calls the callbacks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ask the other finders for NAME, if there are callbacks for it."""
        if name not in _callbacks:
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
    """Wraps a module's own loader and calls the callbacks after it."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Do the same as the module's own loader."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call the callbacks."""
        # The module keeps no trace of this loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _executed.add(self._name)
        for callback in _callbacks.pop(self._name, []):
            _call(callback, module)
        if not _callbacks:
            sys.meta_path[:] = [it for it in sys.meta_path if not isinstance(it, _Finder)]
