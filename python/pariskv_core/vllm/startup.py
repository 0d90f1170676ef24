"""What a configuration of vLLM asks for: refused in a sentence, or settings and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pariskv_core as pk
from pariskv_core.serving import HostShare, sizes

from . import allowed, beside
from .defaults import lacking
from .memory import available, most_host_memory, of_others
from .names import CacheGroups, init_logger
from .options import Options
from .settings import SECTION, Settings, parse

logger = init_logger("vllm.pariskv")

_FOR_BLOCKS = 7 / 8  # of a GPU's budget: the rest is kept free, or holds what is no block
_ENDS = 4 << 20  # bytes that the ends of slabs may take beyond what is asked for


@dataclass(frozen=True)
class Asked:
    """All that follows from a configuration: the same in every process."""

    settings: Settings
    block: int
    config: pk.Config  # of a rank's engine, without budgets


def asked(options: Options, cache: CacheGroups | None = None) -> Asked:
    """cache  once it is known: beside other layers those of the engine may have another shape"""
    allowed.check(options)
    settings = parse(*options.settings(SECTION))
    fields = settings.of_config()
    narrow = allowed.KV_DTYPES[options.kv_dtype]
    if narrow is not None:
        fields["kv_dtype"] = narrow
    device = "cuda" if options.on_gpu else "cpu"
    block, layers = options.block or sizes.BLOCK, options.layers
    kv_heads, head_dim = options.kv_heads, options.head_dim
    if cache is not None and cache.own is not None:
        block, layers = cache.block, len(cache.layers)
        kv_heads, head_dim = cache.kv_heads, cache.head_dim
    elif options.beside and beside.Spec.told is not None:  # before vLLM has made its groups
        told = beside.Spec.told
        block, kv_heads, head_dim = told.block_size, told.num_kv_heads, told.head_size
    made = sizes.engine_config(
        block,
        layers=layers,
        query_heads=options.query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=options.dtype,
        device=device,
        **fields,
    )
    return Asked(settings, block, made)


def planned(options: Options, wish: Asked, budgets: sizes.Budgets) -> sizes.Planned:
    """How many blocks the engine has: of vLLM's pool, or beside other layers of its own."""
    load = sizes.Load(
        longest=options.longest,
        sequences=options.sequences,
        chunk=options.chunk,
        # One prompt takes all of a step that it can, unless its share is bounded.
        prompts=1 + (options.chunk // options.part if options.part else 0),
    )
    one = sizes.need(wish.config, wish.block, load.longest)
    try:
        return sizes.plan(one, budgets, load, block=wish.block, gpu=options.on_gpu)
    except ValueError as reason:
        raise ValueError(f"[vllm] memory: {lacking(reason)}") from None


def budgets_of(options: Options, wish: Asked, *, laid_out: bool = False) -> sizes.Budgets:
    """laid_out  whether vLLM has taken the memory of other layers"""
    settings = wish.settings
    device = _set_budget(options, wish)
    host = settings.host_budget
    if not (device and host):
        found = available(options)
        left = found.device
        if options.beside and options.on_gpu and not laid_out:
            left -= of_others(options, wish.block, left).bytes
        device, host = device or max(left, 0), host or found.host
    return sizes.Budgets(int(device), int(host) // options.ranks_here)


def _set_budget(options: Options, wish: Asked) -> int:
    """What a rank's engine is given by an option, or 0: beside other layers vLLM's is for these."""
    return wish.settings.memory_budget or (0 if options.beside else options.cache_bytes)


# Of this process, by engine: memory changes meanwhile.
_plans: dict[str, tuple[Asked, sizes.Budgets, sizes.Planned]] = {}


def rank_budgets(options: Options, wish: Asked, blocks: int) -> sizes.Budgets:
    """Of a rank's engine on a GPU, now that the model is there.

    Refused where the GPU has less left than the engine core expected when it counted blocks.
    """
    settings = wish.settings
    host = settings.host_budget // options.ranks_here
    device = _set_budget(options, wish) or available(options).device
    one = sizes.need(wish.config, wish.block, options.longest)
    tokens = (blocks - 1) * wish.block
    rows = one.on_device(tokens, host) if host else tokens * one.device
    wanted = rows + one.costs.of(options.longest, prompt=options.longest)
    if device < wanted:
        raise ValueError(
            f"[vllm] memory: {blocks} blocks need {wanted / 1e9:.1f} GB of each GPU, and one has "
            f"{device / 1e9:.1f} GB left; set memory_budget in --additional-config, or lower "
            "--max-num-batched-tokens"
        )
    return sizes.Budgets(device, host or most_host_memory(options) // options.ranks_here)


def pinned_ahead(options: Options, wish: Asked, blocks: int, budgets: sizes.Budgets) -> int:
    """Bytes of a rank's host memory that are pinned from the start on: of `host_budget` all, else
    rows of requests that the GPU has no room for, up to three quarters of what there is."""
    if wish.settings.host_budget:
        return max(budgets.host - _ENDS, 0)
    one = sizes.need(wish.config, wish.block, options.longest)
    tokens = min(blocks * wish.block, options.sequences * options.longest)
    rows_here = max(int(budgets.device * _FOR_BLOCKS) - tokens * one.device, 0)
    return max(min(tokens * one.host - rows_here, budgets.host // 4 * 3), 0)


def override_blocks(options: Options) -> None:
    """Sets how many blocks vLLM has. In the engine core, before it makes its plan of the cache."""
    wish = asked(options)
    if options.beside:
        _override_others(options, wish)
        return
    most = _kept(options, wish, budgets_of(options, wish))
    if options.blocks is None:
        options.set_blocks(most.blocks)
        logger.info(
            "%d blocks of %d tokens, which memory_budget and host_budget pay for.",
            most.blocks,
            wish.block,
        )
    check_blocks(options.blocks or most.blocks, most)
    _promise(options, wish, options.blocks or most.blocks)


def _override_others(options: Options, wish: Asked) -> None:
    """vLLM's blocks are those of other layers, of which a GPU has as many as they need."""
    if not options.on_gpu:
        return
    others = of_others(options, wish.block, available(options).device)
    most = _kept(options, wish, budgets_of(options, wish))
    options.set_blocks(others.blocks)
    logger.info(
        "%d blocks of %d tokens for layers of full attention, %.1f GB for other layers.",
        most.blocks,
        wish.block,
        others.bytes / 1e9,
    )
    _promise(options, wish, most.blocks)


def _promise(options: Options, wish: Asked, blocks: int) -> None:
    """Host memory that these may take, to other servers of this machine."""
    if options.on_gpu:
        rows = blocks * wish.block * sizes.need(wish.config, wish.block, options.longest).host
        HostShare(options.server, options.engine).promise(rows * options.ranks)


def plan_of(options: Options, wish: Asked) -> sizes.Planned:
    """The plan that `override_blocks` went by, or with its budgets one for larger blocks, if vLLM
    has made them larger since. In a process that made none, of what vLLM's memory has left."""
    if options.engine not in _plans:
        return _kept(options, wish, budgets_of(options, wish, laid_out=True))
    before, budgets, plan = _plans[options.engine]
    return plan if before == wish else _kept(options, wish, budgets)


def _kept(options: Options, wish: Asked, budgets: sizes.Budgets) -> sizes.Planned:
    plan = planned(options, wish, budgets)
    _plans[options.engine] = wish, budgets, plan
    return plan


def check_blocks(blocks: int, most: sizes.Planned) -> None:
    if blocks > most.blocks:
        raise ValueError(
            f"[vllm] --num-gpu-blocks-override: expected at most {most.blocks}, which the budgets "
            f"pay for, got {blocks}; leave it out, or raise memory_budget or host_budget"
        )
