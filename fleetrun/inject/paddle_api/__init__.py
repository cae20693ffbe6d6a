"""The one place for Paddle's private names: their table, their check, and typed functions for them.

What a Paddle lacks makes the capability that needs it fall back to Paddle's own behaviour. That is
decided when Paddle has been imported and before anything was patched.
"""

from __future__ import annotations

from .check import agree, check_names, has, refusal, sentence
from .self_tests import are_on_device, failure_at

__all__ = ["agree", "are_on_device", "check_names", "failure_at", "has", "refusal", "sentence"]
