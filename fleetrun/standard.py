"""What a launch needs of contextlib, functools and collections, without their imports.

These take a tenth of a launch until its first rank.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Exported.
    from collections import deque as deque  # noqa: PLC0414
    from contextlib import suppress as suppress  # noqa: PLC0414
    from functools import partial as partial  # noqa: PLC0414

else:
    from _collections import deque as deque  # noqa: PLC0414
    from _functools import partial as partial  # noqa: PLC0414

    class suppress:  # noqa: N801 - as contextlib has it
        """Suppress exceptions of KINDS in the context."""

        def __init__(self, *kinds: type[BaseException]) -> None:
            self._kinds = kinds

        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
            return kind is not None and issubclass(kind, self._kinds)
