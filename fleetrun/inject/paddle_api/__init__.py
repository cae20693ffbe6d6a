"""The only place for Paddle's private names: their table, their check, and typed functions.

A capability whose names this Paddle lacks falls back to Paddle's own behaviour. That is decided
once Paddle is imported, before anything is patched.
"""

from __future__ import annotations

from .check import agree, check_names, has, refusal, sentence, split_by
from .self_tests import are_on_device, failure_at

__all__ = [
    "agree",
    "are_on_device",
    "check_names",
    "failure_at",
    "has",
    "refusal",
    "sentence",
    "split_by",
]
