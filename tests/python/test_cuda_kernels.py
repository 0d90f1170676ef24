"""Every kernel once for every dtype, and little else: what a slow checker is to go through."""

import numpy as np
import pytest
import torch
from support import GROUP_RULES, SCORERS, assert_same_bits, filled, make_config, rows_of
from test_cuda_equal import Both
from test_cuda_graph import Graph, eager, filled_with, make_steps

pytestmark = [pytest.mark.cuda, pytest.mark.sanitize]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [
        ("float32", 80, 3),
        ("float16", 256, 1),
        ("bfloat16", 128, 4),
        ("bfloat16", 64, 16),
        ("float16", 192, 4),
    ],
)
@pytest.mark.parametrize(("scorer", "group_rule"), list(zip(SCORERS, GROUP_RULES, strict=True)))
def test_a_short_life(dtype, head_dim, group, scorer, group_rule):
    both = Both(
        dtype=dtype,
        head_dim=head_dim,
        query_heads=2 * group,
        scorer=scorer,
        group_rule=group_rule,
        update=4,
    )
    for tokens in (0, 37, 301):
        both.random(tokens)
    for _ in range(5):  # past a flush
        both.decode()
    fork = both.each(lambda cache: cache.fork(both.sequences[2]))[0]
    both.each(lambda cache: cache.truncate([fork], drop=90))
    for s in (*both.sequences, fork):
        both.check(s)
    q = both.query(7)
    lengths = [1, 2, 4]
    both.each(
        lambda cache: cache.attend(
            0,
            both.sequences,
            torch.tensor(q, dtype=getattr(torch, dtype), device=cache.config.device),
            lengths,
            return_lse=True,
            softcap=3.0,
        )
    )
    for mine, theirs in zip(*both.each(lambda cache: rows_of(cache, fork)), strict=True):
        assert_same_bits(mine, theirs)
    both.each(lambda cache: cache.remove(both.sequences[0]))
    both.each(lambda cache: cache.close())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_short_graph(dtype):
    config = make_config(dtype=dtype, layers=2, update=3)
    f, twin = filled(config, 150), filled(config, 150)
    others = [filled_with(x.cache, [70]) for x in (f, twin)]
    sequences, alike = [f.s, *others[0]], [twin.s, *others[1]]
    graph = Graph(f.cache, sequences)
    for step in make_steps(config, 2, 5):
        mine = graph.step(sequences, step)
        for a, b in zip(mine, eager(twin.cache, alike, step), strict=True):
            assert_same_bits(a, b)


def test_a_tensor_that_is_not_aligned():
    # Rows that start at any element: what a view of a larger tensor may be.
    f, twin = filled(make_config(), 100), filled(make_config(), 100)
    rng = np.random.default_rng(0)
    for offset in range(4):
        wide = torch.tensor(rng.standard_normal((3, 1, 8, 70)), dtype=torch.float32)
        q, k, v = wide[:, :, :, offset : offset + 64]
        k, v = k[:, ::4], v[:, 1::4]
        q = q[:, ::2]
        out = torch.zeros(1, 4, 70)[..., offset : offset + 64]
        f.cache.decode(0, [f.s], q, k, v, out=out)
        clean = (x.contiguous() for x in (q, k, v))
        assert_same_bits(out, twin.cache.decode(0, [twin.s], *clean))
