"""How many blocks a budget pays for, and how many requests come in."""

from __future__ import annotations

import pariskv_core as pk
import pytest
from pariskv_core.serving import Costs, Room
from pariskv_core.serving.sizes import Budgets, Load, at_once, engine_config, need, plan

pytestmark = pytest.mark.cpu("blocks of a cache on the CPU")

BLOCK = 64
SHAPE = {"layers": 1, "query_heads": 2, "kv_heads": 1, "head_dim": 64}
SETTINGS = {"policy": pk.ParisKV(top_k=16, tail_rows=64), "threads": 1}


def test_a_budget_that_a_request_does_not_fit_is_refused() -> None:
    config = engine_config(BLOCK, **SHAPE, dtype="float32", device="cpu", **SETTINGS)
    one = need(config, BLOCK)
    with pytest.raises(ValueError, match=r"a request of 100,000 tokens takes .* each rank$"):
        plan(one, Budgets(1 << 20), Load(100_000, 8, 512), block=BLOCK, gpu=False)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_budget_that_one_request_fits_serves_one(place: str) -> None:
    """However many are allowed: half of a budget is not kept from its blocks."""
    longest, gpu = 100_000, place == "cuda"
    config = engine_config(BLOCK, **SHAPE, dtype="float32", device=place, **SETTINGS)
    one = need(config, BLOCK, longest)
    load = Load(longest, 1024, 512)
    whole = -(-longest // BLOCK) * BLOCK
    taken = whole * one.device + one.costs.of(longest)
    taken += (one.costs.opening + load.chunk) * one.costs.token
    host = 21 * whole * one.host // 20 + 1000
    budget = 20 * (taken + (512 << 20 if gpu else 0)) // 19 + 1000
    made = plan(one, Budgets(budget, host), load, block=BLOCK, gpu=gpu)
    assert (made.blocks - 1) * BLOCK >= longest
    assert made.make_room().admit("one", longest, longest)
    with pytest.raises(ValueError, match="a request of 100,000 tokens takes"):
        plan(one, Budgets(budget - taken // 10, host), load, block=BLOCK, gpu=gpu)


def test_as_many_long_requests_as_blocks_pay_for_have_room() -> None:
    longest, few = 100_000, 8
    config = engine_config(BLOCK, **SHAPE, dtype="float16", device="cuda", policy=pk.ParisKV())
    one = need(config, BLOCK, longest)
    load = Load(longest, few, 512)
    taken = few * (-(-longest // BLOCK) * BLOCK * one.device + one.costs.of(longest))
    taken += (one.costs.opening + load.chunk) * one.costs.token
    host = 2 * few * longest * one.host
    for share, expected in ((1, few), (2, few), (0.9, 6)):
        budgets = Budgets(int(20 / 19 * (share * taken + (512 << 20))) + 1000, host)
        made = plan(one, budgets, load, block=BLOCK, gpu=True)
        assert expected <= at_once(made, load, block=BLOCK) <= few, share


@pytest.mark.parametrize("placement", ["auto", "host"])
def test_on_a_gpu_both_budgets_count(placement: str) -> None:
    fields = {"policy": pk.ParisKV(), "placement": placement}
    config = engine_config(BLOCK, **SHAPE, dtype="float16", device="cuda", **fields)
    one = need(config, BLOCK)
    assert one.host > 3 * one.device, "rows are in host memory, summaries on the GPU"

    def blocks(device: int, host: int) -> int:
        budgets = Budgets(device, host)
        made = plan(one, budgets, Load(16_384, 8, 2048), block=BLOCK, gpu=True)
        tokens = (made.blocks - 1) * BLOCK
        assert tokens * one.device + made.room <= device
        if placement == "host":
            assert tokens * one.host <= host
        else:  # what host memory has no room for stays on the GPU
            assert tokens * (one.device + one.host) + made.beside <= device + host
            assert tokens * one.host > host or host > device
        return made.blocks

    there = need(config.replace(placement="device"), BLOCK)
    assert there.host == 0
    assert there.device >= one.device + one.host - 1
    small, large = 2 << 30, 8 << 30
    assert blocks(large, 1 << 26) < blocks(large, 1 << 27)
    assert blocks(small, 1 << 40) < blocks(large, 1 << 40)


POLICIES = {
    "ParisKV": {"policy": pk.ParisKV()},
    "8 bits": {"policy": pk.ParisKV(), "kv_dtype": "int8"},
    "HardKV": {"policy": pk.HardKV()},
    "PRKV": {"policy": pk.PRKV()},
    "PRKV, kept rows alone": {"policy": pk.PRKV(static_share=1.0)},
}


@pytest.mark.parametrize("place", ["cpu", "auto", "host", "device"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("longest", [1000, 5120, 8200, 100_000])
def test_every_policy_has_a_plan(name: str, place: str, longest: int) -> None:
    shape = {"layers": 4, "query_heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "float16"}
    device = {"device": "cpu"} if place == "cpu" else {"device": "cuda", "placement": place}
    config = engine_config(128, **shape, **device, dense_below="batch", **POLICIES[name])
    one = need(config, 128, longest)
    budgets, load = Budgets(8 << 30, 64 << 30), Load(longest, 64, 8192)
    made = plan(one, budgets, load, block=128, gpu=place != "cpu")
    requests = at_once(made, load, block=128)
    # What the engine may then hold has room: all of them at their longest.
    found = config.footprint(
        longest=longest, sequences=requests, tokens=requests * _whole(longest), multiple=128
    )
    assert requests > 0
    here = found.device - found["opening rows"] - (found["resident rows"] if found.either else 0)
    if place != "cpu":
        assert found.host <= budgets.host
        assert here + found["resident rows"] * (found.either > 0) <= budgets.device
        assert here + found.either <= budgets.device + budgets.host
    else:
        changes = found["changes"] * (config.layers - 1) // config.layers
        assert here - changes <= budgets.device


def _whole(tokens: int) -> int:
    return -(-tokens // 128) * 128


def test_requests_that_are_never_searched_cost_their_rows_alone() -> None:
    shape = {"layers": 32, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"}
    config = engine_config(128, **shape, device="cuda", dense_below="batch", policy=pk.ParisKV())
    one = need(config, 128, 5120)
    plain = config.footprint(longest=1, sequences=0, tokens=128)["rows"] // 128
    assert one.host == 0
    assert plain <= one.device < 1.25 * plain  # summaries of a zone that may open
    assert one.costs.searched < 16 << 20


def test_rows_in_8_bits_are_counted_as_they_come_until_their_zone_opens() -> None:
    shape = {"layers": 32, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"}
    fields = {"dense_below": "batch", "kv_dtype": "int8", "policy": pk.ParisKV()}
    config = engine_config(128, **shape, device="cuda", **fields)
    one = need(config, 128, 131_072)
    plain = config.footprint(longest=1, sequences=0, tokens=128)["rows"] // 128
    window = config.local + config.update
    assert one.costs.opening >= config.searched_from + window
    assert one.costs.of(5760) >= 5760 * plain


def admitted(longest: int, tokens: int, requests: int) -> int:
    """How many requests of so many tokens one H100 beside 96 GB lets in at once."""
    shape = {"layers": 32, "query_heads": 32, "kv_heads": 8, "head_dim": 128}
    fields = {"policy": pk.ParisKV(), "placement": "auto"}
    config = engine_config(128, **shape, dtype="float16", device="cuda", **fields)
    one = need(config, 128, longest)
    made = plan(
        one, Budgets(50 << 30, 96 << 30), Load(longest, requests, 8192), block=128, gpu=True
    )
    room, blocks = made.make_room(), made.blocks - 1
    count = 0
    while count < requests and blocks >= -(-tokens // 128):
        if not room.admit(f"r{count}", tokens, tokens):
            break
        blocks -= -(-tokens // 128)
        count += 1
    return count


def test_rows_of_short_requests_are_counted_once() -> None:
    # 4,096 tokens take 537 MB: 50 GB have room for more than 64, and for 40 beside summaries.
    assert admitted(4128, 4096, 64) == 64
    assert 40 <= admitted(131_072, 4096, 64) < 64
    assert admitted(131_072, 130_000, 64) == 6  # 20 GB each, of 135


def test_what_no_block_pays_for_has_a_sum_of_its_own() -> None:
    room = Room(100, Costs(token=1, opening=50, searched=30, beside=20), beside=45)
    assert room.admit("long", 80, 80)
    assert room.admit("another", 80, 80)
    assert not room.admit("third", 80, 80)  # 60 of 45 bytes
    room.settle()
    room.enter("long", 80, 80)
    assert room.admit("short", 10, 40)  # of blocks, all of it
    assert not room.admit("too much", 10, 45)
