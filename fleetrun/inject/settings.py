"""The values in effect: the strategy's or the script's, and where the two disagree.

A field's value is known once the script has called `fleet.init` or `distributed_optimizer`. Before
that, and without fleet, it is the strategy's. So read it late: when a reducer is built or a program
is rewritten, never in `install`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .evidence import EFFECTIVE, NO_DIFFERENCE, NO_EFFECT
from .spec import StrategySpec

if TYPE_CHECKING:
    from .evidence import Evidence


# One process trains once.
_spec = StrategySpec()
_proof: Evidence | None = None
# The script's values by field; of dictionaries only the keys that it has set.
_script: dict[str, Any] = {}
# Why a switch is left to the script.
_reasons: dict[str, str] = {}


def reset(spec: StrategySpec, proof: Evidence) -> None:
    """Begin with SPEC alone; disagreements go to PROOF."""
    global _spec, _proof
    _spec, _proof = spec, proof
    _script.clear()
    _reasons.clear()


def set_by_script(name: str, value: Any) -> Any:
    """Record that the script has set the field NAME to VALUE; return the value in effect."""
    _script[name] = value
    requested = _spec.asked(name)
    if requested is not None and not _agree(requested, value) and _proof is not None:
        _proof.disagree(name, value, effective(name))
    return effective(name)


def leave_to_script(name: str, reason: str) -> None:
    """Switch NAME off for REASON, as the script does the same itself; not in mode `override`."""
    _script[name] = False
    if not effective(name):
        _reasons[name] = reason


def script_does(name: str) -> str:
    """Return the reason of `leave_to_script` for NAME; empty if it is not left to the script."""
    return _reasons.get(name, "")


def effective(name: str, default: Any = None) -> Any:
    """Return the value of the field NAME in effect; DEFAULT if neither side has set it.

    A dictionary (`gradient_merge_configs`) has the keys that either side has set. DEFAULT is also
    returned if only the script has switched NAME on, as Paddle then implements it.
    """
    requested, script = _spec.asked(name), _script.get(name)
    if script is None:
        return default if requested is None else requested
    if requested is None:
        return default if script is True else script
    if not isinstance(requested, dict) and _agree(requested, script):
        # The script's value went through Paddle's single precision.
        return requested
    base, winner = (script, requested) if _spec.mode == "override" else (requested, script)
    if isinstance(base, dict) and isinstance(winner, dict):
        return {**base, **winner}
    return winner


def effective_spec() -> StrategySpec:
    """Return the strategy with all values in effect."""
    build_names = {**_spec.build_strategy, **_spec.execution_strategy}
    script_values = {
        name: value
        for name, value in _script.items()
        if name not in build_names and value is not True
    }
    return _spec._replace(
        strategy={name: effective(name) for name in {**script_values, **_spec.strategy}},
        build_strategy={name: effective(name) for name in _spec.build_strategy},
        execution_strategy={name: effective(name) for name in _spec.execution_strategy},
    )


def overlaps() -> bool:
    """Whether allreduces of dynamic graphs may overlap with the computation."""
    return not effective("sync_nccl_allreduce", default=False)


def is_on(name: str) -> bool:
    """Whether the switch NAME is on, by the strategy or by the script alone."""
    value = effective(name)
    return bool(_script.get(name) if value is None else value)


def script_wins(name: str) -> bool:
    """Whether the script's value of NAME is in effect although the strategy requests another."""
    if _spec.mode == "override" or name not in _script:
        return False
    requested = _spec.asked(name)
    return requested is not None and not _agree(requested, _script[name])


def report(
    name: str,
    *,
    holds: bool,
    evidence: str,
    reason: str,
    in_effect: Any = None,
    is_moot: bool = False,
) -> None:
    """Report the field NAME by what was counted, if it has a value.

    If it HOLDS, its value (or IN_EFFECT) is in effect, by EVIDENCE; IS_MOOT: the job would be the
    same without it. Otherwise it has no effect, because of REASON.
    """
    proof, value = _proof, effective(name)
    assert proof is not None
    if value is None or (
        value is False and proof.known(name, value).get("status") == NO_DIFFERENCE
    ):
        return
    if holds:
        shown = value if in_effect is None else in_effect
        status = NO_DIFFERENCE if is_moot else EFFECTIVE
        proof.field(name, status, in_effect=shown, evidence=evidence)
    else:
        proof.field(name, NO_EFFECT, reason=reason)


def one_level(size: int, ranks: int) -> str:
    """Return why groups of SIZE among RANKS have no second level.

    >>> one_level(1, 4), one_level(8, 4)
    ('each group has one rank', 'all 4 ranks are in one group')
    """
    return "each group has one rank" if size <= 1 else f"all {ranks} ranks are in one group"


def _agree(requested: Any, script: Any) -> bool:
    """Whether the two values are equal in single precision; of dictionaries the common keys."""
    if isinstance(requested, dict) and isinstance(script, dict):
        return all(_agree(requested[key], script[key]) for key in requested if key in script)
    if isinstance(requested, (int, float)) and isinstance(script, (int, float)):
        return abs(requested - script) <= 1e-6 * max(1.0, abs(requested))
    if isinstance(requested, (list, tuple)) and isinstance(script, (list, tuple)):
        return len(requested) == len(script) and all(map(_agree, requested, script))
    return bool(requested == script)
