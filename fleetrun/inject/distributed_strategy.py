"""Sets the strategy in Paddle's DistributedStrategy, and records what the script sets there."""

from __future__ import annotations

import copy
import functools
import sys
import types
from typing import TYPE_CHECKING, Any

from . import settings
from .import_hooks import after_import, in_place_of, watch_method

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

_FLEET = "paddle.distributed.fleet"
# The attribute of a DistributedStrategy with the fields that the script has set, and the keys of
# dictionaries. Copies of the strategy inherit it.
_SCRIPT_FIELDS = "_fleetrun_script_fields"
# Attributes that are not named like their field.
_ATTRIBUTES = {
    "fuse_grad_size_in_TFLOPS": "_fuse_grad_size_in_TFLOPS",
    "calc_comm_same_stream": "_calc_comm_same_stream",
    "with_coordinator": "is_with_coordinator",
}
# Fields that only fleetrun implements: Paddle's are missing or wrong.
_OURS = ("fp16_allreduce", "bf16_allreduce")
_NAMES = {attribute: name for name, attribute in _ATTRIBUTES.items()}
# The fields that could not be put into a DistributedStrategy, and why.
misfits: dict[str, str] = {}


def install(spec: StrategySpec, _proof: Evidence) -> None:
    """Put the strategy into every DistributedStrategy, and record what the script sets."""
    injection = _Injection(spec)
    after_import(f"{_FLEET}.base.distributed_strategy", injection.patch_strategies)
    after_import(f"{_FLEET}.fleet", injection.patch_fleet)
    after_import(f"{_FLEET}.optimizer", injection.patch_optimizers)


class _Injection:
    """Patches Paddle so that every DistributedStrategy has our values."""

    def __init__(self, spec: StrategySpec) -> None:
        self._spec = spec
        self._module: Any = None

    def patch_strategies(self, module: ModuleType) -> None:
        """Give every new DistributedStrategy our values, and record what the script assigns."""
        self._module = module
        kind: Any = module.DistributedStrategy
        assign = kind.__setattr__

        def begin(strategy: Any) -> None:
            self.place(strategy)
            strategy.__dict__[_SCRIPT_FIELDS] = {}

        @functools.wraps(assign)
        def __setattr__(strategy: Any, name: str, value: Any) -> None:
            set_fields = strategy.__dict__.get(_SCRIPT_FIELDS)
            if set_fields is None or name.startswith("_Distributed") or _is_paddles():
                assign(strategy, name, value)
                return
            self._assign(strategy, set_fields, name, value, assign)

        @in_place_of(kind, "load_from_prototxt")
        def load_from_prototxt(load: Callable[..., None], strategy: Any, pb_file: str) -> None:
            names = [*self._spec.strategy, *self._spec.build_strategy]
            before = {name: _value(strategy, name) for name in names}
            load(strategy, pb_file)
            set_fields = strategy.__dict__.setdefault(_SCRIPT_FIELDS, {})
            for name, value in before.items():
                loaded = _value(strategy, name)
                if loaded != value:
                    parts = loaded if isinstance(loaded, dict) else {}
                    set_fields[name] = {key for key in parts if parts[key] != value.get(key)}

        watch_method(kind, "__init__", after=begin)
        kind.__setattr__ = __setattr__

    def patch_fleet(self, module: ModuleType) -> None:
        """Take over the strategy that the script passes to fleet."""
        kind: Any = module.Fleet
        init = kind.init
        self._take_of(kind, "init", 3)
        # Its methods are functions of the package, too.
        package: Any = sys.modules[_FLEET]
        if getattr(package.init, "__func__", None) is init:
            package.init = types.MethodType(kind.init, package.init.__self__)
        self._take_of(kind, "distributed_optimizer", 2)

    def patch_optimizers(self, module: ModuleType) -> None:
        """Take over the strategy in dynamic graphs, too."""
        self._take_of(module, "_dygraph_distributed_optimizer", 1)

    def _take_of(self, owner: Any, name: str, place: int) -> None:
        """Take over `strategy`, the argument at index PLACE of the function NAME of OWNER."""

        @in_place_of(owner, name)
        def taking(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], self.take(args[place]), *args[place + 1 :])
            elif "strategy" in options:
                options["strategy"] = self.take(options["strategy"])
            return function(*args, **options)

    def take(self, strategy: Any) -> Any:
        """Record what the script has set in STRATEGY; return the strategy to pass to fleet."""
        if strategy is None or _SCRIPT_FIELDS not in getattr(strategy, "__dict__", {}):
            return strategy
        for name, keys in strategy.__dict__[_SCRIPT_FIELDS].items():
            value = _value(strategy, name)
            if isinstance(value, dict) and keys:
                # In Paddle's order: all ranks report the same text.
                value = {key: item for key, item in value.items() if key in keys}
            settings.set_by_script(name, value)
        if self._spec.mode != "override":
            return strategy
        strategy = copy.deepcopy(strategy)
        self.place(strategy)
        return strategy

    def place(self, strategy: Any) -> None:
        """Set our values in STRATEGY, as far as this Paddle has the fields."""
        # Any assignment makes Paddle believe that the script does not use `auto`.
        automatic = self._module.non_auto_func_called
        # Assigning `a_sync` resets `a_sync_configs`, so details come last.
        names = sorted(self._spec.strategy, key=lambda name: name.endswith("_configs"))
        for name in names:
            value = self._spec.strategy[name]
            is_paddles = value != "auto" and name not in _OURS
            if is_paddles and not self._spec.refusal(name, value):
                self._place_field(strategy, name, value)
        for name, value in self._spec.build_strategy.items():
            if name in _build_fields(strategy):
                setattr(strategy.strategy.build_strategy, name, value)
        self._module.non_auto_func_called = automatic

    def _place_field(self, strategy: Any, name: str, value: Any) -> None:
        attribute = _ATTRIBUTES.get(name, name)
        kind = type(strategy)
        if not isinstance(getattr(kind, attribute, None), property):
            misfits[name] = "this Paddle has no such field"
            return
        try:
            now = getattr(strategy, attribute)
            # The setters ignore values of another type.
            if isinstance(now, (bool, int, float)) and isinstance(value, (int, float)):
                # Less than 1 MB is for our own reducer; Paddle's takes whole megabytes.
                value = type(now)(value) or type(now)(value > 0)
            if isinstance(value, dict):
                _clear_lists(strategy, attribute, value)
                # Paddle's setter changes its argument, and does not support nested sections.
                value = _without_nested(getattr(strategy.strategy, attribute, None), name, value)
            kind.__dict__[attribute].fset(strategy, value)
        except Exception as error:
            misfits[name] = f"this Paddle rejects it: {error}"

    def _assign(
        self,
        strategy: Any,
        set_fields: dict[str, set[str]],
        name: str,
        value: Any,
        assign: Callable[..., None],
    ) -> None:
        """Assign as the script does, and add the fields to SET_FIELDS."""
        if name == "build_strategy":
            assign(strategy, name, value)
            set_fields.update({field: set() for field in self._set_in(strategy, value)})
            return
        field = _NAMES.get(name, name)
        if isinstance(value, dict):
            if field not in set_fields:
                # Paddle appends to lists, but the script means to replace ours.
                _clear_lists(strategy, name, value)
            assign(strategy, name, value)
            set_fields.setdefault(field, set()).update(value)
            return
        assign(strategy, name, value)
        set_fields[field] = set()
        if name == "a_sync" and "a_sync_configs" in self._spec.strategy:
            # See `place`. Paddle has reset what the script had set before.
            set_fields.pop("a_sync_configs", None)
            self._place_field(strategy, "a_sync_configs", self._spec.strategy["a_sync_configs"])

    def _set_in(self, strategy: Any, build: Any) -> list[str]:
        """Return the fields that the script has set in its BuildStrategy; set ours in the others.

        Paddle copies all fields of it, also those that the script has left at their defaults.
        """
        from paddle.static import BuildStrategy

        fresh: Any = BuildStrategy()
        set_fields = []
        for name, value in self._spec.build_strategy.items():
            if name not in _build_fields(strategy):
                continue
            if getattr(build, name) in (value, getattr(fresh, name)):
                setattr(strategy.strategy.build_strategy, name, value)
            else:
                set_fields.append(name)
        return set_fields


def _is_paddles() -> bool:
    """Whether the caller's caller is Paddle itself, which assigns to strategies, too."""
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "paddle"


def _build_fields(strategy: Any) -> set[str]:
    return {field.name for field in strategy.strategy.build_strategy.DESCRIPTOR.fields}


def _value(strategy: Any, name: str) -> Any:
    """Return the field NAME of STRATEGY, as Paddle has converted it."""
    if name in _build_fields(strategy):
        return getattr(strategy.strategy.build_strategy, name)
    # Assigned by its documented name, which Paddle may take for a new attribute without effect.
    if name in strategy.__dict__:
        return strategy.__dict__[name]
    return getattr(strategy, _ATTRIBUTES.get(name, name), None)


def _without_nested(message: Any, field: str, values: dict[str, Any]) -> dict[str, Any]:
    """Set nested VALUES of FIELD, `pp_configs.profiling`, in MESSAGE; return the others."""
    plain = {}
    for path, value in values.items():
        section, _, key = path.rpartition(".")
        owner = getattr(message, section, None) if section else message
        if field == "hybrid_configs" and not hasattr(owner, key):
            # This Paddle is older than the setting; the other settings must still be set.
            misfits[f"{field}.{path}"] = f"this Paddle has no {path}"
        elif section:
            setattr(owner, key, value)
        else:
            plain[path] = value
    return plain


def _clear_lists(strategy: Any, attribute: str, values: dict[str, Any]) -> None:
    """Empty the lists of ATTRIBUTE that VALUES will set: Paddle appends to them."""
    message: Any = getattr(strategy.strategy, attribute, None)
    for key, value in values.items():
        if message is not None and isinstance(value, (list, tuple)):
            try:
                message.ClearField(key)
            except ValueError:
                # No such key: Paddle raises its own error.
                return
