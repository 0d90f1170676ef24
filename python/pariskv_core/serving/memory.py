"""How much memory an engine may have where no budget is set, from numbers alone.

A plugin has the numbers from its host's configuration, `pariskv plan` from a model's files: both
count alike.
"""

from __future__ import annotations

from dataclasses import dataclass

_GRAPH = 1 << 20  # of one layer in one captured graph: .74 to .86 MiB were measured
_RUNTIME = 1 << 28  # of a GPU, whatever is captured
_BESIDE = 3 << 29  # of a process on a GPU, beside its tensors: a context, workspaces of libraries
_HOST_SHARE = 0.8  # of what is free beside a GPU, that blocks are counted for
CPU_SHARE = 0.5  # of what is free once the model is loaded: the server works in the rest
_LIVE = 3  # tensors as wide as the widest of a layer that are alive at once


@dataclass(frozen=True)
class Available:
    device: int  # of one rank
    host: int = 0  # of all ranks of this machine


@dataclass(frozen=True)
class Width:
    """Of a model, in numbers: hidden_size, intermediate_size and vocab_size of its config."""

    hidden: int
    intermediate: int
    vocabulary: int


@dataclass(frozen=True)
class Limits:
    """Of a step of the host. chunk: new tokens of all its requests."""

    sequences: int
    chunk: int


def activations(width: Width, limits: Limits, ranks: int = 1) -> int:
    """Bytes that a forward pass takes, generously: a host measures them only later."""
    widest = max(width.intermediate * 2 // ranks, width.hidden)
    rows = limits.chunk * widest * 2
    logits = limits.sequences * width.vocabulary * 4
    return (rows + logits) * _LIVE


def graphs(captured: int, layers: int) -> int:
    """Bytes of a GPU that captured graphs take, and the runtime beside them."""
    return captured * layers * _GRAPH + _RUNTIME


def on_gpu(
    free: int, total: int, utilization: float, working: int, host: int, own: int | None = None
) -> Available:
    """
    free, total  bytes of the GPU, once the model is loaded
    utilization  share of `total` for what this server takes
    working      bytes of activations and graphs
    host         bytes of host memory that are free
    own          bytes of this server's tensors: other servers have shares of their own. None: all
                 that is not free is this server's
    """
    taken = total - free if own is None else min(own + _BESIDE, total - free)
    room = min(int(total * utilization) - taken, free) - working
    return Available(max(room, 0), int(host * _HOST_SHARE))


@dataclass(frozen=True)
class Layers:
    """Of a model of which those with a sliding window and linear ones remain the host's.

    window       tokens that the former look back to
    token_bytes  of a token's K and V in one layer of a rank
    states       of a request in each linear layer; a block has one, in as many bytes as rows take
    """

    full: int
    sliding: int
    window: int
    token_bytes: int
    linear: int = 0
    states: int = 1


@dataclass(frozen=True)
class Others:
    """What such layers take of a GPU: blocks of the host's pool, and bytes of all of them."""

    blocks: int = 0
    bytes: int = 0


def others(
    layers: Layers, limits: Limits, block: int, device: int, blocks: int | None = None
) -> Others:
    """They need what their windows hold: of each request the last tokens, and of a step's prompts
    what is computed. Linear ones need their states, and one more for each prefix that is found
    again: as many as there are requests. A host would give them all that there is; they get half
    of it at most.

    block   tokens
    device  bytes that are free for all layers
    blocks  where somebody has said how many
    """
    # vLLM's groups have as many layers each: those of the rarest kind, if it is much rarer.
    counts = [count for count in (layers.full, layers.sliding, layers.linear) if count]
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    sliding, linear = -(-layers.sliding // size), -(-layers.linear // size)
    window = -(-layers.window // block) + 2
    request = sliding * window + linear * layers.states
    first = 1 + request + sliding * -(-limits.chunk // block)  # for a prompt that takes a step
    each = size * block * layers.token_bytes
    wanted = first + (request + linear * (layers.states - 1)) * limits.sequences
    made = blocks or max(min(wanted, device // 2 // each), first)
    return Others(made, made * each)


def on_cpu(free: int, ranks: int = 1) -> Available:
    return Available(int(max(free, 0) * CPU_SHARE) // ranks)
