"""Reports the requested fields that no other module has reported.

Most of them have no effect in this job. The launcher knows whether and why (`verdicts`), or it is
determined here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import distributed_strategy, paddle_api, parameter_servers, settings, topology, updates
from .dygraph import reducer_report
from .dygraph.compression import DTYPES
from .evidence import EFFECTIVE, NO_DIFFERENCE, NO_EFFECT, NO_WORD, REFUSED, SCRIPT
from .paddle_api import private_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .evidence import Evidence
    from .spec import StrategySpec

# The capabilities that fields need; those of communication need the reducer.
_IN_DYNAMIC_GRAPHS = {
    "gradient_merge": private_names.MERGE,
    "fuse_all_optimizer_ops": private_names.FUSED,
}
_NO_STEPS = "no steps were merged: gradient_merge_configs.k_steps sets how many make one update"
_NO_MODEL = "no DataParallel averages gradients here: Paddle sums them itself, or nobody does"


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Report after the first update, before the evidence is written."""
    updates.on_update(_RemainingFields(spec, proof).report, "the report of fields", last=1)


def _lacks(path: str, degrees: Mapping[str, int]) -> str:
    """Return why a job with DEGREES does not read the nested setting PATH; empty if it does."""
    section = path.rpartition(".")[0]
    degree = f"{section.removesuffix('_configs')}_degree" if section else ""
    return f"{path} needs a {degree} of 2 or more" if degrees.get(degree) == 1 else ""


class _RemainingFields:
    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof

    def report(self, _source: Any, _number: int) -> None:
        """Report all remaining fields."""
        # The statuses of switches as counted, before the script is named.
        counted = {name: self._proof.status(name) for name in self._spec.fields()}
        for name, value in self._spec.fields().items():
            self._report(name, value)
        for name in self._spec.strategy:
            if not name.endswith("_configs") or self._proof.status(name) is not None:
                continue
            if name == "hybrid_configs":
                self._report_hybrid(name)
            else:
                switch = name[: -len("_configs")]
                status = counted.get(switch) or self._proof.status(switch)
                self._report_configs(name, switch, status)

    def _report(self, name: str, value: Any) -> None:
        proof = self._proof
        known = proof.known(name, value)
        if settings.script_wins(name):
            if proof.status(name) is None:
                proof.field(name, SCRIPT)
            value, reason = settings.effective(name), "the script sets it itself"
            proof.put(name, status=SCRIPT, in_effect=value, reason=reason)
        elif proof.status(name) is not None:
            return
        # With other fields that Paddle refuses in some place, it has stopped before an update.
        elif known.get("status") == REFUSED and (name in DTYPES or self._spec.refusal(name, value)):
            proof.field(name, REFUSED, reason=known["reason"])
        elif known.get("status") == NO_DIFFERENCE:
            proof.field(name, NO_DIFFERENCE, in_effect=value, evidence=known["reason"])
        elif not name.endswith("_configs"):
            self._report_unseen(name)

    def _report_unseen(self, name: str) -> None:
        """Report NAME, which nothing has counted: it has no effect, or the count has failed."""
        obstacle = self._obstacle_to(name)
        known = self._proof.known(name, settings.effective(name))
        is_known = known.get("status") == NO_EFFECT
        if self._proof.failures and not is_known and obstacle in ("", _NO_MODEL):
            self._proof.field(name, NO_WORD, reason="the check of its effect has failed")
            return
        reason = obstacle or known.get("unseen") or (known["reason"] if is_known else "")
        reason = reason or "it changed nothing that this job uses"
        self._proof.field(name, NO_EFFECT, reason=str(reason))

    def _report_configs(self, name: str, switch: str, status: str | None) -> None:
        """Report the field NAME, the details of SWITCH, as that, which has STATUS."""
        if switch != "gradient_scale" and not settings.is_on(switch):
            self._proof.field(name, NO_EFFECT, reason=f"{switch} is not on")
        elif status is None:
            # Only the script has enabled it, and its effect was not counted.
            self._report_unseen(name)
        elif status in {EFFECTIVE, NO_DIFFERENCE}:
            value = settings.effective(name)
            self._proof.field(name, status, in_effect=value, evidence=f"as {switch}")
        else:
            self._proof.field(name, status, reason=f"as {switch}")

    def _report_hybrid(self, name: str) -> None:
        """Report the field NAME of degrees and nested settings, as fleet has used it."""
        sizes = topology.sizes() if self._proof.graph == "dygraph" else {}
        degrees = {f"{axis}_degree": size for axis, size in sizes.items()}
        value, requested = settings.effective(name), self._spec.get(name)
        if not degrees or any(
            value[key] not in {degrees[key], -1} for key in degrees if key in value
        ):
            self._report_unseen(name)
            return
        misfits = distributed_strategy.misfits
        idle = {path: misfits.get(f"{name}.{path}") or _lacks(path, degrees) for path in requested}
        obstacles = [misfits[name]] if name in misfits else [*filter(None, idle.values())]
        if name in misfits or len(obstacles) == len(requested):
            self._proof.field(name, NO_EFFECT, reason="; ".join(obstacles))
            return
        used = {
            path: topology.used_setting(name, path)
            for path in requested
            if path not in degrees and not idle[path]
        }
        is_scripts = any(setting != requested[path] for path, setting in used.items())
        counted = ", ".join(f"{path} {setting}" for path, setting in {**degrees, **used}.items())
        text = "; ".join([f"fleet has {counted}", *obstacles])
        status = SCRIPT if is_scripts else EFFECTIVE
        self._proof.field(name, status, in_effect=value, evidence=text)

    def _obstacle_to(self, name: str) -> str:
        """Return what in this job or this Paddle prevents an effect of NAME; empty if nothing."""
        is_dynamic = self._proof.graph == "dygraph"
        sends = name in reducer_report.FIELDS
        needs = private_names.REDUCER if sends else private_names.STRATEGY
        needs = _IN_DYNAMIC_GRAPHS.get(name, needs) if is_dynamic else private_names.STATIC
        missing = paddle_api.refusal(needs) or distributed_strategy.misfits.get(name, "")
        if missing:
            return missing
        if not sends:
            is_merging = name == "gradient_merge" and is_dynamic
            idle = _NO_STEPS if self._spec.get(name) else "Paddle has it for static graphs only"
            return idle if is_merging else ""
        if self._spec.topology.nranks == 1:
            return "a single rank has nothing to reduce"
        if parameter_servers.are_used():
            return "with parameter servers, ranks do not reduce gradients among themselves"
        return _NO_MODEL if is_dynamic else ""
