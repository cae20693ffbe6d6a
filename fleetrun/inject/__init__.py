"""Runs in the training process: makes the strategy take effect, and writes the proof.

`site/sitecustomize.py` loads this package under a name of its own when Paddle is first imported.
The training's Python need not have fleetrun. So everything here uses relative imports, the standard
library, and, inside functions, numpy and Paddle; the syntax is Python 3.8's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import (
    distributed_strategy,
    dygraph,
    gloo_stores,
    import_hooks,
    parameter_servers,
    progress,
    rank_check,
    static,
    unsupported,
    updates,
)
from .evidence import Evidence
from .spec import read_spec

if TYPE_CHECKING:
    from types import ModuleType

    from .spec import StrategySpec

# In this order: what the script sets is recorded before it is used, and what is reported after an
# update is complete before it is written.
_PARTS = (
    distributed_strategy,
    updates,
    gloo_stores,
    dygraph,
    static,
    parameter_servers,
    rank_check,
    unsupported,
    progress,
)


def arm(path: str, evidence_path: str) -> None:
    """Prepare everything for the strategy in the file PATH, before Paddle is imported.

    The proof goes to EVIDENCE_PATH. A part that fails is reported there and on stderr, and the
    launcher reports its fields as without effect.
    """
    spec = read_spec(path)
    proof = Evidence(evidence_path, spec)
    import_hooks.on_failure(lambda text: _report(proof, text))
    for part in _PARTS:
        _install(part, spec, proof)
    proof.write_at_exit()


def _install(part: ModuleType, spec: StrategySpec, proof: Evidence) -> None:
    try:
        part.install(spec, proof)
    except Exception as error:
        text = f"{part.__name__.rpartition('.')[2]} could not be put in place: {error!r}"
        _report(proof, text)


def _report(proof: Evidence, text: str) -> None:
    proof.note(text)
    print(f"fleetrun: {text}", file=sys.stderr)
