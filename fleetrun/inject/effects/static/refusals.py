"""What Paddle stops at when it builds a static program, in a sentence that says what to do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..evidence import REFUSED

if TYPE_CHECKING:
    from ..evidence import Evidence

PIR = (
    "Static fleet of Paddle {version} works with its older representation of programs only: start "
    "with fleetrun --env=FLAGS_enable_pir_api=0, or put FLAGS_enable_pir_api: 0 into the section "
    "`flags` of the strategy."
)


class Stop(NamedTuple):
    """Which of these fields are to blame when Paddle's error has TEXT in it, and what to say."""

    text: str
    fields: tuple[str, ...]
    sentence: str


_STOPS = (
    Stop(
        "must be Value, but got Variable",
        ("amp", "localsgd", "adaptive_localsgd"),
        "Paddle {version} cannot build this in its older representation of programs, which static "
        "fleet needs and which is without paddle.{function}",
    ),
    Stop("DGC is only support GPU", ("dgc",), "Paddle has dgc for GPUs only"),
    Stop(
        "FLAGS_dynamic_static_unified_comm",
        ("sharding",),
        "Paddle {version} shards static programs on GPUs only",
    ),
    Stop(
        "not in this block",
        ("recompute",),
        "recompute_configs names a checkpoint that is no variable of this program ({error})",
    ),
)


def needs_older_programs() -> str:
    """Return what to say where Paddle builds programs that its fleet cannot work with."""
    paddle: Any = sys.modules["paddle"]
    in_pir_mode = getattr(paddle.framework, "in_pir_mode", bool)
    return PIR.format(version=paddle.__version__) if in_pir_mode() else ""


def explain(error: Exception, proof: Evidence) -> str:
    """Put the fields that led to ERROR into the PROOF as refused; return what to say, if known."""
    paddle: Any = sys.modules["paddle"]
    text = str(error)
    for stop in _STOPS:
        if stop.text not in text:
            continue
        function = text.partition("(): argument")[0].split()[-1:]
        sentence = stop.sentence.format(
            version=paddle.__version__, function="".join(function), error=text.partition("\n")[0]
        )
        blamed = [name for name in stop.fields if settings.effective(name)]
        for name in blamed:
            proof.knob(name, REFUSED, reason=sentence)
        return f"{', '.join(blamed)}: {sentence}." if blamed else f"{sentence}."
    return ""
