"""Rows as pages that other kernels read: a plain loop over them attends as the engine does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import assert_same_bits, make_config, randn_kv, randn_q, randn_step

DENSE_BELOW = 600


class Reader:
    """Attends to pages, as a kernel of somebody else's would."""

    def __init__(self, cache: pk.Cache, sequences: int, tokens: int) -> None:
        self.config = cache.config
        pages, table = cache.pages(), cache.page_table(sequences, tokens)
        self.keys, self.values, self.rows = (
            torch.from_dlpack(x) for x in (pages.keys, pages.values, pages.rows)
        )
        self.pages, self.lengths = torch.from_dlpack(table.pages), torch.from_dlpack(table.lengths)
        assert pages.tokens == self.keys.shape[1]

    def rows_of(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, each = int(self.lengths[row]), self.keys.shape[1]
        numbers = self.pages[row, : -(-tokens // each)].long()
        return tuple(x[numbers].flatten(0, 1)[:tokens] for x in (self.keys, self.values))

    def attend(
        self, q: torch.Tensor, counts: Sequence[int], rows: Sequence[int], out: torch.Tensor
    ) -> None:
        """The last tokens of each sequence; zeros where pages do not serve it."""
        group = self.config.query_heads // self.config.kv_heads
        first = 0
        for count, row in zip(counts, rows, strict=True):
            own = slice(first, first + count)
            first += count
            k, v = (x.double().repeat_interleave(group, 1) for x in self.rows_of(row))
            if len(k) == 0:
                out[own] = 0
                continue
            logits = torch.einsum("qhd,khd->hqk", q[own].double(), k)
            logits /= self.config.head_dim**0.5
            ahead = torch.arange(len(k), device=k.device) - (len(k) - count)
            hidden = ahead[None] > torch.arange(count, device=k.device)[:, None]
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            out[own] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


def make(**fields) -> pk.Config:
    return make_config(
        layers=2, dense_below=DENSE_BELOW, placement="auto", segment_tokens=64, **fields
    )


def close_to(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.cpu("rows on a CPU have no page numbers")
def test_a_cpu_says_that_it_has_no_pages() -> None:
    config = make_config()
    with pk.Cache(config) as cache:
        s = cache.add()
        with pytest.raises(ValueError, match=r"\[pages\] expected a cache on a GPU"):
            cache.pages()
        with pytest.raises(ValueError, match=r"\[page_table\] expected a cache on a GPU"):
            cache.page_table(1, 100)
        rng = np.random.default_rng(0)
        with pytest.raises(ValueError, match="call page_table first"):
            cache.prefill(0, [s], *randn_kv(rng, 5, config), page_rows=[0])
        cache.prefill(0, [s], *randn_kv(rng, 5, config))
        with pytest.raises(ValueError, match="call page_table first"):
            cache.decode(0, [s], *randn_step(rng, 1, config), dense=lambda: None)
        with pytest.raises(TypeError, match=r"\[decode\] dense: expected a function, got int"):
            cache.decode(0, [s], *randn_step(rng, 1, config), dense=1)
        assert cache.length(s) == 5


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_prompts_and_chunks_read_by_their_pages_are_what_attend_gives(dtype: str) -> None:
    config, rng = make(dtype=dtype), np.random.default_rng(1)
    with pk.Cache(config) as cache:
        reader = Reader(cache, 8, 3000)
        sequences = [cache.add() for _ in range(3)]
        for counts, rows in (([70, 900, 5], [3, 0, 7]), ([1, 130, 64], [0, 1, 2])):
            for layer in range(config.layers):
                k, v = randn_kv(rng, sum(counts), config)
                q = randn_q(rng, sum(counts), config)
                missing = cache.prefill(layer, sequences, k, v, counts, q=q, page_rows=rows)
                assert missing == []
                out = torch.empty_like(q)
                reader.attend(q, counts, rows, out)
                close_to(out, cache.attend(layer, sequences, q, counts))


@pytest.mark.cuda
def test_a_step_leaves_short_sequences_to_the_kernel_and_searches_the_others() -> None:
    config, rng = make(), np.random.default_rng(2)
    with pk.Cache(config) as cache:
        reader = Reader(cache, 8, 3000)
        lengths = [63, 900, 300, 640]
        sequences = [cache.add() for _ in lengths]
        for layer in range(config.layers):
            cache.prefill(layer, sequences, *randn_kv(rng, sum(lengths), config), lengths)
        for step in range(40):
            rows = [None, [5, 4, 7, 6]][step % 2]
            for layer in range(config.layers):
                q, k, v = randn_step(rng, 4, config)
                forks = [cache.fork(s) for s in sequences]
                expected = cache.decode(layer, forks, q, k, v)
                for fork in forks:
                    cache.remove(fork)
                out = torch.full_like(expected, 7)
                seen = []

                def attend(q=q, out=out, rows=rows, seen=seen) -> None:
                    order = rows or range(4)
                    seen.append(reader.lengths[list(order)].tolist())
                    reader.attend(q, [1] * 4, order, out)

                returned = cache.decode(
                    layer, sequences, q, k, v, out=out, dense=attend, page_rows=rows
                )
                assert returned is out
                assert seen == [[64 + step, 0, 301 + step, 0]]
                close_to(out, expected)
                assert_same_bits(out[[1, 3]], expected[[1, 3]])
        assert cache.stats().searched_tokens > 0


@pytest.mark.cuda
def test_a_graph_has_the_work_of_the_kernel_between_the_rows_and_the_search() -> None:
    config, rng = make(), np.random.default_rng(3)
    with pk.Cache(config) as cache, pk.Cache(config) as twin:
        reader = Reader(cache, 8, 3000)
        lengths = [63, 590, 900]
        k, v = randn_kv(rng, sum(lengths), config)
        for one in (cache, twin):
            sequences = [one.add() for _ in lengths]
            for layer in range(config.layers):
                one.prefill(layer, sequences, k, v, lengths)
        q, k, v = (torch.stack([x] * config.layers) for x in randn_step(rng, 4, config))
        outs = [torch.zeros_like(q[0]) for _ in range(config.layers)]
        width = reader.pages.shape[1]

        def mark(out: torch.Tensor) -> None:
            """What a graph can record: which slots are served, and their last page's first key."""
            served = reader.lengths[:4]
            last = ((served - 1).clamp(min=0) // reader.keys.shape[1]).long()
            page = reader.pages[:4].gather(1, last[:, None].clamp(max=width - 1))[:, 0]
            page = torch.where(served > 0, page, reader.pages[0, 0]).long()
            place = ((served - 1).clamp(min=0) % reader.keys.shape[1]).long()
            newest = reader.keys[page, place]
            shown = newest.repeat_interleave(config.query_heads // config.kv_heads, 1)
            out.copy_(torch.where((served > 0)[:, None, None], shown, torch.zeros_like(shown)))

        warm = [twin.fork(s) for s in sequences]
        for layer in range(config.layers):
            twin.decode(layer, warm, q[layer, :3], k[layer, :3], v[layer, :3])
            mark(outs[layer])
        for s in warm:
            twin.remove(s)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(config.layers):
                out = outs[layer]
                cache.decode(
                    layer, [pk.IDLE] * 4, q[layer], k[layer], v[layer], out=out,
                    dense=lambda out=out: mark(out),
                )  # fmt: skip
        own = cache.sequences()
        for step in range(20):
            for mine in (q, k, v):
                mine.copy_(torch.randn_like(mine))
            cache.advance(own)
            graph.replay()
            searched = lengths[1] + step + 1 >= DENSE_BELOW
            total = [n + step + 1 for n in lengths]
            assert reader.lengths.tolist()[:4] == [total[0], 0 if searched else total[1], 0, 0]
            for layer in range(config.layers):
                expected = twin.decode(
                    layer, sequences, *(x[layer, :3].contiguous() for x in (q, k, v))
                )
                group = config.query_heads // config.kv_heads
                keys = k[layer].repeat_interleave(group, 1)
                assert_same_bits(outs[layer][0], keys[0], "the row of a sequence that is served")
                if searched:
                    assert_same_bits(outs[layer][1], expected[1])
                else:
                    assert_same_bits(outs[layer][1], keys[1])
                assert_same_bits(outs[layer][2], expected[2], "a sequence that is searched")


@pytest.mark.cuda
def test_a_function_that_raises_ends_the_step_and_nothing_has_changed() -> None:
    config, rng = make(), np.random.default_rng(4)
    with pk.Cache(config) as cache:
        cache.page_table(2, 1000)
        s = cache.add()
        cache.prefill(0, [s], *randn_kv(rng, 63, config))

        def fails() -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            cache.decode(0, [s], *randn_step(rng, 1, config), dense=fails)
        assert cache.length(s) == 63

        def calls() -> None:
            cache.length(s)

        with pytest.raises(ValueError, match="dense must not call it"):
            cache.decode(0, [s], *randn_step(rng, 1, config), dense=calls)
        q, k, v = randn_step(rng, 1, config)
        cache.decode(0, [s], q, k, v, dense=lambda: None)
        assert cache.length(s) == 64
        assert_same_bits(cache.read(0, s, 63, 64)[0], k)


@pytest.mark.cuda
def test_rows_in_host_memory_or_in_8_bits_are_not_served() -> None:
    rng = np.random.default_rng(5)
    for fields in ({"placement": "host"}, {"kv_dtype": "int8"}):
        config = make_config(layers=1, dense_below=100, segment_tokens=64, **fields)
        with pk.Cache(config) as cache:
            reader = Reader(cache, 2, 9000)
            long, short = cache.add(), cache.add()
            cache.prefill(0, [long], *randn_kv(rng, 8000, config), page_rows=[0])
            torch.cuda.synchronize()
            cache.stats()
            counts = [10, 10]
            missing = cache.prefill(
                0, [long, short], *randn_kv(rng, 20, config), counts, page_rows=[0, 1]
            )
            assert missing == [0], fields
            assert reader.lengths.tolist() == [0, 10]


@pytest.mark.cuda
def test_memory_that_ended_sequences_had_is_read_again_by_new_ones() -> None:
    config, rng = make(), np.random.default_rng(6)
    with pk.Cache(config) as cache:
        reader = Reader(cache, 4, 3000)
        for turn in range(20):
            counts = [int(n) for n in rng.integers(1, 700, 4)]
            sequences = [cache.add() for _ in counts]
            k, v = randn_kv(rng, sum(counts), config)
            for layer in range(config.layers):
                cache.prefill(layer, sequences, k, v, counts, page_rows=range(4))
                first = 0
                for row, count in enumerate(counts):
                    mine, yours = reader.rows_of(row)
                    assert_same_bits(mine, k[first : first + count], f"turn {turn}")
                    assert_same_bits(yours, v[first : first + count])
                    first += count
            for s in sequences:
                cache.remove(s)


@pytest.mark.cuda
def test_arrays_outlive_a_cache_that_was_closed() -> None:
    config, rng = make(), np.random.default_rng(7)
    cache = pk.Cache(config)
    reader = Reader(cache, 1, 500)
    s = cache.add()
    k, v = randn_kv(rng, 100, config)
    cache.prefill(0, [s], k, v, page_rows=[0])
    cache.close()
    assert_same_bits(reader.rows_of(0)[0], k)
