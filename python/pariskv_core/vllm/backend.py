"""The attention backend: its layers hand queries, keys and values to the rank's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import pariskv_core as pk
from pariskv_core.serving import Engine, Logits, sizes

from . import allowed, beside, flash, ranks
from .names import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    KVQuantMode,
    MultipleOf,
    get_current_vllm_config_or_none,
    get_dtype_size,
    num_requests,
)
from .options import Options

BLOCK = 64  # tokens: the engine's segments are one of vLLM's blocks, a multiple of this


@dataclass
class Metadata(AttentionMetadata):
    """Of one step. What its rows are, the connector knows, which is told before the pass.

    rank     None while memory is profiled: there is no engine yet
    width    requests, with those that a graph has for padding
    capture  the batch that a capture decodes
    step     for vLLM's own attention over the engine's pages; None: the engine attends
    steps    which made it
    """

    rank: Engine | None
    layers: dict[str, int]
    width: int = 0
    capture: pk.Batch | None = None
    step: flash.Step | None = None
    steps: flash.Steps | None = None

    def schedule(self) -> None:
        """Once the lengths of a step's requests are set: of a replay before it begins."""
        if self.step is None or self.steps is None or self.step.scheduled:
            return
        assert self.rank is not None and self.rank.pages is not None
        self.steps.schedule(self.step, self.rank.pages)


def replayed(of_layers: Mapping[str, Any]) -> Metadata:
    """Of the graph that is replayed next: `build` is called with its number of requests."""
    return next(one for one in of_layers.values() if isinstance(one, Metadata))


class Builder(AttentionMetadataBuilder[Metadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        ranks.check(vllm_config)
        self._started = False
        options = Options(vllm_config)
        version = flash.version_of(options)
        self._steps: flash.Steps | None = None
        if version is not None:
            self._steps = flash.Steps(options, version, int(kv_cache_spec.block_size), device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Metadata:
        """Runs before the connector's `start_load_kv`, with the padded number of rows."""
        found = ranks.of(self.vllm_config)
        if found is None and self._started:  # else a pass would silently attend to nothing
            raise RuntimeError("[vllm] attention: the rank's engine is gone; please report this")
        if found is None:
            return Metadata(None, {})
        self._started = True
        metadata = Metadata(found.rank, found.layers, num_requests(common_attn_metadata))
        if self._steps is not None and found.rank.pages is not None:
            metadata.steps = self._steps
            metadata.step = self._steps.of(common_attn_metadata)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """For the pass before a capture, for the capture, and for dummy runs that replay it."""
        metadata = self.build(0, common_attn_metadata)
        if metadata.rank is not None:
            metadata.capture = metadata.rank.lanes.capture(metadata.width)
            metadata.schedule()
        return metadata


class Impl(AttentionImpl[Metadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        config = get_current_vllm_config_or_none()
        if config is not None:  # before weights are loaded
            ranks.check(config)
            allowed.check(Options(config))
            Backend.has_others = Options(config).beside
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "an encoder": attn_type != AttentionType.DECODER,
            **{name: value is not None for name, value in others.items()},
        }
        for what, asked in refused.items():
            if asked:
                raise NotImplementedError(
                    f"[vllm] model: expected layers of full, causal attention, got {what}; serve "
                    "this model without the plugin's options"
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks
        self.logits = Logits(self.scale, float(logits_soft_cap or 0.0))
        self._flash: int | None = None
        if config is not None:
            self._flash = flash.version_of(
                Options(config), sinks=sinks is not None, softcap=self.logits.softcap > 0
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:  # a parameter, which has its values by now
            sinks = self.sinks.detach().reshape(-1).float()
            self.logits = replace(self.logits, sinks=sinks)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """key, value  None in a layer that shares those of an earlier one"""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "[vllm] output: expected attention in the model's type, got a fused quantisation"
            )
        if attn_metadata is None or attn_metadata.rank is None:  # memory is profiled
            return output.zero_()
        rank, index = attn_metadata.rank, attn_metadata.layers[layer.layer_name]
        full = self._full(attn_metadata, query, output)
        if attn_metadata.capture is not None:
            lanes = attn_metadata.capture
            rank.decode_lanes(index, lanes, query, key, value, output, self.logits, full)
        else:
            rank.attend(index, query, key, value, output, self.logits, full)
        return output

    def _full(
        self, metadata: Metadata, query: torch.Tensor, output: torch.Tensor
    ) -> Callable[[], None] | None:
        """vLLM's own attention of this layer; None: the engine attends."""
        step, version = metadata.step, self._flash
        if step is None or version is None:
            return None
        assert metadata.rank is not None and metadata.rank.pages is not None
        pages, logits = metadata.rank.pages, self.logits

        def attend() -> None:
            metadata.schedule()
            flash.attend(
                step,
                pages,
                query,
                output,
                version=version,
                scale=self.scale,
                softcap=logits.softcap,
                sinks=self.sinks,
            )

        return attend


class Backend(AttentionBackend):
    """Registered as CUSTOM on GPUs. To it vLLM's blocks are numbers: bytes are the engine's."""

    has_others: ClassVar[bool] = False  # this process's model has layers that are vLLM's
    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(allowed.KV_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # a member of vLLM's AttentionBackendEnum

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if default_block_size % BLOCK == 0 else sizes.BLOCK

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(pk.HEAD_DIMS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A page of one number a token: vLLM's own pages are never written nor read."""
        allowed.check_caches([spec])
        if Backend.has_others:  # set when the first layer was made
            return beside.Spec.of(spec)
        return replace(
            spec,
            num_head_slots=1,
            state_content_bytes=get_dtype_size(spec.dtype),
            kv_quant_mode=KVQuantMode.NONE,
        )
