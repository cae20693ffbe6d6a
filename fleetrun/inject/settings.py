"""What holds: the strategy's value or the script's own, and where they disagree.

Everybody else asks here what holds, because the script may have its own word:

* `effective(name, default=None)`: the value of the field NAME that holds now. Not asked for and
  not set by the script: DEFAULT. For a field of dictionaries (`gradient_merge_configs`): the keys
  that were asked for or set. What the script switches on by itself, and nobody asked for, is
  Paddle's business: DEFAULT.
* `settled()`: the whole `Wish` with these values, for `.merge_steps`, `.builds(…)` and the like.
* `is_on(name)`: whether a switch is on, also where only the script has switched it.
* `is_scripts(name)`: whether the script's own value holds where the strategy asks for another.
  The proof then says `script` by itself; call `proof.knob` as always.
* `script_says(name, value)`: tell that the script gave VALUE by other means, as an argument of
  DataParallel say; returns what holds.

What holds is known once the script has called `fleet.init` or `distributed_optimizer`; before it,
and in a script without fleet, the strategy's values hold. So ask late: when the reducer is built
or the program is rewritten, never in `install`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .wish import Wish

if TYPE_CHECKING:
    from .evidence import Evidence


class _Settlement:
    """What the strategy asks for, and what the script says itself."""

    def __init__(self, asked: Wish, proof: Evidence | None) -> None:
        self.asked = asked
        self.proof = proof
        # The script's own words, by field; of dictionaries only the keys it set.
        self.script: dict[str, Any] = {}

    def override(self) -> bool:
        return self.asked.mode == "override"

    def wished(self, name: str) -> Any:
        for section in (
            self.asked.strategy,
            self.asked.build_strategy,
            self.asked.execution_strategy,
        ):
            if name in section:
                return section[name]
        return None

    def holds(self, name: str, *, default: Any) -> Any:
        wished, said = self.wished(name), self.script.get(name)
        if said is None:
            return default if wished is None else wished
        if wished is None:
            return default if said is True else said
        if not isinstance(wished, dict) and _agree(wished, said):
            # Not as Paddle keeps it, in single precision.
            return wished
        first, last = (said, wished) if self.override() else (wished, said)
        if isinstance(first, dict) and isinstance(last, dict):
            return {**first, **last}
        return last

    def hear(self, name: str, value: Any) -> None:
        """Take VALUE as the script's own word on NAME, and list it if it disagrees."""
        self.script[name] = value
        wished = self.wished(name)
        if wished is not None and not _agree(wished, value) and self.proof is not None:
            self.proof.disagree(name, value, self.holds(name, default=None))


_settlement = _Settlement(Wish({}, {}, {}), None)


def begin(asked: Wish, proof: Evidence) -> None:
    """Nobody has said anything yet but the strategy."""
    global _settlement  # noqa: PLW0603 - one process, one training
    _settlement = _Settlement(asked, proof)


def effective(name: str, default: Any = None) -> Any:
    """Return the value of the field NAME that holds now, DEFAULT where nobody said one."""
    return _settlement.holds(name, default=default)


def settled() -> Wish:
    """Return the strategy with the script's own settings in it, as far as they win."""
    asked = _settlement.asked
    known = {**asked.build_strategy, **asked.execution_strategy}
    own = {
        name: value
        for name, value in _settlement.script.items()
        if name not in known and value is not True
    }
    return asked._replace(
        strategy={name: effective(name) for name in {**own, **asked.strategy}},
        build_strategy={name: effective(name) for name in asked.build_strategy},
        execution_strategy={name: effective(name) for name in asked.execution_strategy},
    )


def is_on(name: str) -> bool:
    """Whether the switch NAME is on, be it by the strategy or by the script alone."""
    value = effective(name)
    return bool(_settlement.script.get(name) if value is None else value)


def is_scripts(name: str) -> bool:
    """Whether the script's own value of NAME holds in place of the strategy's."""
    if _settlement.override() or name not in _settlement.script:
        return False
    wished = _settlement.wished(name)
    return wished is not None and not _agree(wished, _settlement.script[name])


def script_says(name: str, value: Any) -> Any:
    """Take VALUE as the script's own word on NAME; return what holds."""
    _settlement.hear(name, value)
    return effective(name)


def _agree(wished: Any, said: Any) -> bool:
    if isinstance(wished, dict) and isinstance(said, dict):
        return all(_agree(wished[key], said[key]) for key in wished if key in said)
    if isinstance(wished, (int, float)) and isinstance(said, (int, float)):
        # Paddle keeps single precision.
        return abs(wished - said) <= 1e-6 * max(1.0, abs(wished))
    if isinstance(wished, (list, tuple)) and isinstance(said, (list, tuple)):
        return len(wished) == len(said) and all(map(_agree, wished, said))
    return bool(wished == said)
