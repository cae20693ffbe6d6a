"""Refuses static programs that Paddle cannot build, and says what to do instead.

We do not set FLAGS_enable_pir_api=0 ourselves: it takes effect when Paddle is imported, before
it is known whether the script is static, and it changes `paddle.jit.to_static` in other scripts.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import parameter_servers, settings
from ..evidence import device_kind
from . import program
from .cpu import gloo

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
_SPARSE = (
    "Paddle's static graphs cannot sum the sparse gradient {name} over ranks on CPUs: make its"
    " Embedding with sparse=False."
)
# Its optimizer of one field replaces that of another, which would have written the allreduces.
_APART = (
    "Fleet of Paddle {version} sums no gradient of this program, and ranks would train apart: use"
    " fewer fields of the strategy together, as gradient_merge without sharding."
)
# The block of updates does not say what it reads; seen in 3.3.1: it ran before the last addition.
_TOO_EARLY = (
    "Fleet of Paddle {version} updates shards before all of their gradients are added: leave out"
    " gradient_merge_acc_step of sharding_configs."
)


def before(ranks: int, *, is_second: bool) -> str:
    """Return why RANKS cannot minimize a loss, the second one of its program if IS_SECOND."""
    kind, version = device_kind(), _version()
    # With one rank most programs survive it; with merging, each counts the runs of both.
    if is_second and (ranks > 1 or settings.is_on("gradient_merge")):
        return _TWO_LOSSES.format(version=version)
    if ranks > 1 and kind not in ("cpu", "gpu", "xpu", "") and not parameter_servers.are_used():
        return _PLUG_INS.format(version=version, kind=kind)
    return ""


def after(main: Any, ranks: int) -> str:
    """Return why RANKS cannot train MAIN, as Paddle has rewritten it, or nothing."""
    for block in main.blocks if gloo.is_used() else ():
        for name, variable in block.vars.items():
            if "SELECTED_ROWS" in str(variable.type):
                return _SPARSE.format(name=name)
    ops = [*program.operators(main)]
    if any(program.merged_updates(op) and op.input_arg_names == op.input("Cond") for op in ops):
        return _TOO_EARLY.format(version=_version())
    sends = any(op.has_attr("ring_id") for op in ops)
    is_alone = ranks == 1 or parameter_servers.are_used() or not program.updates(main)
    return "" if sends or is_alone else _APART.format(version=_version())


def needs_older_programs() -> str:
    """Return the explanation if Paddle builds programs that its fleet cannot handle, or nothing."""
    paddle: Any = sys.modules["paddle"]
    in_pir_mode = getattr(paddle.framework, "in_pir_mode", bool)
    return PIR.format(version=_version()) if in_pir_mode() else ""


def _version() -> str:
    return str(sys.modules["paddle"].__version__)
