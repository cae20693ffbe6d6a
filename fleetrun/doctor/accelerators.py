"""Findings about devices of Paddle's plug-ins, usable or not; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.doctor.findings import Finding, ok, warning
from fleetrun.plan import kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def judge(counts: Mapping[str, int], absent: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the devices that Paddle has COUNTS of, by their kinds, and why others are ABSENT."""
    for kind, count in counts.items():
        if count:
            seen = f"{count} of Paddle's kind {kind}; ranks talk to each other by xccl"
            yield ok(f"{kinds.label(kind)}s", seen)
    for kind, why in absent.items():
        if kind != "gpu":
            yield _absent(kind, why, has_plugin=kind in counts)


def _absent(kind: str, why: str, *, has_plugin: bool) -> Finding:
    """Return the finding about a KIND that is present but cannot be used, and WHY."""
    means = "ranks do not use them"
    if kind not in kinds.VENDORS and not has_plugin:
        fix = f"install the plug-in for this Paddle's version, or unset {kinds.ROOT}"
        return warning("plug-ins", why, means, fix)
    if has_plugin:
        masks = ", ".join(kinds.masks(kind))
        file = kinds.VENDORS.get(kind, kinds.Vendor()).file
        driver = f"ls /dev/{file}*" if file else "look at the vendor's driver"
        fix = f"{driver}  # are they there, may this user open them, does {masks} hide them?"
    else:
        package = kinds.VENDORS[kind].package or f"the plug-in for {kinds.label(kind)}s"
        fix = f"pip install {package}  # of Paddle's own version"
    return warning(f"{kinds.label(kind)}s", why, means, fix)
