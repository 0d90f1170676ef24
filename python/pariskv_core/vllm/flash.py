"""vLLM's own attention over the engine's pages: the kernel that stock vLLM runs, with the same
arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pariskv_core.serving import Pages

from . import names
from .options import Options

_VERSIONS = (2, 3)  # of FlashAttention
_WHOLE = (-1, -1)  # the window of a layer that has none


def version_of(options: Options, *, sinks: bool = False, softcap: bool = False) -> int | None:
    """Of FlashAttention for this model; None: there is none, and the engine's own kernels serve."""
    if not options.on_gpu or options.dtype not in (torch.float16, torch.bfloat16):
        return None
    if options.head_dim % 8 or options.head_dim > 256:
        return None
    found = names.get_flash_attn_version(
        head_size=options.head_dim, has_sinks=sinks, requires_softcap=softcap
    )
    if found not in _VERSIONS and names.is_fa_version_supported(2):
        found = 2
    return None if found not in _VERSIONS or (found == 2 and sinks) else int(found)


@dataclass
class Step:
    """What FlashAttention is told of a step's requests.

    begins    (requests + 1) where the queries of each begin
    splits    parts of a request at most; 0: as it likes
    schedule  of FlashAttention 3; made once lengths are there
    """

    begins: torch.Tensor
    tokens: int
    longest_query: int
    longest: int
    requests: int
    splits: int
    schedule: torch.Tensor | None = None
    scheduled: bool = False


class Steps:
    """Makes them for one kind of layer."""

    def __init__(self, options: Options, version: int, block: int, device: torch.device) -> None:
        self._options = options
        self._version = version
        self._block = block
        # The size that FlashAttention 3 has for so many requests. Graphs read it where it lies.
        words = 1 + -(-options.widest // 4) * 4 * 4
        self._lasting = torch.zeros(words, dtype=torch.int32, device=device)

    def of(self, common: Any) -> Step:
        queries = names.queries_of(common)
        options = self._options
        captured = options.full_graphs and queries["tokens"] <= options.most_captured
        splits = options.most_splits if captured and self._version == 3 else 0
        return Step(**queries, requests=names.num_requests(common), splits=splits)

    def schedule(self, step: Step, pages: Pages) -> None:
        """Once the lengths of its requests are set."""
        step.scheduled = True
        if self._version != 3:
            return
        options = self._options
        made = names.get_scheduler_metadata(
            batch_size=step.requests,
            max_seqlen_q=step.longest_query,
            max_seqlen_k=step.longest,
            num_heads_q=options.query_heads,
            num_heads_kv=options.kv_heads,
            headdim=options.head_dim,
            cache_seqlens=pages.lengths[: step.requests],
            qkv_dtype=options.dtype,
            cu_seqlens_q=step.begins,
            page_size=self._block,
            causal=True,
            window_size=_WHOLE,
            num_splits=step.splits,
        )
        if not options.full_graphs:
            step.schedule = made
            return
        count = made.shape[0]
        self._lasting[:count] = made
        self._lasting[count:] = 0  # blocks beyond would take what is left there for work
        step.schedule = self._lasting[:count]


def attend(
    step: Step,
    pages: Pages,
    q: torch.Tensor,
    out: torch.Tensor,
    *,
    version: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """All queries of a step, over all tokens that pages serve; zeros for other requests."""
    names.flash_attn_varlen_func(
        q=q[: step.tokens],
        k=pages.keys,
        v=pages.values,
        out=out[: step.tokens],
        cu_seqlens_q=step.begins,
        max_seqlen_q=step.longest_query,
        seqused_k=pages.lengths[: step.requests],
        max_seqlen_k=step.longest,
        softmax_scale=scale,
        causal=True,
        window_size=list(_WHOLE),
        block_table=pages.table[: step.requests],
        softcap=softcap,
        scheduler_metadata=step.schedule,
        fa_version=version,
        num_splits=step.splits,
        s_aux=sinks,
    )
