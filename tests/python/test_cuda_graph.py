"""Decode as a CUDA graph: recorded once, replayed while sequences grow, the bits of eager calls."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    DTYPES,
    SCORERS,
    assert_same_bits,
    assert_same_sequence,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    state_of,
)

pytestmark = pytest.mark.cuda


class Graph:
    """One step of all layers for a batch of some size, recorded."""

    def __init__(self, cache: pk.Cache, sequences: list[int], **options):
        config, batch = cache.config, len(sequences)
        dtype = getattr(torch, config.dtype)
        kv = (config.layers, batch, config.kv_heads, config.head_dim)
        q = (config.layers, batch, config.query_heads, config.head_dim)
        self.cache = cache
        self.inputs = [torch.zeros(shape, dtype=dtype) for shape in (q, kv, kv)]
        warm_up(config, **options)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [
                cache.decode(
                    layer,
                    sequences,
                    *(x[layer] for x in self.inputs),
                    return_lse=True,
                    **options,
                )
                for layer in range(config.layers)
            ]

    def replay(self, step) -> list[torch.Tensor]:
        """With these inputs, (layers, batch, ...) each; outputs and log-sum-exps by layer."""
        for mine, given in zip(self.inputs, step, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return [x.clone() for result in self.results for x in result]

    def step(self, sequences: list[int], step) -> list[torch.Tensor]:
        self.cache.advance(sequences)
        return self.replay(step)


def warm_up(config: pk.Config, **options) -> None:
    """Loads every kernel: that cannot be done while recording."""
    with pk.Cache(config) as cache:
        s = cache.add()
        rng = np.random.default_rng(0)
        for layer in range(config.layers):
            cache.prefill(layer, [s], *randn_kv(rng, 200, config))
            cache.decode(layer, [s], *randn_step(rng, 1, config), return_lse=True, **options)
    torch.cuda.synchronize()


def eager(cache: pk.Cache, sequences: list[int], step, **options) -> list[torch.Tensor]:
    results = []
    for layer in range(cache.config.layers):
        inputs = (x[layer] for x in step)
        results += cache.decode(layer, sequences, *inputs, return_lse=True, **options)
    return results


def make_steps(config: pk.Config, batch: int, count: int, seed: int = 0) -> list:
    """Inputs of every layer, made on the GPU."""
    random = torch.Generator("cuda").manual_seed(seed)
    heads = (config.query_heads, config.kv_heads, config.kv_heads)
    dtype = getattr(torch, config.dtype)
    return [
        [
            torch.randn(config.layers, batch, h, config.head_dim, generator=random).to(dtype)
            for h in heads
        ]
        for _ in range(count)
    ]


def filled_with(cache: pk.Cache, lengths: list[int], seed: int = 0) -> list[int]:
    sequences = [cache.add() for _ in lengths]
    rng = np.random.default_rng(seed)
    for layer in range(cache.config.layers):
        k, v = randn_kv(rng, sum(lengths), cache.config)
        cache.prefill(layer, sequences, k, v, lengths)
    return sequences


def twins(config: pk.Config, lengths: list[int], **options):
    """A cache with its recorded step, and one that is stepped call by call."""
    cache, twin = pk.Cache(config), pk.Cache(config)
    sequences, alike = filled_with(cache, lengths), filled_with(twin, lengths)
    return Graph(cache, sequences, **options), sequences, twin, alike


def assert_same_results(mine, theirs, what: str = "") -> None:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert_same_bits(a, b, f"{what} result {i}")


def assert_same_state(graph: Graph, sequences, twin: pk.Cache, alike, seed: int = 9) -> None:
    assert state_of(graph.cache) == state_of(twin)
    q = randn_q(np.random.default_rng(seed), 1, twin.config)[0]
    for s, t in zip(sequences, alike, strict=True):
        assert_same_sequence(graph.cache, s, twin, t, q)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("lengths", [[300], [0, 170, 461]], ids=["alone", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_gives_the_bits_of_eager_calls(dtype, lengths, scorer):
    config = make_config(dtype=dtype, layers=3, scorer=scorer)
    graph, sequences, twin, alike = twins(config, lengths)
    for i, step in enumerate(make_steps(config, len(lengths), 110)):
        mine = graph.step(sequences, step)
        assert_same_results(mine, eager(twin, alike, step), f"step {i}")
    assert twin.stats().flushes >= 2 * 3 * len(lengths)
    assert_same_state(graph, sequences, twin, alike)


@pytest.mark.parametrize(("batch", "heads"), [(1, 7), (1, 33), (3, 8), (5, 7), (9, 8)])
def test_a_batch_that_goes_in_branches(batch, heads):
    """From 16 heads on, halves of them are searched side by side: the same bits."""
    lengths = [300, 0, 41, 900, 513, 200, 77, 650, 129][:batch]
    config = make_config(layers=2, query_heads=2 * heads, kv_heads=heads)
    graph, sequences, twin, alike = twins(config, lengths)
    for i, step in enumerate(make_steps(config, len(lengths), 80)):
        mine = graph.step(sequences, step)
        if i % 9 == 0:
            assert_same_results(mine, eager(twin, alike, step), f"step {i}")
            continue
        for row, s in enumerate(alike):  # each of them in a batch of its own
            one = [x[:, row : row + 1] for x in step]
            theirs = eager(twin, [s], one)
            assert_same_results([x[row : row + 1] for x in mine], theirs, f"step {i}, row {row}")
    assert_same_state(graph, sequences, twin, alike)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_more_heads_than_blocks(dtype):
    """A block has several parts of the rows and slices of the candidates: the same bits."""
    lengths = [97 * i % 1100 for i in range(72)]
    config = make_config(dtype=dtype)
    graph, sequences, twin, alike = twins(config, lengths)
    for i, step in enumerate(make_steps(config, len(lengths), 3)):
        mine = graph.step(sequences, step)
        for row, s in enumerate(alike):
            theirs = eager(twin, [s], [x[:, row : row + 1] for x in step])
            assert_same_results([x[row : row + 1] for x in mine], theirs, f"step {i}, row {row}")
    assert_same_state(graph, sequences, twin, alike)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_default_sizes(placement):
    config = pk.Config(
        layers=2,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        device="cuda",
        placement=placement,
        update=64,
    )
    graph, sequences, twin, alike = twins(config, [3000, 10_011])
    for i, step in enumerate(make_steps(config, 2, 200)):
        assert_same_results(graph.step(sequences, step), eager(twin, alike, step), f"step {i}")
    assert_same_state(graph, sequences, twin, alike)


@pytest.mark.slow
def test_ten_thousand_replays_while_sequences_grow_and_flush():
    config = make_config(
        layers=2,
        query_heads=8,
        head_dim=128,
        dtype="bfloat16",
        top_k=32,
        update=96,
        segment_tokens=128,
        dense_below=1500,
        schedule=[(0, 0.25, 0.3), (3000, 0.1, 0.2), (7000, 0.05, 0.2)],
    )
    graph, sequences, twin, alike = twins(config, [10, 900, 2500])
    wrong = torch.zeros((), dtype=torch.int64)
    some = make_steps(config, 3, 97)
    for i in range(10_000):
        step = some[i % len(some)]
        mine, theirs = graph.step(sequences, step), eager(twin, alike, step)
        for a, b in zip(mine, theirs, strict=True):
            whole = torch.int16 if a.element_size() == 2 else torch.int32
            wrong += (a.view(whole) != b.view(whole)).any()
        if i % 1000 == 999:
            assert int(wrong) == 0, f"by step {i}"
    assert_same_state(graph, sequences, twin, alike)


def test_the_same_graph_across_every_threshold():
    # From attending in full to searching, from one step of the schedule to the next, from one
    # segment and one table of segments to the next.
    config = make_config(
        dense_below=300, schedule=[(0, 0.5, 0.5), (350, 0.2, 0.3), (500, 0.1, 0.2)], layers=2
    )
    graph, sequences, twin, alike = twins(config, [5, 250])
    for i, step in enumerate(make_steps(config, 2, 900)):
        mine = graph.step(sequences, step)
        if i % 7 == 0 or 40 < i < 60 or 290 < i < 310:
            assert_same_results(mine, eager(twin, alike, step), f"step {i}")
        else:
            eager(twin, alike, step)
    assert twin.length(alike[1]) == 1150  # 18 segments: the first table holds 16
    assert_same_state(graph, sequences, twin, alike)


def test_a_graph_serves_other_sequences_once_they_are_named():
    config = make_config(layers=2)
    graph, first, twin, alike = twins(config, [100, 300])
    second, same = filled_with(graph.cache, [77, 512], 5), filled_with(twin, [77, 512], 5)
    steps = make_steps(config, 2, 60)
    for i, step in enumerate(steps):
        mine, theirs = [(first, alike), (second, same)][i % 2]
        assert_same_results(graph.step(mine, step), eager(twin, theirs, step), f"step {i}")
    # Turned round, mixed, and with a newcomer.
    third, new = graph.cache.add(), twin.add()
    for mine, theirs in (
        (first[::-1], alike[::-1]),
        ([first[0], second[1]], [alike[0], same[1]]),
        ([third, first[1]], [new, alike[1]]),
    ):
        for step in steps[:5]:
            assert_same_results(graph.step(mine, step), eager(twin, theirs, step))
    assert_same_state(graph, [*first, *second, third], twin, [*alike, *same, new])


@pytest.mark.parametrize("recorded", [0, 1], ids=["few", "many"])
def test_recorded_for_few_candidates_and_replayed_for_many(recorded):
    """A recorded step gives the same bits as an eager one, however many candidates it finds."""
    config = make_config(dtype="bfloat16", schedule=[(0, 0.5, 0.3)])
    cache, twin = pk.Cache(config), pk.Cache(config)
    lengths = [300, 10, 17_000, 20]  # of two batches, each with one that is not searched
    mine, alike = filled_with(cache, lengths), filled_with(twin, lengths)
    batches = [(mine[:2], alike[:2]), (mine[2:], alike[2:])]
    graph = Graph(cache, batches[recorded][0])
    for i, step in enumerate(make_steps(config, 2, 20)):
        before = twin.stats().candidates
        ours, theirs = batches[i % 2]
        assert_same_results(graph.step(ours, step), eager(twin, theirs, step), f"step {i}")
        assert (twin.stats().candidates - before > 2 * 8192) == (i % 2 == 1)
    assert_same_state(graph, mine, twin, alike)


def test_sequences_may_be_changed_between_replays():
    config = make_config(layers=2)
    graph, sequences, twin, alike = twins(config, [200, 333])
    steps = iter(make_steps(config, 2, 400))

    def go(count: int) -> None:
        for _ in range(count):
            step = next(steps)
            assert_same_results(graph.step(sequences, step), eager(twin, alike, step))

    caches = ((graph.cache, sequences), (twin, alike))
    go(20)
    for cache, batch in caches:
        cache.truncate([batch[0]], drop=37)
    go(20)
    for cache, batch in caches:
        cache.flush(batch)
        batch.append(cache.fork(batch[0]))
        cache.remove(batch.pop(0))
    go(60)
    for cache, batch in caches:
        cache.reorder(batch, [1, 1])
    go(60)
    k, v = randn_kv(np.random.default_rng(3), 150, config)
    for cache, batch in caches:
        for layer in range(2):
            cache.prefill(layer, [batch[1]], k, v)
    go(60)
    assert_same_state(graph, sequences, twin, alike)


def test_replay_without_advance_decodes_the_same_token_again():
    config = make_config(layers=2)
    graph, sequences, twin, alike = twins(config, [300])
    first, second, third = make_steps(config, 1, 3)
    once = graph.step(sequences, first)
    before = state_of(graph.cache)
    assert_same_results(graph.replay(first), once, "again")
    assert_same_results(graph.replay(first), once, "and again")
    mine = graph.replay(second)  # another token in its place
    after = state_of(graph.cache)
    for name in ("candidates", "fetched_rows"):  # counted each time they are
        assert after.pop(name) > before.pop(name)
    assert before == after
    assert_same_results(mine, eager(twin, alike, second), "in its place")
    assert_same_results(graph.step(sequences, third), eager(twin, alike, third), "after it")
    q = randn_q(np.random.default_rng(1), 1, config)[0]
    assert_same_sequence(graph.cache, sequences[0], twin, alike[0], q)


@pytest.mark.parametrize("recorded", [1, 2])
def test_recording_changes_nothing(recorded):
    config = make_config(layers=2)
    cache, twin = pk.Cache(config), pk.Cache(config)
    sequences, alike = filled_with(cache, [300, 60]), filled_with(twin, [300, 60])
    before = state_of(cache)
    graphs = [Graph(cache, sequences) for _ in range(recorded)]
    assert state_of(cache) == before == state_of(twin)
    q = randn_q(np.random.default_rng(1), 1, config)[0]
    for s, t in zip(sequences, alike, strict=True):
        assert_same_sequence(cache, s, twin, t, q)
    for i, step in enumerate(make_steps(config, 2, 20)):
        assert_same_results(graphs[i % recorded].step(sequences, step), eager(twin, alike, step))


@pytest.mark.parametrize("first", ["graph", "eager"])
def test_graphs_and_calls_may_take_turns(first):
    config = make_config(layers=2)
    graph, sequences, twin, alike = twins(config, [150, 400])
    for i, step in enumerate(make_steps(config, 2, 120)):
        if (i // 3) % 2 == (first == "eager"):
            mine = graph.step(sequences, step)
        else:
            mine = eager(graph.cache, sequences, step)
        assert_same_results(mine, eager(twin, alike, step), f"step {i}")
    assert_same_state(graph, sequences, twin, alike)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": 0.2}, {"bias": True}], ids=str)
def test_options_are_recorded(options):
    config = make_config()
    if options.pop("bias", False):
        options = {"sink_bias": torch.tensor([1.0, -2.0, 0.5, 3.0])}
    graph, sequences, twin, alike = twins(config, [300], **options)
    for step in make_steps(config, 1, 60):
        mine = graph.step(sequences, step)
        assert_same_results(mine, eager(twin, alike, step, **options))


def test_a_sequence_that_begins_empty():
    config = make_config(layers=2)
    graph, sequences, twin, alike = twins(config, [0])
    for i, step in enumerate(make_steps(config, 1, 200)):
        assert_same_results(graph.step(sequences, step), eager(twin, alike, step), f"step {i}")
    assert regions_of(graph.cache, sequences[0]) == regions_of(twin, alike[0])


FORBIDDEN = {
    "prefill": lambda c, s, q, k: c.prefill(0, [s], k, k),
    "attend": lambda c, s, q, k: c.attend(0, [s], q),
    "explain": lambda c, s, q, k: c.explain(0, s, q[0]),
    "read": lambda c, s, q, k: c.read(0, s, 0, 1, out=(q[:, :2], q[:, 2:])),
    "flush": lambda c, s, q, k: c.flush([s]),
    "truncate": lambda c, s, q, k: c.truncate([s], drop=1),
    "fork": lambda c, s, q, k: c.fork(s),
    "reorder": lambda c, s, q, k: c.reorder([s], [0]),
    "remove": lambda c, s, q, k: c.remove(s),
    "advance": lambda c, s, q, k: c.advance([s]),
}


@pytest.mark.parametrize("call", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_other_calls_cannot_be_recorded(call):
    config = make_config()
    cache, twin = pk.Cache(config), pk.Cache(config)
    [s], [t] = filled_with(cache, [300]), filled_with(twin, [300])
    warm_up(config)
    q, k, v = randn_step(np.random.default_rng(0), 1, config)
    before = state_of(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="only decode can be recorded"):
            call(cache, s, q, k)
        out = cache.decode(0, [s], q, k, v)  # the recording has taken no harm
    assert state_of(cache) == before
    cache.advance([s])
    graph.replay()
    assert_same_bits(out, twin.decode(0, [t], q, k, v))


def test_advance_is_for_batches_that_are_there():
    config = make_config(layers=2)
    graph, sequences, twin, alike = twins(config, [100, 200])
    before = state_of(graph.cache)
    for wrong in ([99], [sequences[0], sequences[0]]):
        with pytest.raises(ValueError, match=r"\[advance\] sequences"):
            graph.cache.advance(wrong)
    assert state_of(graph.cache) == before
    no_window = pk.Cache(make_config(local=0))
    with pytest.raises(ValueError, match=r"\[advance\] .*local"):
        no_window.advance([no_window.add()])
    for step in make_steps(config, 2, 3):
        assert_same_results(graph.step(sequences, step), eager(twin, alike, step))


# --- Streams -----------------------------------------------------------------------------------


def test_replays_on_a_side_stream():
    config = make_config(layers=2)
    graph, sequences, twin, alike = twins(config, [150, 400])
    side = torch.cuda.Stream()
    for i, step in enumerate(make_steps(config, 2, 60)):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mine = graph.step(sequences, step)
        torch.cuda.current_stream().wait_stream(side)
        assert_same_results(mine, eager(twin, alike, step), f"step {i}")


@pytest.mark.parametrize("explicit", [False, True])
def test_calls_on_changing_streams_keep_their_order(explicit):
    config = make_config()
    cache, twin = pk.Cache(config), pk.Cache(config)
    [s], [t] = filled_with(cache, [300]), filled_with(twin, [300])
    steps = [[x[0] for x in step] for step in make_steps(config, 1, 60)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for i, step in enumerate(steps):
        # Nothing but the engine orders the streams, and each of them is late at times.
        stream = streams[i % 3]
        out = torch.empty_like(step[0])
        with torch.cuda.stream(stream):
            if i % 3 == 1:
                torch.cuda._sleep(2_000_000)
            if not explicit:
                cache.decode(0, [s], *step, out=out)
        if explicit:
            cache.decode(0, [s], *step, out=out, stream=stream.cuda_stream)
        outs.append(out)
    torch.cuda.synchronize()
    for i, (out, step) in enumerate(zip(outs, steps, strict=True)):
        assert_same_bits(out, twin.decode(0, [t], *step), f"step {i}")
