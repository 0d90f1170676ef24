"""Keys told from the means of their blocks: both backends, bit for bit where numbers are whole."""

import numpy as np
import pytest
from support import DTYPES, GROUP_RULES, HEAD_DIMS, assert_same_bits, tensor
from test_cuda_equal import GROUPS, HOSTILE, Both

pytestmark = pytest.mark.cuda

BLOCKS = (64, 128, 256)
LENGTHS = (1060, 1500, 2001)


class BothWithQueries(Both):
    """Prompts bring queries: some channels are loud in keys, others in queries."""

    def prefill(self, keys, values=None, chunks=1):
        if values is None:
            values = self.rng.standard_normal((*keys.shape[:2], self.config.value_dim))
        loud = 2.0 ** self.rng.integers(-3, 4, self.config.head_dim)
        queries = self.query(len(keys)) / loud
        keys = keys * loud + 3 * loud

        def prefill(cache):
            s = cache.add()
            for part in np.array_split(np.arange(len(keys)), chunks):
                k, v, q = (tensor(x[part], cache.config) for x in (keys, values, queries))
                cache.prefill(0, [s], k, v, q=q)
            return s

        mine, theirs = self.each(prefill)
        assert mine == theirs
        self.sequences.append(mine)
        return mine


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("group", "kv_heads"), GROUPS)
def test_everything_at_every_shape(group, kv_heads, head_dim, dtype, group_rule):
    block = BLOCKS[(group + head_dim) % 3]
    both = BothWithQueries(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        group_rule=group_rule,
        block=block,
        segment_tokens=2 * block,
    )
    for length in LENGTHS:
        both.random(length)
    for s in both.sequences:
        both.check(s)
    for _ in range(3):
        both.decode()
    for s in both.sequences:
        both.check(s)


@pytest.mark.parametrize("sink", [0, 4, 70, 200])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_zone_that_begins_within_a_block(block, sink):
    both = BothWithQueries(block=block, sink=sink, segment_tokens=512)
    for length in (sink + 1060, 1700, 2900):
        both.check(both.random(length))


@pytest.mark.parametrize("chunks", [2, 5, 40])
def test_queries_come_with_the_chunks_of_a_prompt(chunks):
    both = BothWithQueries(block=64, dtype="bfloat16")
    rng = np.random.default_rng(3)
    both.check(both.prefill(rng.standard_normal((1700, 2, 64)), chunks=chunks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_keys(make, dtype):
    both = Both(block=64, dtype=dtype, head_dim=128)
    both.check(both.prefill(make(np.random.default_rng(5), (1500, 2, 128))), floats=False)


def test_thousands_of_blocks():
    both = BothWithQueries(
        block=64, segment_tokens=1024, schedule=[(0, 0.03, 0.3)], top_k=40, dtype="bfloat16"
    )
    both.check(both.random(70_000))


def test_flushes_truncation_and_forks():
    both = BothWithQueries(block=64, local=16, update=20)
    s = both.random(1500)
    for dropped in (1, 40, 130, 390):
        for _ in range(30):
            both.decode()
        both.check(s)
        both.each(lambda cache, dropped=dropped: cache.truncate([s], drop=[dropped]))
        both.check(s)
    twins = both.each(lambda cache: cache.fork(s))
    both.sequences.append(twins[0])
    for _ in range(25):
        both.decode()
    for one in both.sequences:
        both.check(one)


def test_balances_are_equal_bit_for_bit():
    both = BothWithQueries(block=64, head_dim=96, dtype="float16")
    s = both.random(1700)
    a, b = both.each(lambda cache: cache.summaries(0, s))
    assert len(np.unique(a.balance)) > 10
    assert_same_bits(a.balance, b.balance, "balance")
    assert_same_bits(a.means, b.means, "means")
