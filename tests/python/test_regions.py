"""Which token is where, after any sequence of calls, against a model made of plain lists."""

import hypothesis.strategies as st
import numpy as np
import oracle
import oracle_blocks
import pariskv_core as pk
import pytest
import torch
from hypothesis import example, given, settings
from regions_model import RegionsModel
from support import make_config, regions_of, rows_of

HEAD_DIM = 64


def small_config(sink: int, local: int, update: int, **changes) -> pk.Config:
    return make_config(
        query_heads=1,
        kv_heads=1,
        head_dim=HEAD_DIM,
        sink=sink,
        local=local,
        update=update,
        threads=1,
        **changes,
    )


def keys_of(ids) -> torch.Tensor:
    """Rows that say who they are: token i has norm i + 1."""
    keys = torch.zeros(len(ids), 1, HEAD_DIM)
    keys[:, 0, 3] = torch.tensor(ids, dtype=torch.float32) + 1
    return keys


class Pair:
    """A cache and the model side by side."""

    def __init__(self, sink: int, local: int, update: int, **changes):
        self.cache = pk.Cache(small_config(sink, local, update, **changes))
        self.s = self.cache.add()
        block = changes.get("block", 0)
        grains = (block, oracle_blocks.opening(sink)) if block else ()
        self.model = RegionsModel(sink, local, update, *grains)
        self.next_id = 0

    def _new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def prefill(self, count: int) -> None:
        ids = self._new_ids(count)
        self.cache.prefill(0, [self.s], keys_of(ids), -keys_of(ids))
        self.model.prefill(ids)

    def decode(self, count: int) -> None:
        for token in self._new_ids(count):
            k = keys_of([token])
            self.cache.decode(0, [self.s], torch.ones(1, 1, HEAD_DIM), k, -k)
            self.model.decode(token)

    def flush(self, _: int = 0) -> None:
        self.cache.flush([self.s])
        self.model.flush()

    def truncate(self, count: int) -> None:
        count = min(count, self.cache.length(self.s))
        self.cache.truncate([self.s], drop=count)
        self.model.truncate(count)

    def fork(self, _: int = 0) -> None:
        parent, self.s = self.s, self.cache.fork(self.s)
        self.cache.remove(parent)

    def check(self) -> None:
        model, tokens = self.model, self.model.tokens()
        assert regions_of(self.cache, self.s) == model.counts()
        assert self.cache.length(self.s) == len(tokens)
        # Every token once and in order, K and V both.
        k, v = rows_of(self.cache, self.s)
        assert torch.equal(k, keys_of(tokens))
        assert torch.equal(v, -keys_of(tokens))
        # The zone's summaries are those of the zone's tokens.
        summaries = self.cache.summaries(0, self.s)
        assert summaries.zone_begin == len(model.sink)
        assert summaries.norms.shape == (1, len(model.retrieval))
        if summaries.block:  # which have norms of what is left of keys
            return
        norms = oracle.five_bits(np.array(model.retrieval) + 1.0)
        assert summaries.norms[0].tolist() == norms.tolist()


calls = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(0, 150)),
        st.tuples(st.just("decode"), st.integers(1, 12)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("truncate"), st.integers(0, 200)),
        st.tuples(st.just("fork"), st.just(0)),
    ),
    max_size=12,
)


@given(st.integers(0, 6), st.integers(0, 9), st.integers(1, 9), calls)
@example(4, 8, 4, [("decode", 20), ("truncate", 14), ("decode", 12)])
@example(4, 2, 9, [("prefill", 64), ("truncate", 60), ("prefill", 64), ("decode", 9)])
@example(0, 0, 1, [("decode", 3), ("truncate", 1), ("decode", 2)])
def test_any_sequence_of_calls(sink, local, update, sequence):
    pair = Pair(sink, local, update)
    pair.check()
    for name, count in sequence:
        getattr(pair, name)(count)
        pair.check()


@given(st.integers(0, 70), st.integers(0, 9), st.integers(1, 9), st.sampled_from([64, 256]), calls)
@settings(max_examples=40)
@example(70, 0, 1, 64, [("prefill", 150), ("prefill", 150), ("decode", 12), ("truncate", 70)])
@example(4, 9, 3, 256, [("prefill", 150), ("prefill", 150), ("truncate", 35), ("prefill", 150)])
def test_any_sequence_of_calls_in_blocks(sink, local, update, block, sequence):
    pair = Pair(sink, local, update, block=block)
    pair.prefill(oracle_blocks.opening(sink) - 56)
    for name, count in sequence:
        getattr(pair, name)(count)
        pair.check()


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 35, 36, 37, 63, 64, 65, 99, 100, 101, 127, 128])
def test_prompts_around_every_boundary(tokens):
    # sink 4, local 32, segments of 64: boundaries at 4, 36, 64, 100 and 128.
    pair = Pair(4, 32, 16)
    pair.prefill(tokens)
    pair.check()
    counts = pair.model.counts()
    assert counts == (min(tokens, 4), max(0, tokens - 36), min(max(0, tokens - 4), 32), 0)


@pytest.mark.parametrize(("local", "update"), [(32, 16), (16, 32), (16, 16), (0, 5), (7, 1)])
def test_decode_flushes_when_the_buffer_is_full(local, update):
    pair = Pair(4, local, update)
    pair.prefill(4 + local + 10)
    for step in range(1, 3 * update + 2):
        pair.decode(1)
        full, rest = divmod(step, update)
        assert regions_of(pair.cache, pair.s) == (4, 10 + full * update, local, rest)
    pair.check()


def test_a_prompt_shorter_than_the_window_flushes_late():
    pair = Pair(2, 10, 4)
    pair.decode(2 + 10)
    assert regions_of(pair.cache, pair.s)[1] == 0
    pair.decode(4)
    pair.check()
    assert regions_of(pair.cache, pair.s)[1] > 0


def test_layers_advance_on_their_own():
    cache = pk.Cache(small_config(2, 4, 3, layers=3))
    s = cache.add()
    for layer, tokens in enumerate((5, 0, 70)):
        cache.prefill(layer, [s], keys_of(range(tokens)), keys_of(range(tokens)))
    assert [cache.length(s, layer) for layer in range(3)] == [5, 0, 70]
    assert [regions_of(cache, s, layer) for layer in range(3)] == [
        (2, 0, 3, 0),
        (0, 0, 0, 0),
        (2, 64, 4, 0),
    ]


def test_flush_reaches_every_layer_and_only_the_sequences_named():
    cache = pk.Cache(small_config(0, 2, 50, layers=2))
    a, b = cache.add(), cache.add()
    for _ in range(5):
        k = keys_of([0, 0])
        for layer in range(2):
            cache.decode(layer, [a, b], torch.ones(2, 1, HEAD_DIM), k, k)
    cache.flush([b])
    for layer in range(2):
        assert regions_of(cache, a, layer) == (0, 0, 0, 5)
        assert regions_of(cache, b, layer) == (0, 3, 2, 0)
    cache.flush()
    assert regions_of(cache, a, 1) == (0, 3, 2, 0)


def test_flushes_are_counted_by_sequence_and_layer():
    pair = Pair(0, 2, 4)
    pair.decode(3)
    assert pair.cache.stats().flushes == 0
    pair.decode(1)
    assert pair.cache.stats().flushes == 1
    pair.decode(8)
    assert pair.cache.stats().flushes == 3
    assert pair.cache.stats().encoded_keys == len(pair.model.retrieval)
