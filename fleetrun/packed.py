"""The place of what `sinks.packing` adds to the bytecode of this module: that of other modules."""

from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

# In the source, nothing.
PARTS: "Any" = ...
