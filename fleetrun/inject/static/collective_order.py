"""Keeps collectives in the same order on all ranks, on every backend.

Paddle 2's executor does so by itself, Paddle 3's only for the old names of operators.
"""

from __future__ import annotations

from typing import Any

from . import program

_COLLECTIVES = {"all_reduce", "reduce", "broadcast"}


def keep(main: Any) -> None:
    """Make each collective of MAIN depend on the previous one in its block."""
    for block in main.blocks:
        places = [index for index, op in enumerate(block.ops) if op.type in _COLLECTIVES]
        # Backwards, so that earlier indexes stay valid.
        for before, place in reversed(list(zip(places, places[1:]))):  # noqa: RUF007 - 3.8
            carried = _variable(block, place)
            block._insert_op_without_sync(
                place,
                type="depend",
                inputs={"X": carried, "Dep": _variable(block, before)},
                outputs={"Out": carried},
                attrs={"op_role": program.role(block.ops[place])},
            )
    main._sync_with_cpp()


def _variable(block: Any, place: int) -> Any:
    return block._find_var_recursive(block.ops[place].input_arg_names[0])
