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


def reset(spec: StrategySpec, proof: Evidence) -> None:
    """Begin with SPEC alone; disagreements go to PROOF."""
    global _spec, _proof
    _spec, _proof = spec, proof
    _script.clear()


def set_by_script(name: str, value: Any) -> Any:
    """Record that the script has set the field NAME to VALUE; return the value in effect."""
    _script[name] = value
    requested = _spec.asked(name)
    if requested is not None and not _agree(requested, value) and _proof is not None:
        _proof.disagree(name, value, effective(name))
    return effective(name)


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


def merging() -> tuple[int, bool]:
    """Return how many micro-steps make one update, and whether gradients are averaged over them."""
    if not effective("gradient_merge"):
        return 1, True
    configs = effective("gradient_merge_configs") or {}
    return int(configs.get("k_steps", 1)), bool(configs.get("avg", True))


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


def _agree(requested: Any, script: Any) -> bool:
    """Whether the two values are equal in single precision; of dictionaries the common keys."""
    if isinstance(requested, dict) and isinstance(script, dict):
        return all(_agree(requested[key], script[key]) for key in requested if key in script)
    if isinstance(requested, (int, float)) and isinstance(script, (int, float)):
        return abs(requested - script) <= 1e-6 * max(1.0, abs(requested))
    if isinstance(requested, (list, tuple)) and isinstance(script, (list, tuple)):
        return len(requested) == len(script) and all(map(_agree, requested, script))
    return bool(requested == script)
