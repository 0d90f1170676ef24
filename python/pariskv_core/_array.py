"""What the engine takes as an array, as the type of its numbers, and as a device."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

DTypeName: TypeAlias = Literal["float32", "float16", "bfloat16"]
# As many as a host has. A name that is put together, f"cuda:{rank}", is a torch.device's.
DeviceName: TypeAlias = Literal[
    "cpu", "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7",
    "cuda:8", "cuda:9", "cuda:10", "cuda:11", "cuda:12", "cuda:13", "cuda:14", "cuda:15",
]  # fmt: skip


@runtime_checkable
class Array(Protocol):
    """Anything that speaks DLPack: a torch tensor, a NumPy or JAX array, ...

    A tensor that requires a gradient is refused, since the gradient would be lost: pass
    `tensor.detach()`.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class DTypeLike(Protocol):
    """A torch.dtype, or NumPy's."""

    @property
    def itemsize(self) -> int: ...


class DeviceLike(Protocol):
    """A torch.device."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...
