"""The requested strategy: `strategy.json` of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Topology(NamedTuple):
    """The number of ranks, of hosts, and the most ranks on a host.

    Each group of `ranks_per_group` consecutive ranks, from rank 0 on, is on one host; 0: unknown.
    """

    nranks: int = 1
    nnodes: int = 1
    ranks_per_node: int = 1
    ranks_per_group: int = 0


class StrategySpec(NamedTuple):
    """The requested fields by section; others are absent."""

    strategy: Mapping[str, Any] = {}
    build_strategy: Mapping[str, Any] = {}
    execution_strategy: Mapping[str, Any] = {}
    # `defaults`: the script's own values win. `override`: these do.
    mode: str = "defaults"
    # `auto`: compare the ranks less and less often. 0: after updates 1 and 3. N: also after every N
    # updates. -1: never.
    check_ranks: int | str = 0
    reasons: Mapping[str, str] = {}
    # The launcher's knowledge of each field, on and off (strategy/document.py).
    verdicts: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]] = {}
    topology: Topology = Topology()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field NAME of DistributedStrategy; DEFAULT if it was not requested."""
        return self.strategy.get(name, default)

    def asked(self, name: str) -> Any:
        """Return the field NAME of any section; None if it was not requested."""
        return self.fields().get(name)

    def fields(self) -> dict[str, Any]:
        """Return the requested fields of all sections."""
        return {**self.execution_strategy, **self.build_strategy, **self.strategy}

    def builds(self, name: str) -> bool:
        """Whether the field NAME of BuildStrategy is requested and true."""
        return bool(self.build_strategy.get(name))

    def known(self, name: str, value: Any) -> Sequence[Mapping[str, Any]]:
        """Return what the launcher knows of the field NAME with VALUE; the first match counts.

        Each line has a status and a reason, and may apply to one graph, Paddle or device only.
        """
        return self.verdicts.get(name, {}).get("off" if value is False else "on", ())

    def refusal(self, name: str, value: Any) -> str:
        """Return why Paddle never gets VALUE for the field NAME; empty if it may."""
        first = next(iter(self.known(name, value)), {})
        is_everywhere = not {"graph", "paddle", "device"} & first.keys()
        return str(first["reason"]) if first.get("status") == "refused" and is_everywhere else ""


def read_spec(path: str) -> StrategySpec:
    """Read the file PATH, which the launcher wrote.

    Raises OSError, or ValueError if it is not such a file.
    """
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    known = {name: values[name] for name in StrategySpec._fields if name in values}
    return StrategySpec(**{**known, "topology": Topology(**values.get("topology", {}))})
