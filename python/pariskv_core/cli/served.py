"""How many requests vLLM serves at once: what its plugin would count, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from pariskv_core._machine import Room
from pariskv_core._shapes import ModelShape
from pariskv_core.cli.text import count, size
from pariskv_core.serving import memory, sizes
from pariskv_core.vllm import defaults

_LIMITS = (4, 8, 16, 32, 64, 128)  # of requests, that are looked at
_STATES = 2  # of a request in each linear layer, where prefixes are found


@dataclass(frozen=True)
class Fewer:
    """What a lower --max-num-seqs would do: memory is held ready for so many requests."""

    max_num_seqs: int
    sequences: int


@dataclass(frozen=True)
class Served:
    """Of one rank. refusal: why vLLM would not start, if it would not."""

    sequences: int
    blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float | None  # None: on a CPU
    activations: int | None  # bytes; None: on a CPU, or the model's width is not known
    graphs: int | None  # bytes; None: on a CPU
    other_layers: int | None  # bytes; None: on a CPU, or there are none
    engine_bytes: int
    engine_host_bytes: int
    refusal: str | None
    fewer: Fewer | None = None

    def record(self) -> dict[str, Any]:
        return asdict(self)


def count_requests(
    shape: ModelShape,
    room: Room,
    weights: int,
    *,
    gpu: bool,
    longest: int,
    settings: dict[str, Any],
    utilization: float | None = None,
    sequences: int | None = None,
) -> Served:
    """
    longest                 tokens of each request, and --max-model-len
    settings                of pk.Config
    utilization, sequences  vLLM's options; None: its defaults
    """
    limits = defaults.default_limits(
        room.total, room.name, gpu=gpu, longest=longest, sequences=sequences
    )
    free = room.free - weights
    share = working = graphs = None
    if gpu:
        share = utilization or defaults.UTILIZATION
        graphs = memory.graphs(defaults.captures(limits.sequences), shape.layers)
        if shape.hidden:
            width = memory.Width(shape.hidden, shape.intermediate, shape.vocabulary)
            working = memory.activations(width, limits)
        taken = (working or 0) + graphs
        found = memory.on_gpu(free, room.total, share, taken, room.host, own=weights)
    else:
        found = memory.on_cpu(free)

    settings = {"dense_below": "batch"} | settings  # the plugin's default
    block = _block(shape)
    config = shape.config(device="cuda" if gpu else "cpu", segment_tokens=block, **settings)
    one = sizes.need(config, block, longest)
    load = sizes.Load(longest, limits.sequences, limits.chunk)
    others = memory.Others()
    if shape.other_layers and gpu:
        layers = memory.Layers(
            shape.layers,
            shape.sliding_layers,
            shape.window,
            max(shape.row_bytes, shape.sliding_row),
            linear=shape.linear_layers,
            states=_STATES,
        )
        others = memory.others(layers, limits, block, found.device)
    budgets = sizes.Budgets(max(found.device - others.bytes, 0), found.host)
    blocks = fit = 0
    refusal = None
    try:
        planned = sizes.plan(one, budgets, load, block=block, gpu=gpu)
    except ValueError as reason:
        refusal = defaults.lacking(reason)
    else:
        blocks, fit = planned.blocks, sizes.at_once(planned, load, block=block)
    return Served(
        sequences=fit,
        blocks=blocks,
        max_model_len=longest,
        max_num_seqs=limits.sequences,
        max_num_batched_tokens=limits.chunk,
        utilization=share,
        activations=working,
        graphs=graphs,
        other_layers=others.bytes if shape.other_layers and gpu else None,
        engine_bytes=budgets.device,
        engine_host_bytes=found.host,
        refusal=refusal,
    )


def advised(count: Callable[[int | None], Served]) -> Served:
    """With vLLM's default of --max-num-seqs, and which lower one would serve more at once.

    count  with so many requests at most
    """
    found = count(None)
    others = {most: count(most).sequences for most in _LIMITS if most < found.max_num_seqs}
    best = max(others, key=lambda most: (others[most], most), default=0)
    if not best or others[best] <= found.sequences:
        return found
    return replace(found, fewer=Fewer(best, others[best]))


def _block(shape: ModelShape) -> int:
    """Tokens: vLLM makes blocks of rows as large as a state, and has one number for both."""
    return sizes.BLOCK * max(-(-shape.state // (sizes.BLOCK * shape.row_bytes)), 1)


def sentences(found: Served) -> list[str]:
    """For people: the answer, and what was assumed."""
    if found.refusal:
        answer = f"vLLM does not start so: {found.refusal}."
    else:
        at_once = count(found.sequences, "sequence")
        answer = (
            f"vLLM serves {at_once} of {found.max_model_len:,} tokens at once, answers included."
        )
    if found.fewer is not None:
        more = count(found.fewer.sequences, "sequence")
        answer += f" With --max-num-seqs {found.fewer.max_num_seqs} it serves {more}."
    options = f"--max-model-len {found.max_model_len}, --max-num-seqs {found.max_num_seqs} and "
    options += f"--max-num-batched-tokens {found.max_num_batched_tokens}"
    if found.graphs is None:
        share = f"{memory.CPU_SHARE:.0%}"
        rest = f"The engine has {size(found.engine_bytes)}, {share} of what the weights leave."
        return [answer, f"Assumed for vLLM: {options}, one rank. {rest}"]
    options = f"--gpu-memory-utilization {found.utilization:g}, {options}"
    taken, missing = f"{size(found.graphs)} for graphs", ""
    if found.activations is None:
        missing = " Activations are not counted: a model's config says how wide they are."
    else:
        taken = f"{size(found.activations)} of activations and {taken}"
    if found.other_layers is not None:
        taken += f", and {size(found.other_layers)} for other layers"
    rest = (
        f"Beside weights, {taken} the engine has {size(found.engine_bytes)} of the GPU, and "
        f"{size(found.engine_host_bytes)} of host memory.{missing}"
    )
    return [answer, f"Assumed for vLLM: {options}, one GPU. {rest}"]
