"""Models of which only layers of full attention are the engine's.

All others, and their memory, are vLLM's: layers with a sliding window, linear ones. On a GPU vLLM
sends layers to backends by their kind:

--attention-config '{"backend_per_kind": {"full_attention": "CUSTOM"}}'

A block number of the pool that vLLM's groups share costs bytes of the widest of them, whoever has
it. So blocks of the engine's group are numbers of a pool of its own. Its page is as large as vLLM
would have made it: a small one would change the blocks of all others. None is ever used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .names import BlockPool, FullAttentionManager, FullAttentionSpec, KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class Spec(FullAttentionSpec):
    """Of layers whose rows are the engine's."""

    of_engine: ClassVar[bool] = True
    told: ClassVar[Spec | None] = None  # the last one that was made here, or that a worker has sent

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of vLLM's memory."""
        return 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the engine core, which learns nothing else of what its workers made of a layer."""
        self.__dict__.update(state)
        Spec.told = self

    @classmethod
    def of(cls, spec: Any) -> Spec:
        Spec.told = cls(**{field.name: getattr(spec, field.name) for field in fields(spec)})
        return Spec.told


class Manager(FullAttentionManager):
    """Blocks of the engine's group, of a pool of its own once `bind` has made it."""

    _shared: Any = None
    block_pool: Any
    new_block_ids: list[int]

    def bind(self, blocks: int) -> Any:
        self._shared = self.block_pool
        self.block_pool = BlockPool(
            num_gpu_blocks=blocks,
            enable_caching=self.enable_caching,
            hash_block_size=self._shared.hash_block_size,
        )
        self._null_block = self.block_pool.null_block
        return self.block_pool

    @property
    def records_new_block_ids(self) -> bool:
        return False

    def take_new_block_ids(self) -> list[int]:
        """None is set to zero: in vLLM's memory its number is a page of other layers."""
        self.new_block_ids = []
        return []

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        """Of the shared pool: none, or more than it has where our own has too few."""
        wanted = super().get_num_blocks_to_allocate(*args, **kwargs)
        if self._shared is None or wanted <= self.block_pool.get_num_free_blocks():
            return 0
        return int(self._shared.num_gpu_blocks) + 1


def register() -> None:
    KVCacheSpecRegistry._ensure_registered()  # who is not the first to register adds vLLM's own
    KVCacheSpecRegistry.register(Spec, Manager, uniform_type_base_spec=Spec)


register()  # in each process that reads a Spec
