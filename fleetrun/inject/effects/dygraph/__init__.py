"""What the strategy asks for in dynamic graphs: our own reducer of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..evidence import Evidence
    from ..wish import Wish


def install(asked: Wish, proof: Evidence) -> None:
    """Do nothing yet."""
