"""Puts the strategy into Paddle's DistributedStrategy, and hears what the script puts there."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import settings
from .import_hooks import after_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

_FLEET = "paddle.distributed.fleet"
# Where a DistributedStrategy keeps the names that the script has assigned; a copy keeps them, too.
_SAID = "_fleetrun_said"
# The field's attribute where it is called differently.
_ATTRIBUTES = {
    "fuse_grad_size_in_TFLOPS": "_fuse_grad_size_in_TFLOPS",
    "calc_comm_same_stream": "_calc_comm_same_stream",
    "with_coordinator": "is_with_coordinator",
}
_NAMES = {attribute: name for name, attribute in _ATTRIBUTES.items()}
# What was not put into a DistributedStrategy, and why.
refused: dict[str, str] = {}
misfits: dict[str, str] = {}
# The BuildStrategy objects that scripts have got from a strategy: they hold our values already.
# All are kept, so that no id is used again; a script makes one or two.
_lent: dict[int, Any] = {}


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Put the strategy into every DistributedStrategy, and listen to what the script says."""
    settings.reset(spec, proof)
    injection = _Injection(spec)
    after_import(f"{_FLEET}.base.distributed_strategy", injection.enter_strategies)
    after_import(f"{_FLEET}.fleet", injection.enter_fleet)
    after_import(f"{_FLEET}.optimizer", injection.enter_optimizers)


class _Injection:
    """One strategy on its way into every DistributedStrategy of the process."""

    def __init__(self, spec: StrategySpec) -> None:
        self._spec = spec
        self._module: Any = None

    def enter_strategies(self, module: ModuleType) -> None:
        """Let every new DistributedStrategy begin with our values."""
        self._module = module
        kind: Any = module.DistributedStrategy
        begin, assign, load = kind.__init__, kind.__setattr__, kind.load_from_prototxt

        @functools.wraps(begin)
        def __init__(strategy: Any, *args: Any, **options: Any) -> None:
            begin(strategy, *args, **options)
            self.place(strategy)
            strategy.__dict__[_SAID] = {}

        @functools.wraps(assign)
        def __setattr__(strategy: Any, name: str, value: Any) -> None:
            said = strategy.__dict__.get(_SAID)
            if said is None or name.startswith("_Distributed") or _is_paddles():
                assign(strategy, name, value)
                return
            self._hear(strategy, said, name, value, assign)

        @functools.wraps(load)
        def load_from_prototxt(strategy: Any, pb_file: str) -> None:
            load(strategy, pb_file)
            strategy.__dict__.setdefault(_SAID, {}).update(_written_in(strategy, pb_file))

        kind.__init__ = __init__
        kind.__setattr__ = __setattr__
        kind.load_from_prototxt = load_from_prototxt
        builds = kind.build_strategy

        def lend(strategy: Any) -> Any:
            build = builds.fget(strategy)
            if not _is_paddles():
                _lent[id(build)] = build
            return build

        kind.build_strategy = property(lend, builds.fset, builds.fdel, builds.__doc__)

    def enter_fleet(self, module: ModuleType) -> None:
        """Take the script's strategy where it gives it to fleet."""
        kind: Any = module.Fleet
        kind.init = self._taking(kind.init, 3)
        kind.distributed_optimizer = self._taking(kind.distributed_optimizer, 2)

    def enter_optimizers(self, module: ModuleType) -> None:
        """Take it in dynamic graphs, too."""
        name = "_dygraph_distributed_optimizer"
        setattr(module, name, self._taking(getattr(module, name), 1))

    def _taking(self, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return FUNCTION, whose parameter `strategy` is number PLACE, with what is taken."""

        @functools.wraps(function)
        def taking(*args: Any, **options: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], self.take(args[place]), *args[place + 1 :])
            elif "strategy" in options:
                options["strategy"] = self.take(options["strategy"])
            return function(*args, **options)

        return taking

    def take(self, strategy: Any) -> Any:
        """Hear what the script says in STRATEGY; return what fleet is to get."""
        if strategy is None or _SAID not in getattr(strategy, "__dict__", {}):
            return strategy
        for name, keys in strategy.__dict__[_SAID].items():
            value = _value(strategy, name)
            if isinstance(value, dict) and keys:
                value = {key: value[key] for key in keys if key in value}
            settings.set_by_script(name, value)
        if self._spec.mode != "override":
            return strategy
        strategy = copy.deepcopy(strategy)
        self.place(strategy)
        return strategy

    def place(self, strategy: Any) -> None:
        """Set in STRATEGY what is asked for, as far as this Paddle has it."""
        # Any assignment makes Paddle believe that the script does without `auto`.
        automatic = self._module.non_auto_func_called
        # Switching a_sync on makes Paddle forget its details, so details come last.
        names = sorted(self._spec.strategy, key=lambda name: name.endswith("_configs"))
        for name in names:
            value = self._spec.strategy[name]
            why = self._spec.refusal(name, value)
            if why:
                refused[name] = why
            elif value != "auto":
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
            # The setters drop whatever is of another type.
            if isinstance(now, (bool, int, float)) and isinstance(value, (int, float)):
                # Half a megabyte is for our own reducer; Paddle's has no less than one.
                value = type(now)(value) or type(now)(value > 0)
            if isinstance(value, dict):
                _forget_lists(strategy, attribute, value)
            kind.__dict__[attribute].fset(strategy, value)
        except Exception as error:
            misfits[name] = f"this Paddle does not take it: {error}"

    def _hear(
        self,
        strategy: Any,
        said: dict[str, set[str]],
        name: str,
        value: Any,
        assign: Callable[..., None],
    ) -> None:
        """Assign as the script wants, and keep which fields it has assigned in SAID."""
        if name == "build_strategy":
            assign(strategy, name, value)
            said.update({field: set() for field in self._said_in(strategy, value)})
            return
        field = _NAMES.get(name, name)
        if isinstance(value, dict):
            if field not in said:
                # Paddle appends to lists; the script means to replace what it does not know of.
                _forget_lists(strategy, name, value)
            assign(strategy, name, value)
            said.setdefault(field, set()).update(value)
            return
        assign(strategy, name, value)
        said[field] = set()
        if name == "a_sync" and "a_sync_configs" in self._spec.strategy:
            # See `place`; what the script has said of them before is forgotten, as without us.
            said.pop("a_sync_configs", None)
            self._place_field(strategy, "a_sync_configs", self._spec.strategy["a_sync_configs"])

    def _said_in(self, strategy: Any, build: Any) -> list[str]:
        """Return the fields that the script set in its BuildStrategy; put ours into the others.

        Paddle copies all of its fields, and what it does not mention is at its default in it.
        """
        from paddle.static import BuildStrategy

        fresh: Any = BuildStrategy()
        ours = self._spec.build_strategy
        is_lent = id(build) in _lent
        said = []
        for name in _build_fields(strategy):
            if name not in ours:
                continue
            value = getattr(build, name)
            untouched = ours[name] if is_lent else getattr(fresh, name)
            if value == untouched:
                setattr(strategy.strategy.build_strategy, name, ours[name])
            else:
                said.append(name)
        return said


def _is_paddles() -> bool:
    """Whether the caller's caller is code of Paddle, which assigns to strategies, too."""
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "paddle"


def _build_fields(strategy: Any) -> set[str]:
    return {field.name for field in strategy.strategy.build_strategy.DESCRIPTOR.fields}


def _value(strategy: Any, name: str) -> Any:
    """Return what STRATEGY has in the field NAME, after all conversions of Paddle."""
    if name in _build_fields(strategy):
        return getattr(strategy.strategy.build_strategy, name)
    # The documented spelling is an attribute without effect where it can be assigned at all.
    if name in strategy.__dict__:
        return strategy.__dict__[name]
    return getattr(strategy, _ATTRIBUTES.get(name, name), None)


def _forget_lists(strategy: Any, attribute: str, values: dict[str, Any]) -> None:
    """Empty the lists of ATTRIBUTE that VALUES is going to fill: Paddle appends to them."""
    message: Any = getattr(strategy.strategy, attribute, None)
    for key, value in values.items():
        if message is not None and isinstance(value, (list, tuple)):
            try:
                message.ClearField(key)
            except ValueError:
                # No such key; Paddle is about to say so.
                return


def _written_in(strategy: Any, path: str) -> dict[str, set[str]]:
    """Return the fields that the file PATH sets, and the keys of those that have some."""
    # Paddle needs it, so it is there.
    text_format: Any = importlib.import_module("google.protobuf.text_format")

    message = type(strategy.strategy)()
    with open(path, encoding="utf-8") as file:
        text_format.Merge(file.read(), message)
    said: dict[str, set[str]] = {}
    for field, value in message.ListFields():
        keys = (
            {key.name for key, _ in value.ListFields()} if hasattr(value, "ListFields") else set()
        )
        if field.name == "build_strategy":
            said.update({key: set() for key in keys})
        else:
            said[field.name] = keys
    return said
