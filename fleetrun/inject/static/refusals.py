"""Explains Paddle's errors in building a static program, and how to avoid them.

We do not set FLAGS_enable_pir_api=0 ourselves: it takes effect when Paddle is imported, before
it is known whether the script is static, and it changes `paddle.jit.to_static` in other scripts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

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


class KnownError(NamedTuple):
    """An error of Paddle's that contains TEXT, the fields that may cause it, and an explanation."""

    text: str
    fields: tuple[str, ...]
    sentence: str


_PLUG_INS = (
    "Paddle {version} has no data parallelism of static graphs on {kind}: it connects the ranks of "
    "a static program on GPUs and XPUs only. Train a dynamic graph, or on the CPU "
    "(--device_kind=cpu)."
)
_DGC = "Paddle supports dgc on GPUs only"
_STOPS = (
    KnownError(
        "must be Value, but got Variable",
        ("amp", "localsgd", "adaptive_localsgd"),
        "Paddle {version} cannot build this in its older program representation, which static "
        "fleet needs and which lacks paddle.{function}",
    ),
    KnownError("DGC is only support GPU", ("dgc",), _DGC),
    KnownError(
        "FLAGS_dynamic_static_unified_comm",
        ("sharding",),
        "Paddle {version} shards static programs on GPUs only",
    ),
    KnownError(
        "not in this block",
        ("recompute",),
        "recompute_configs names a checkpoint that is not a variable of this program ({error})",
    ),
)


def needs_older_programs() -> str:
    """Return the explanation if Paddle builds programs that its fleet cannot handle, or nothing."""
    paddle: Any = sys.modules["paddle"]
    in_pir_mode = getattr(paddle.framework, "in_pir_mode", bool)
    return PIR.format(version=paddle.__version__) if in_pir_mode() else ""


def unsupported_device(ranks: int) -> str:
    """Return the explanation if RANKS train a static program on plug-in devices, or nothing."""
    paddle: Any = sys.modules["paddle"]
    kind = device_kind()
    if ranks < 2 or kind in ("cpu", "gpu", "xpu", "") or parameter_servers.are_used():
        return ""
    return _PLUG_INS.format(version=paddle.__version__, kind=kind)


def only_for_gpus(main: Any, proof: Evidence) -> str:
    """Return the explanation if MAIN has operators for GPUs only and the rank has no GPU.

    Paddle's builds for GPUs write them whatever the rank trains on.
    """
    if device_kind() == "gpu":
        return ""
    if "dgc" in program.count(main):
        return _blame(("dgc",), _DGC, proof)
    if settings.is_on("amp") and meta_optimizers.casts(main, meta_optimizers.FLOAT16):
        return _blame(
            ("amp",),
            "Paddle's builds for GPUs cast to float16, for which CPUs have no kernels",
            proof,
        )
    return ""


def second_minimize() -> str:
    """Return the explanation for a second loss that fleet is to minimize in one program.

    Paddle's passes have rebuilt all operators of the program, and the loss still refers to freed
    ones: `append_backward` writes into them. Programs that survive scale the first loss twice.
    """
    paddle: Any = sys.modules["paddle"]
    return (
        f"Fleet of Paddle {paddle.__version__} can minimize one loss of a static program only, and "
        "crashes at the second: build a program for each loss, or minimize the sum of the losses."
    )


def explain(error: Exception, proof: Evidence) -> str:
    """Report the fields that led to ERROR as refused; return the explanation, if known."""
    paddle: Any = sys.modules["paddle"]
    text = str(error)
    for stop in _STOPS:
        if stop.text not in text:
            continue
        function = "".join(text.partition("(): argument")[0].split()[-1:])
        sentence = stop.sentence.format(
            version=paddle.__version__, function=function, error=text.partition("\n")[0]
        )
        return _blame(stop.fields, sentence, proof)
    return ""


def _blame(fields: tuple[str, ...], sentence: str, proof: Evidence) -> str:
    """Report the enabled ones of FIELDS as refused; return SENTENCE with their names."""
    blamed = [name for name in fields if settings.effective(name)]
    for name in blamed:
        proof.knob(name, REFUSED, reason=sentence)
    return f"{', '.join(blamed)}: {sentence}." if blamed else f"{sentence}."
