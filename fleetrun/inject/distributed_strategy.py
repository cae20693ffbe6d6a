"""Sets the strategy in Paddle's DistributedStrategy, and finds what the script sets there."""

from __future__ import annotations

import copy
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
# Attributes that are not named like their field.
_ATTRIBUTES = {
    "fuse_grad_size_in_TFLOPS": "_fuse_grad_size_in_TFLOPS",
    "calc_comm_same_stream": "_calc_comm_same_stream",
    "with_coordinator": "is_with_coordinator",
}
# Fields that only fleetrun implements: Paddle's are missing or wrong.
_OURS = ("fp16_allreduce", "bf16_allreduce")
# The fields that could not be put into a DistributedStrategy, and why.
misfits: dict[str, str] = {}


def install(spec: StrategySpec, _proof: Evidence) -> None:
    """Put the strategy into every DistributedStrategy, and find what the script sets."""
    injection = _Injection(spec)
    after_import(f"{_FLEET}.base.distributed_strategy", injection.patch_strategies)
    after_import(f"{_FLEET}.fleet", injection.patch_fleet)
    after_import(
        f"{_FLEET}.optimizer",
        lambda module: injection.take_of(module, "_dygraph_distributed_optimizer", 1),
    )


class _Injection:
    """Patches Paddle so that every DistributedStrategy has our values."""

    def __init__(self, spec: StrategySpec) -> None:
        self._spec = spec
        self._module: Any = None

    def patch_strategies(self, module: ModuleType) -> None:
        """Give every new DistributedStrategy our values."""
        self._module = module
        kind: Any = module.DistributedStrategy
        watch_method(kind, "__init__", after=self.place)
        whole = kind.build_strategy

        def assign(strategy: Any, build: Any) -> None:
            """Assign BUILD; Paddle copies all fields of it, also those left at their defaults."""
            from paddle.static import BuildStrategy

            whole.fset(strategy, build)
            fresh: Any = BuildStrategy()
            for name, value in self._spec.build_strategy.items():
                if name in _build_fields(strategy) and getattr(build, name) == getattr(fresh, name):
                    setattr(strategy.strategy.build_strategy, name, value)

        kind.build_strategy = property(whole.fget, assign)

        @in_place_of(kind, "__setattr__")
        def __setattr__(assign: Callable[..., None], strategy: Any, name: str, value: Any) -> None:
            ours = self._spec.get(name)
            if isinstance(value, dict) and isinstance(ours, dict):
                message = getattr(strategy.strategy, name)
                for key in value.keys() & ours.keys():
                    # Paddle appends to lists, but the script means to replace ours.
                    if isinstance(ours[key], list) and ours[key] == list(getattr(message, key)):
                        message.ClearField(key)
            assign(strategy, name, value)
            if name == "a_sync" and "a_sync_configs" in self._spec.strategy:
                # Paddle has reset them.
                self._place_field(strategy, f"{name}_configs", self._spec.get(f"{name}_configs"))

    def patch_fleet(self, module: ModuleType) -> None:
        """Take over the strategy that the script passes to fleet."""
        kind: Any = module.Fleet
        init = kind.init
        self.take_of(kind, "init", 3)
        # Its methods are functions of the package, too.
        package: Any = sys.modules[_FLEET]
        if getattr(package.init, "__func__", None) is init:
            package.init = types.MethodType(kind.init, package.init.__self__)
        self.take_of(kind, "distributed_optimizer", 2)

    def take_of(self, owner: Any, name: str, place: int) -> None:
        """Take over `strategy`, the argument at index PLACE of the function NAME of OWNER."""

        @in_place_of(owner, name)
        def taking(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], self._take(args[place]), *args[place + 1 :])
            elif "strategy" in options:
                options["strategy"] = self._take(options["strategy"])
            return function(*args, **options)

    def _take(self, strategy: Any) -> Any:
        """Record what the script has set in STRATEGY; return the strategy to pass to fleet.

        The script has set what differs from a new strategy with our values.
        """
        if not isinstance(strategy, self._module.DistributedStrategy):
            return strategy
        placed = self._module.DistributedStrategy()
        names = [field.name for field in strategy.strategy.DESCRIPTOR.fields]
        for name in dict.fromkeys([*names, *self._spec.strategy, *self._spec.build_strategy]):
            value, ours = _value(strategy, name), _value(placed, name)
            if isinstance(value, dict) and isinstance(ours, dict):
                # In Paddle's order: all ranks report the same text.
                changed = {key: item for key, item in value.items() if item != ours.get(key)}
                if changed:
                    settings.set_by_script(name, changed)
            elif value != ours and isinstance(value, (bool, int, float, str)):
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
                message: Any = getattr(strategy.strategy, attribute, None)
                # Paddle's setter changes its argument, and does not support nested sections.
                value = _without_nested(message, name, value)
                for key, item in value.items():
                    if isinstance(item, (list, tuple)):
                        # Paddle appends to lists.
                        message.ClearField(key)
            getattr(kind, attribute).fset(strategy, value)
        except Exception as error:
            misfits[name] = f"this Paddle rejects it: {error}"


def _build_fields(strategy: Any) -> set[str]:
    return {field.name for field in strategy.strategy.build_strategy.DESCRIPTOR.fields}


def _value(strategy: Any, name: str) -> Any:
    """Return the field NAME of STRATEGY, as Paddle has converted it."""
    if name in _build_fields(strategy):
        return getattr(strategy.strategy.build_strategy, name)
    # Assigned by its documented name, which Paddle may take for a new attribute without effect.
    if name in strategy.__dict__ and name != "strategy":
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
