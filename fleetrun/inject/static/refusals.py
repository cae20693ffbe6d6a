"""Explains Paddle's errors in building a static program, and how to avoid them.

We do not set FLAGS_enable_pir_api=0 ourselves: it takes effect when Paddle is imported, before
it is known whether the script is static, and it changes `paddle.jit.to_static` in other scripts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .. import parameter_servers, settings
from ..evidence import REFUSED, device_kind
from . import meta_optimizers, program

if TYPE_CHECKING:
    from ..evidence import Evidence

PIR = (
    "Static fleet of Paddle {version} works only with its older program representation: start "
    "with fleetrun --env=FLAGS_enable_pir_api=0, or put FLAGS_enable_pir_api: 0 into the section "
    "`flags` of the strategy."
)
_PLUG_INS = (
    "Paddle {version} has no data parallelism of static graphs on {kind}: it connects the ranks of "
    "a static program on GPUs and XPUs only. Train a dynamic graph, or on the CPU "
    "(--device_kind=cpu)."
)
# Paddle's passes have rebuilt all operators of the program, and the loss still refers to freed
# ones: `append_backward` writes into them. Programs that survive scale the first loss twice.
_TWO_LOSSES = (
    "Fleet of Paddle {version} can minimize one loss of a static program only, and crashes at the "
    "second: build a program for each loss, or minimize the sum of the losses."
)
_DGC = "Paddle supports dgc on GPUs only"
_FLOAT16 = "Paddle's builds for GPUs cast to float16, for which CPUs have no kernels"
# A part of Paddle's error, the fields that may cause it, and an explanation.
_ERRORS = (
    (
        "must be Value, but got Variable",
        ("amp", "localsgd", "adaptive_localsgd"),
        (
            "Paddle {version} cannot build this in its older program representation, which static "
            "fleet needs and which lacks paddle.{function}"
        ),
    ),
    ("DGC is only support GPU", ("dgc",), _DGC),
    (
        "FLAGS_dynamic_static_unified_comm",
        ("sharding",),
        "Paddle {version} shards static programs on GPUs only",
    ),
    (
        "not in this block",
        ("recompute",),
        "recompute_configs names a checkpoint that is not a variable of this program ({error})",
    ),
)


def before(ranks: int, *, is_second: bool) -> str:
    """Return why RANKS cannot minimize a loss, the second one of its program if IS_SECOND."""
    kind = device_kind()
    text = ""
    # With one rank most programs survive it; with merging, each counts the runs of both.
    if is_second and (ranks > 1 or settings.is_on("gradient_merge")):
        text = _TWO_LOSSES
    elif ranks > 1 and kind not in ("cpu", "gpu", "xpu", "") and not parameter_servers.are_used():
        text = _PLUG_INS
    return text.format(version=_version(), kind=kind)


def needs_older_programs() -> str:
    """Return the explanation if Paddle builds programs that its fleet cannot handle, or nothing."""
    paddle: Any = sys.modules["paddle"]
    in_pir_mode = getattr(paddle.framework, "in_pir_mode", bool)
    return PIR.format(version=_version()) if in_pir_mode() else ""


def explain(error: Exception, proof: Evidence) -> str:
    """Report the fields that led to ERROR as refused; return the explanation, if known."""
    text = str(error)
    for part, fields, sentence in _ERRORS:
        if part in text:
            function = "".join(text.partition("(): argument")[0].split()[-1:])
            first = text.partition("\n")[0]
            reason = sentence.format(version=_version(), function=function, error=first)
            return _blame(fields, reason, proof)
    return ""


def only_for_gpus(main: Any, proof: Evidence) -> str:
    """Return the explanation if MAIN has operators for GPUs only and the rank has no GPU.

    Paddle's builds for GPUs write them whatever the rank trains on.
    """
    if device_kind() == "gpu":
        return ""
    if "dgc" in program.count(main):
        return _blame(("dgc",), _DGC, proof)
    if settings.is_on("amp") and meta_optimizers.casts(main, meta_optimizers.FLOAT16):
        return _blame(("amp",), _FLOAT16, proof)
    return ""


def _version() -> str:
    return str(sys.modules["paddle"].__version__)


def _blame(fields: tuple[str, ...], sentence: str, proof: Evidence) -> str:
    """Report the enabled ones of FIELDS as refused; return SENTENCE with their names."""
    blamed = [name for name in fields if settings.effective(name)]
    for name in blamed:
        proof.field(name, REFUSED, reason=sentence)
    return f"{', '.join(blamed)}: {sentence}." if blamed else f"{sentence}."
