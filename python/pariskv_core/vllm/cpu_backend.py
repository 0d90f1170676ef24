"""The backend under the name that vLLM has for the one of CPUs, which serves all layers there."""

from __future__ import annotations

import inspect
from typing import Any

from . import allowed, beside
from .backend import Backend, Builder, Impl
from .names import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
    of_engine,
)


class CpuBackend(Backend):
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class _Stored(Impl):
    def do_kv_cache_update(self, *args: Any) -> None:
        """vLLM's pages are never written: `forward` stores."""


class AnyImpl(CPUAttentionBackendImpl):
    """Of a layer with a sliding window vLLM's own, of any other one the engine's."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        asked = inspect.signature(Impl).bind(*args, **named).arguments
        if asked.get("sliding_window") is None:
            return _Stored(*args, **named)
        return super().__new__(cls)


class AnyBuilder(CPUAttentionMetadataBuilder):
    def __new__(cls, kv_cache_spec: Any, *args: Any, **named: Any) -> Any:
        if of_engine(kv_cache_spec):
            return Builder(kv_cache_spec, *args, **named)
        return super().__new__(cls)


class CpuBesideBackend(CPUAttentionBackend):
    """Of a model with layers of several kinds: vLLM has one backend for all of them."""

    @staticmethod
    def get_impl_cls() -> type[AnyImpl]:
        return AnyImpl

    @staticmethod
    def get_builder_cls() -> type[AnyBuilder]:
        return AnyBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> Any:
        return Backend.get_supported_kernel_block_sizes(kv_cache_spec)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if getattr(spec, "sliding_window", None) is not None:
            return spec
        allowed.check_caches([spec])
        return beside.Spec.of(spec)
