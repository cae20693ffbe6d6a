"""Runs in the training process: makes what the strategy asks for take effect, and writes the proof.

`inject/site/sitecustomize.py` loads this package when Paddle is first imported, under a name of its
own: the training's Python need not have fleetrun, so everything here uses relative imports, the
standard library, and, inside functions, numpy and Paddle. The syntax is Python 3.8's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import (
    dygraph,
    equality,
    evidence,
    groups,
    imports,
    optimizers,
    precision,
    rest,
    servers,
    static,
    strategies,
    updates,
    wish,
)

if TYPE_CHECKING:
    from types import ModuleType

# In this order: the script's settings are settled before what obeys them is put in place.
_PARTS = (
    strategies,
    updates,
    groups,
    dygraph,
    static,
    servers,
    optimizers,
    precision,
    equality,
    rest,
)


def arm(path: str, evidence_path: str) -> None:
    """Prepare everything that the strategy in the file PATH asks for; Paddle is not imported yet.

    The proof goes to EVIDENCE_PATH. A part that cannot be put in place is said and noted: the
    launcher reports what it was to do as without effect.
    """
    asked = wish.read(path)
    proof = evidence.Evidence(evidence_path, asked)
    imports.on_failure(lambda text: _tell(proof, text))
    for part in _PARTS:
        _install(part, asked, proof)
    updates.write_after_the_first(proof)
    proof.write_at_exit()


def _install(part: ModuleType, asked: wish.Wish, proof: evidence.Evidence) -> None:
    try:
        part.install(asked, proof)
    except Exception as error:
        text = f"{part.__name__.rpartition('.')[2]} could not be put in place: {error!r}"
        _tell(proof, text)


def _tell(proof: evidence.Evidence, text: str) -> None:
    proof.note(text)
    print(f"fleetrun: {text}", file=sys.stderr)
