"""Resolves `auto` for the hosts and ranks of a job, with reasons; pure."""

# No `from __future__ import annotations` here, for the reason given in model.py.
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fleetrun.model import FieldSetting, FieldValue, RankSpec, Strategy
from fleetrun.strategy.fields import AUTO, BUILD, EXECUTION, STRATEGY
from fleetrun.text import counted

_HIERARCHICAL = "use_hierarchical_allreduce"
_GROUP = "hierarchical_allreduce_inter_nranks"


class HostTopology(NamedTuple):
    """The number of ranks of each host, in the order of the hosts."""

    ranks: tuple[int, ...]

    @property
    def nranks(self) -> int:
        """The number of ranks of the job."""
        return sum(self.ranks)

    @property
    def nnodes(self) -> int:
        """The number of hosts with ranks."""
        return len(self.ranks)

    @property
    def group(self) -> int:
        """The largest group size for which no group of neighbours spans two hosts.

        >>> HostTopology((8, 8)).group, HostTopology((4, 2)).group
        (8, 2)
        """
        return math.gcd(*self.ranks) or 1


def topology(ranks: Sequence[RankSpec]) -> HostTopology:
    """Return the topology of the trainers among RANKS."""
    nodes = Counter(spec.node_rank for spec in ranks if spec.is_trainer)
    return HostTopology(tuple(nodes.values()) or (1,))


def resolve(strategy: Strategy, ranks: HostTopology) -> Strategy:
    """Return STRATEGY with `auto` resolved where that depends on RANKS, with reasons."""
    settings = {
        (setting.section, setting.name): _resolved(setting, ranks) for setting in strategy.settings
    }
    levels = settings.get((STRATEGY, _HIERARCHICAL))
    if levels is not None and levels.value is True and (STRATEGY, _GROUP) not in settings:
        value, reason = _group(ranks)
        settings[STRATEGY, _GROUP] = FieldSetting(
            *(STRATEGY, _GROUP, value, levels.source), f"not set: {reason}"
        )
    return strategy._replace(settings=tuple(settings.values()))


def _resolved(setting: FieldSetting, ranks: HostTopology) -> FieldSetting:
    if setting.value != AUTO or setting.section not in (STRATEGY, BUILD, EXECUTION):
        return setting
    hosts = counted(ranks.nnodes, "host")
    value: FieldValue
    match setting.name:
        case "nccl_comm_num":
            value = 1 if ranks.nnodes == 1 else 2
            reason = f"{value} on {hosts}"
        case "use_hierarchical_allreduce":
            value, reason = False, f"off with {hosts}"
            if ranks.nnodes > 1 and ranks.group > 1:
                reason += ": to see what two levels gain, launch with true and with false"
        case "hierarchical_allreduce_inter_nranks":
            value, reason = _group(ranks)
        case _:
            # Only the training process knows the size of the gradients.
            reason = "auto: a tenth of the gradients, at least 1 MB"
            return setting._replace(reason=reason)
    return setting._replace(value=value, reason=f"auto: {reason}")


def _group(ranks: HostTopology) -> tuple[int, str]:
    if len(set(ranks.ranks)) == 1:
        return ranks.group, f"the {ranks.group} ranks of each host"
    return ranks.group, f"hosts have {', '.join(map(str, ranks.ranks))} ranks"
