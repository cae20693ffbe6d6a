"""Where the checkout is, and the environment of a launcher from it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environ(**variables: str) -> dict[str, str]:
    """Return the environment of a launcher that has no GPUs, with VARIABLES."""
    # An empty mask means CPU.
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables}
