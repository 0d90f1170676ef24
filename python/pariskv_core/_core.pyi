"""The pariskv engine. Import pariskv_core instead."""

from collections.abc import Sequence
import os
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray
from typing_extensions import Self

import pariskv_core._array


class OutOfMemory(MemoryError):
    pass

HEAD_DIMS: tuple[int, ...]

def cpu_level() -> str:
    """
    The instruction set that the CPU backend runs on: "plain", "avx2" or "avx512".
    """

def is_built(backend: str) -> bool:
    """Whether this build has the backend, "cpu" or "cuda"."""

def is_available(backend: str) -> bool:
    """Whether it does and such a device is there."""

def rotation_signs(rotated_dim: int, seed: int) -> list[float]:
    """The signs, +1 or -1, of the rotation that keys are summarised in."""

def magnitude_levels() -> tuple[list[float], list[float]]:
    """The 7 thresholds and 8 centres of the magnitude codes."""

class ParisKV:
    """
    Every key is scored from a summary of a few bytes, a few percent are reranked, and the
    best rows are fetched for each query.

    top_k
        Rows attended to per kv head besides the resident ones.
    scorer
        "sign_norm", or the paper's "votes".
    group_rule
        "attention_mass", or the paper's "mean_query".
    schedule
        Steps (from_tokens, candidate_ratio, vote_ratio), by tokens in the retrieval zone. None: the
        default of such keys, with blocks or whole; it can be read back.
    min_candidates_per_row
        Candidates are never fewer than this times top_k.
    seed
        Of the rotation's signs.
    block
        Neighbouring keys that share a mean: 64, 128 or 256. Summaries then hold what is left of a
        key without it, with the channels of keys and queries balanced; prefill(q=) helps with
        that. 0: whole keys, as published; so it is with votes.
    tail
        What becomes of keys that are not selected. "sample" estimates their part of the attention
        from evenly spaced rows, each with the weight of the keys around it; "none" leaves it out.
        "own": sample where there are blocks.
    tail_rows
        Rows that are sampled per kv head: as many to twice as many.
    mass
        A share of the attention, above 0 and at most 1. Rows are taken, best first, until those that
        are attended to exactly (the resident ones among them) have it, as the search estimates it;
        never more than top_k. Cache.stats() then has the share that was reached, mean and least; with
        1 rows are as without a budget, and this is all it does. None: no budget.

    Raises ValueError, with what was expected and what came.
    """

    def __init__(self, *, top_k: int = 100, scorer: str = 'sign_norm', group_rule: str = 'attention_mass', schedule: Sequence[tuple[int, float, float]] | None = None, min_candidates_per_row: int = 4, seed: int = 42, block: int = 64, tail: str = 'own', tail_rows: int = 1024, mass: float | None = None) -> None: ...

    @property
    def top_k(self) -> int: ...

    @property
    def scorer(self) -> str: ...

    @property
    def group_rule(self) -> str: ...

    @property
    def schedule(self) -> list[tuple[int, float, float]]: ...

    @property
    def min_candidates_per_row(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def block(self) -> int: ...

    @property
    def tail(self) -> str: ...

    @property
    def tail_rows(self) -> int: ...

    @property
    def mass(self) -> float | None: ...

    def __repr__(self) -> str: ...

    def __eq__(self, other: object) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> dict[str, Any]: ...

    def __setstate__(self, fields: dict[str, Any], /) -> None: ...

    def replace(self, **changes: Any) -> Self:
        """The same settings with some of them changed."""

    def __replace__(self, **changes: Any) -> Self: ...

class HardKV:
    """
    Nothing is searched for. Each time that tokens enter a retrieval zone, the last 32 queries
    say how much attention its rows get, and each kv head keeps as many as it needs for a share p of
    that; decode attends to these until the next time. For long answers.

    All rows stay stored: truncate, fork, read and attend are exact. Until there were queries to choose
    by, decode attends to the zone in full: a prompt brings its own by prefill(q=). With
    placement="dropped" rows that were chosen from are given back.

    most
        Rows that a kv head keeps of the zone, at most.
    p
        Share of the attention to the zone that the kept rows get, above 0 and at most 1. With 1 every
        head keeps `most` rows: a SnapKV that is refreshed.
    least
        Rows that a kv head keeps at least.
    metric
        What rows are ranked by: "attention", or "snapkv", the attention of the best of a row's
        neighbours. How many are kept is said by the attention itself, whatever the metric.
    pool
        Neighbours that "snapkv" looks at, the row among them: odd.
    patience
        Choices that a row may lose and still be held: it is not attended to, but may come back.
    placement
        "host": K and V of the zone stay stored, in host memory, or on a GPU if Config(placement=) says
        so. "dropped": decode gives back whole segments of the zone whose rows were chosen from, so
        memory stops growing with the answer. What needs these rows refuses: attend, read, a truncate
        into them, prefill without q. Cache.regions and Cache.stats say how many there are.

    Raises ValueError, with what was expected and what came.
    """

    def __init__(self, *, most: int = 2048, p: float = 0.9, least: int = 0, metric: str = 'snapkv', pool: int = 7, patience: int = 1, placement: str = 'host') -> None: ...

    @property
    def most(self) -> int: ...

    @property
    def p(self) -> float: ...

    @property
    def least(self) -> int: ...

    @property
    def metric(self) -> str: ...

    @property
    def pool(self) -> int: ...

    @property
    def patience(self) -> int: ...

    @property
    def placement(self) -> str: ...

    def __repr__(self) -> str: ...

    def __eq__(self, other: object) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> dict[str, Any]: ...

    def __setstate__(self, fields: dict[str, Any], /) -> None: ...

    def replace(self, **changes: Any) -> Self:
        """The same settings with some of them changed."""

    def __replace__(self, **changes: Any) -> Self: ...

class PRKV:
    """
    A budget of rows is spent on two things: rows that the last 64 queries looked at most, which
    are kept, chosen anew each time that tokens enter the retrieval zone; and pages of neighbours, found
    for each query by a digest of their keys, without the rows that are kept.

    All rows stay stored: truncate, fork, read and attend are exact. Until there were queries to choose
    by, pages have the whole budget: a prompt brings its own by prefill(q=).

    budget
        Rows of the zone that decode attends to per kv head, at most.
    static_share
        Of the budget, for rows that are kept: 0 is ArkVale, pages alone; 1 is a SnapKV that is
        refreshed, without pages. "auto": as far as the first and the last of a prompt's 64 queries
        agree on the best rows. In whole pages' worth; what these leave over goes to rows.
    page
        Neighbours: 8, 16, 32 or 64.
    digest
        "mean": the middle of a page's keys and their mean distance from it, channel by channel.
        "max": to the farthest of them, so that a page's score is a bound of its keys' products.

    Raises ValueError, with what was expected and what came.
    """

    def __init__(self, *, budget: int = 1024, static_share: float | str = 0.25, page: int = 32, digest: str = 'mean') -> None: ...

    @property
    def budget(self) -> int: ...

    @property
    def static_share(self) -> float | str: ...

    @property
    def page(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def __repr__(self) -> str: ...

    def __eq__(self, other: object) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> dict[str, Any]: ...

    def __setstate__(self, fields: dict[str, Any], /) -> None: ...

    def replace(self, **changes: Any) -> Self:
        """The same settings with some of them changed."""

    def __replace__(self, **changes: Any) -> Self: ...

class Config:
    """
    What a cache is told when it is made. A value: configs compare, copy and pickle, and
    `config.replace(local=64)` is another one.

    layers, query_heads, kv_heads, head_dim, dtype
        The model. query_heads is a whole multiple of kv_heads; head_dim is one of HEAD_DIMS;
        dtype is "float32", "float16" or "bfloat16", or the type of torch or NumPy.
    value_dim
        Of values and outputs, where it is not head_dim, which is then of queries and keys alone:
        one of HEAD_DIMS; 0 is head_dim, as which it reads back.
    sink, local, update
        Tokens of a sequence's regions, [sink | retrieval | local | update buffer]; -1 is the
        policy's own: 4, 256 and 512 for ParisKV, 4, 32 and 128 for HardKV, 4, 64 and 128 for
        PRKV. They read back as the sizes themselves.
    dense_below
        Sequences with fewer tokens are attended to in full; -1 is the policy's own: 2,048 for
        ParisKV, 0 for HardKV and PRKV.
    policy
        How rows are chosen: ParisKV(...), which is also the default, HardKV(...) or PRKV(...).
    device
        "cpu", "cuda" or "cuda:<index>", or a torch.device.
    threads
        Of the CPU backend; 0 takes one per core.
    segment_tokens
        The store grows by this much.
    memory_budget
        The most bytes to hold on the device; 0 is no limit.
    placement
        Where a cache on a GPU keeps the rows of retrieval zones: "host" or "device".
    row_cache
        Fetched rows per kv head, layer and sequence that such a cache keeps on the GPU, so that a
        row that stays selected crosses the bus once. Rounded up to a power of two, at least 16;
        0 is none, -1 twice the rows that a step selects.
    host_budget
        The most bytes of host memory that such a cache may hold; 0 is no limit.

    Raises ValueError, with what was expected and what came.
    """

    def __init__(self, *, layers: int, query_heads: int, kv_heads: int, head_dim: int, value_dim: int = 0, dtype: object = 'bfloat16', sink: int = -1, local: int = -1, update: int = -1, dense_below: int = -1, policy: ParisKV | HardKV | PRKV | None = None, device: object = 'cpu', threads: int = 0, segment_tokens: int = 1024, memory_budget: int = 0, placement: str = 'host', row_cache: int = -1, host_budget: int = 0) -> None: ...

    @property
    def layers(self) -> int: ...

    @property
    def query_heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def sink(self) -> int: ...

    @property
    def local(self) -> int: ...

    @property
    def update(self) -> int: ...

    @property
    def dense_below(self) -> int: ...

    @property
    def policy(self) -> ParisKV | HardKV | PRKV: ...

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def segment_tokens(self) -> int: ...

    @property
    def memory_budget(self) -> int: ...

    @property
    def placement(self) -> str: ...

    @property
    def row_cache(self) -> int: ...

    @property
    def host_budget(self) -> int: ...

    def __repr__(self) -> str: ...

    def __eq__(self, other: object) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> dict[str, Any]: ...

    def __setstate__(self, fields: dict[str, Any], /) -> None: ...

    def replace(self, **changes: Any) -> Self:
        """The same settings with some of them changed."""

    def __replace__(self, **changes: Any) -> Self: ...

class MemoryUse:
    """A cache's memory, in bytes."""

    @property
    def live(self) -> int:
        """Handed out and not given back."""

    @property
    def peak(self) -> int:
        """The most that was ever live."""

    @property
    def reserved(self) -> int:
        """Held from the system."""

    @property
    def budget(self) -> int:
        """The most that may be reserved; 0 is no limit."""

    def __repr__(self) -> str: ...

class Regions:
    """Tokens of one layer of one sequence, by region."""

    @property
    def sink(self) -> int: ...

    @property
    def retrieval(self) -> int: ...

    @property
    def local(self) -> int: ...

    @property
    def buffer(self) -> int: ...

    @property
    def dropped(self) -> int:
        """
        Of retrieval: rows that were given back, see HardKV(placement="dropped").
        """

    def __repr__(self) -> str: ...

class Stats:
    """What a cache holds, and has done since it was made."""

    @property
    def memory(self) -> MemoryUse:
        """Of the cache's device."""

    @property
    def host_memory(self) -> MemoryUse:
        """Pinned host memory of a cache on a GPU."""

    @property
    def sequences(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Over all layers and sequences."""

    @property
    def row_bytes(self) -> int:
        """K and V, in whole segments."""

    @property
    def offloaded_bytes(self) -> int:
        """Of those, in host memory."""

    @property
    def summary_bytes(self) -> int:
        """Key summaries and their statistics."""

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def flushes(self) -> int: ...

    @property
    def encoded_keys(self) -> int:
        """Keys summarised, over kv heads."""

    @property
    def kept_rows(self) -> int:
        """Kept for steps to come, over kv heads."""

    @property
    def kept_bytes(self) -> int:
        """Copies of those, and the queries that are remembered."""

    @property
    def keeps(self) -> int:
        """Times that rows were chosen to be kept, per layer."""

    @property
    def dropped_rows(self) -> int:
        """Of the retrieval zones, given back: over kv heads."""

    @property
    def unusable_keys(self) -> int:
        """
        Keys of the retrieval zones that are never selected, over kv heads: not finite, or (ParisKV without blocks) zero. HardKV does not count them: 0.
        """

    @property
    def decode_tokens(self) -> int:
        """Per layer."""

    @property
    def searched_tokens(self) -> int:
        """Of those, the ones that searched."""

    @property
    def candidates(self) -> int:
        """Reranked, over kv heads."""

    @property
    def fetched_rows(self) -> int:
        """Selected, over kv heads."""

    @property
    def cached_rows(self) -> int:
        """Of those, found in the row cache of a GPU."""

    @property
    def mean_mass(self) -> float:
        """
        Share of the attention of the rows attended to exactly, as searches estimated it: its mean over tokens, layers and kv heads. With ParisKV(mass=...); else NaN.
        """

    @property
    def least_mass(self) -> float:
        """The least of these."""

    def __repr__(self) -> str: ...

class ParisKVExplanation:
    """The path of a search by ParisKV."""

    @property
    def coarse(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', writable=False)]:
        """(kv_heads, zone_tokens) uint8: coarse scores; 0 is never selected."""

    @property
    def candidate_positions(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', writable=False)]:
        """(kv_heads, candidates) int64, ascending; padded with -1."""

    @property
    def estimated(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', writable=False)]:
        """(query_heads, selected) float32: logits from the summaries."""

    @property
    def mass(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', writable=False)]:
        """
        (kv_heads) float32: with ParisKV(mass=...), the share of the attention of the rows attended to exactly, as estimated; NaN where no query is finite. Empty without.
        """

class HardKVExplanation:
    """What HardKV has besides the rows that it keeps."""

    @property
    def held(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', writable=False)]:
        """
        (kv_heads, width) int64 positions, ascending: not attended to, but they may come back; padded with -1.
        """

class PRKVExplanation:
    """
    What PRKV found for a query. Pages have numbers: that of a
    position is position // page.
    """

    @property
    def static_rows(self) -> int:
        """Rows that the budget has to be kept."""

    @property
    def first_page(self) -> int:
        """Of the zone."""

    @property
    def page_scores(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', writable=False)]:
        """
        (kv_heads, pages of the zone) float32: mean of the group's heads; -inf is a page all of whose rows are kept.
        """

    @property
    def pages(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', writable=False)]:
        """(kv_heads, width) int64, best first; padded with -1."""

class Explanation:
    """
    Why a query attends where it does; arrays are padded to one
    width, positions with -1 and numbers with NaN. They are empty when nothing was searched, `kept` when
    nothing was kept; with both empty the whole zone is attended to.
    """

    @property
    def searched(self) -> bool:
        """False: nothing was selected for this query."""

    @property
    def zone_begin(self) -> int:
        """First position of the retrieval zone."""

    @property
    def zone_tokens(self) -> int: ...

    @property
    def positions(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', writable=False)]:
        """(kv_heads, selected) int64, best first."""

    @property
    def worth(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', writable=False)]:
        """(kv_heads, selected) float32: the order is by this."""

    @property
    def exact(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', writable=False)]:
        """(query_heads, selected) float32: logits from the rows."""

    @property
    def kept(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', writable=False)]:
        """
        (kv_heads, width) int64 positions, ascending: rows that HardKV or PRKV keeps.
        """

    @property
    def details(self) -> None | ParisKVExplanation | HardKVExplanation | PRKVExplanation:
        """
        How the policy came to these rows; None when all of the zone is attended to.
        """

class Summaries:
    """
    The key summaries of one layer of one sequence, unpacked.

    With blocks, signs, magnitudes, weights and norms are those of key / balance - mean, the mean being
    that of the key's block.
    """

    @property
    def zone_begin(self) -> int:
        """Position of the first one."""

    @property
    def signs(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', writable=False)]:
        """(kv_heads, tokens, subspaces) uint8: bit j is rotated dim 8b+j >= 0."""

    @property
    def magnitudes(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', writable=False)]:
        """(kv_heads, tokens, rotated_dim) uint8: level 0 to 7."""

    @property
    def weights(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', writable=False)]:
        """
        (kv_heads, tokens, subspaces) float32: norm r_b / alpha_b, as it is used.
        """

    @property
    def norms(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', writable=False)]:
        """
        (kv_heads, tokens) float32, to 5 bits; 0 is a key that is never selected.
        """

    @property
    def block(self) -> int:
        """Keys that share a mean; 0: none do."""

    @property
    def means(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', writable=False)]:
        """
        (kv_heads, blocks, head_dim) float32: of keys / balance, one for each block that the zone has keys of; the key at a position has number position // block - zone_begin // block. Empty without blocks.
        """

    @property
    def balance(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', writable=False)]:
        """
        (kv_heads, head_dim) float32: queries are multiplied by it, keys divided. Empty without blocks.
        """

    @property
    def page(self) -> int:
        """Keys that share a digest, of PRKV; 0: none do."""

    @property
    def middles(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', writable=False)]:
        """
        (kv_heads, pages, head_dim) float32: the middle of each page's keys; NaN where none is finite. Page p is number p + zone_begin // page. Empty without pages.
        """

    @property
    def distances(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', writable=False)]:
        """
        (kv_heads, pages, head_dim) float32: how far they are from it, see PRKV.
        """

class Cache:
    """
    The KV cache of one model: all layers, all sequences.

    Calls on one cache take turns; calls on different caches run side by side, without the GIL.
    Arrays are anything that speaks DLPack, in the config's dtype, rows without gaps. An error
    leaves the cache as it was, and so does Ctrl-C, which a long call on the main thread answers at
    once: only `out` and `lse` may hold a part of what was being written.

    After os.fork the child may go on using a cache on the CPU. If another thread was inside a call on
    it at that moment, the child's calls raise ValueError.

    On a GPU calls enqueue their work on `stream`, a cudaStream_t as an integer, and return; left out,
    it is PyTorch's current stream, or the default one. Arrays must stay as they are until that work
    is done.
    """

    def __init__(self, config: Config) -> None: ...

    @property
    def config(self) -> Config: ...

    def close(self) -> None:
        """Frees everything; later calls raise ValueError."""

    def __enter__(self) -> Cache: ...

    def __exit__(self, *args: object) -> None: ...

    def add(self) -> int:
        """A new, empty sequence: its name, never used again."""

    def remove(self, sequence: int, *, stream: int | None = None) -> None:
        """Forgets a sequence: its bytes are zeroed and given back."""

    def fork(self, sequence: int, *, stream: int | None = None) -> int:
        """A new sequence equal to this one; storage is shared until one changes."""

    def reorder(self, sequences: Sequence[int], source: Sequence[int], *, stream: int | None = None) -> None:
        """Beam reordering: sequences[i] becomes what sequences[source[i]] was."""

    def truncate(self, sequences: Sequence[int], *, drop: int | Sequence[int] | None = None, keep: int | Sequence[int] | None = None, stream: int | None = None) -> None:
        """
        Drops the last tokens of each sequence in every layer, also across a flush.

        drop  how many go, one number for each sequence or one for all
        keep  how many stay instead: in every layer, whatever its length
        """

    def flush(self, sequences: Sequence[int] | None = None, *, stream: int | None = None) -> None:
        """
        Moves everything older than the local window to the retrieval zone.

        All layers of all these sequences are flushed, or none if anything fails.
        """

    def advance(self, sequences: Sequence[int], *, stream: int | None = None) -> None:
        """
        Makes room for the next replay of a captured graph of decode calls.

        A decode that is called while its stream is captured changes nothing; what it recorded decodes,
        each time it runs, one token of the sequences last named here, in this order. So: capture once,
        then for every token advance(batch) and replay. For caches on a GPU.
        """

    def prefill(self, layer: int, sequences: Sequence[int], k: pariskv_core._array.Array, v: pariskv_core._array.Array, lengths: Sequence[int] | None = None, *, q: pariskv_core._array.Array | None = None, scale: float | None = None, softcap: float = 0.0, stream: int | None = None) -> None:
        """
        Appends keys and values, a prompt or a chunk of one.

        k, v     (sum of lengths, kv_heads, head_dim), v value_dim, sequence after sequence; k after RoPE
        lengths  tokens of each sequence; may be left out for a single one
        q        (sum of lengths, query_heads, head_dim) the prompt's queries, after RoPE: a few early ones
                 tell how channels are balanced (ParisKV's block), so that better rows are picked; the
                 last ones say which rows HardKV and PRKV keep
        scale, softcap
                 of these queries, as in decode
        """

    def decode(self, layer: int, sequences: Sequence[int], q: pariskv_core._array.Array, k: pariskv_core._array.Array | None = None, v: pariskv_core._array.Array | None = None, *, out: pariskv_core._array.Array | None = None, scale: float | None = None, softcap: float = 0.0, sink_bias: pariskv_core._array.Array | None = None, return_lse: bool = False, stream: int | None = None) -> Any:
        """
        Appends one token per sequence, then attends to what matters.

        q          (batch, query_heads, head_dim), after RoPE
        k, v       (batch, kv_heads, head_dim), v value_dim; left out, nothing is appended: for layers
                   that share keys and values with this one
        out        where to write; a new array of q's library when left out
        scale      of q.k, 1 / sqrt(head_dim) when left out
        softcap    c > 0: logits become c tanh(logit / c)
        sink_bias  (query_heads) float32: a logit without a value row
        Returns out, (batch, query_heads, value_dim), or (out, lse) with the log-sum-exps,
        (batch, query_heads) float32.
        """

    def attend(self, layer: int, sequences: Sequence[int], q: pariskv_core._array.Array, lengths: Sequence[int] | None = None, *, k: pariskv_core._array.Array | None = None, v: pariskv_core._array.Array | None = None, out: pariskv_core._array.Array | None = None, scale: float | None = None, softcap: float = 0.0, sink_bias: pariskv_core._array.Array | None = None, return_lse: bool = False, stream: int | None = None) -> Any:
        """
        Exact causal attention of the last stored tokens over everything stored.

        q        (sum of lengths, query_heads, head_dim): the last tokens of each sequence
        lengths  how many each has; may be left out for a single one
        k, v     (sum of lengths, kv_heads, head_dim), v value_dim: these tokens are appended first, and
                 regions move as if they were decoded one by one; left out, they are stored already
        The rest, and what is returned, as in decode.
        """

    def explain(self, layer: int, sequence: int, q: pariskv_core._array.Array, *, scale: float | None = None, softcap: float = 0.0, sink_bias: pariskv_core._array.Array | None = None, stream: int | None = None) -> Explanation:
        """
        What decode would choose for this query now, and why. Changes nothing.

        q  (query_heads, head_dim)
        """

    def read(self, layer: int, sequence: int, begin: int, end: int, *, out: tuple[pariskv_core._array.Array, pariskv_core._array.Array] | None = None, stream: int | None = None) -> Any:
        """
        Copies stored rows out: (k, v), (end - begin, kv_heads, head_dim and value_dim).

        NumPy arrays, or torch's from a GPU, or into `out`, a pair; a bfloat16 cache on the CPU needs
        `out`.
        """

    def summaries(self, layer: int, sequence: int) -> Summaries:
        """The key summaries of a retrieval zone, unpacked."""

    def length(self, sequence: int, layer: int = 0) -> int:
        """Tokens of a sequence in one layer."""

    def regions(self, sequence: int, layer: int = 0) -> Regions:
        """How many tokens lie in each region."""

    def sequences(self) -> list[int]:
        """The sequences there are, oldest first."""

    def stats(self) -> Stats:
        """What the cache holds and has done."""

    def trim(self) -> None:
        """
        Gives memory that nothing uses back to the device and the system; waits for the device.
        """

    def save(self, sequence: int, path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> None:
        """
        Writes a sequence to a file, with a checksum for each part. Changes nothing.

        An older file is replaced when the disk has all of the new one, or not at all. Raises OSError for
        what the system refuses: a full disk, a folder that is not there.
        """

    def load(self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, stream: int | None = None) -> int:
        """
        A new sequence, equal to the one that was saved: what follows gives the same bits.

        The file may come from another device, and from a cache with another search, other windows and
        budgets. Raises ValueError for a file that is damaged or of another model, policy or version, and
        then adds nothing.
        """

__version__: str
