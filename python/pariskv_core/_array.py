"""What the engine takes as an array."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """Anything that speaks DLPack: a torch tensor, a NumPy or JAX array, ...

    A tensor that requires a gradient is refused, since the gradient would be lost: pass
    `tensor.detach()`.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...
