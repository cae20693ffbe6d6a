"""The script's view of merged gradients, and their values before a micro-step.

Between backward and step a script may clip, scale, replace or clear gradients. That must happen
once, at the update, as with a large batch. So in all other micro-steps the script reads and writes
copies, which are dropped; and a copy of what was merged before lets it clear one micro-step alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Rounding of a gradient relative to its largest value, and the smallest divisor.
_ROUNDING, _SMALLEST = 1e-5, 1e-30


class KeptGradients:
    """The gradients of PARAMETERS as they were before the backwards of a micro-step."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._copies: dict[int, Any] = {}
        gradients = tensors.gradients(parameters)
        # The rows of sparse gradients cannot be copied.
        self._has_sparse = any(
            gradient is not None and gradient.is_selected_rows() for gradient in gradients
        ) or any(getattr(parameter, "main_grad", None) is not None for parameter in parameters)
        if not self._has_sparse:
            for parameter, gradient in zip(parameters, gradients):
                if gradient is not None:
                    self._copies[id(parameter)] = _copy(gradient)

    def restore(self, parameters: Iterable[Any], remove: Callable[[Any], None]) -> None:
        """Give those gradients back to PARAMETERS; REMOVE leaves one without a gradient.

        Raises RuntimeError if any gradient is sparse or in `main_grad`.
        """
        import paddle

        if self._has_sparse:
            raise RuntimeError(
                "fleetrun: gradient_merge: the script clears gradients that no optimizer step has"
                " used, after others were merged with them. This cannot be undone for gradients"
                " that are sparse or in main_grad, as some of them are."
            )
        with paddle.no_grad():
            for parameter in parameters:
                kept = self._copies.get(id(parameter))
                gradient = parameter.grad
                if kept is None:
                    remove(parameter)
                elif gradient is not None and gradient.dtype == kept.dtype:
                    # In place: it may be part of a bucket.
                    paddle.assign(kept, gradient)
                else:
                    remove(parameter)
                    tensors.set_gradient(parameter, _copy(kept))


class ScriptGradients:
    """The gradients that the script has read or written in a micro-step without an update."""

    def __init__(self) -> None:
        self._gradients: dict[int, Any] = {}
        # The in-place version of each copy that was made.
        self._versions: dict[int, int] = {}

    def is_changed(self) -> bool:
        """Whether the script has changed a copy that it has read."""
        return any(
            self._gradients[key].inplace_version != version
            for key, version in self._versions.items()
        )

    def replace(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return the GRADIENTS of PARAMETERS, replaced by the script's where it has some."""
        return [
            self._gradients.get(id(parameter), gradient)
            for parameter, gradient in zip(parameters, gradients)
        ]

    def read(self, parameter: Any, merged: Callable[[Any], Any]) -> Any:
        """Return the script's gradient of PARAMETER; at first a copy of what MERGED returns."""
        key = id(parameter)
        if key not in self._gradients:
            gradient = merged(parameter)
            if gradient is not None and gradient.is_selected_rows():
                return gradient
            self._gradients[key] = None if gradient is None else _copy(gradient)
            if gradient is not None:
                self._versions[key] = self._gradients[key].inplace_version
        return self._gradients[key]

    def write(self, parameter: Any, gradient: Any) -> None:
        """Set the script's gradient of PARAMETER."""
        self._gradients[id(parameter)] = gradient
        self._versions.pop(id(parameter), None)


def identities(parameters: Sequence[Any]) -> list[tuple[int, int] | None]:
    """Return the address and in-place version of each dense gradient, None for others."""
    return [
        None
        if gradient is None or gradient.is_selected_rows()
        else (gradient.data_ptr(), gradient.inplace_version)
        for gradient in tensors.gradients(parameters)
    ]


def is_rescaled(before: Any, now: Any) -> bool:
    """Whether the gradient NOW is BEFORE scaled or clamped.

    Clipping of any kind does that; adding another gradient does not.
    """
    import paddle

    if before is None or now is None or before.is_selected_rows():
        return now is None or before is now
    if before.shape != now.shape:
        return False
    with paddle.no_grad():
        old, new = (gradient.detach().astype("float32") for gradient in (before, now))
        factor = (old * new).sum() / (old * old).sum().clip(min=_SMALLEST)
        clamped = old.clip(new.min(), new.max())
        allowed = _ROUNDING * new.abs().max()
        return any(
            bool((new - candidate).abs().max() <= allowed) for candidate in (old * factor, clamped)
        )


def copies(gradients: Iterable[Any]) -> list[Any]:
    """Return copies of the dense GRADIENTS; other entries stay as they are."""
    return [
        gradient if gradient is None or gradient.is_selected_rows() else _copy(gradient)
        for gradient in gradients
    ]


def _copy(gradient: Any) -> Any:
    import paddle

    with paddle.no_grad():
        copy = gradient.clone()
    # So that operations which Paddle forbids on a gradient stay forbidden.
    copy.stop_gradient = gradient.stop_gradient
    return copy
