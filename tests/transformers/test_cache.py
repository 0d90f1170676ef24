"""The cache itself: what it stores, and the verbs of a batch that the library calls."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pytest
import torch
from tiny import CACHE, DENSE, SEARCHING, SETTINGS, check_use, model, prompt, ragged
from transformers import DynamicCache


def run(made: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    made.set_attn_implementation("pariskv" if isinstance(cache, pkt.PariskvCache) else "eager")
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        out = made(ids, attention_mask=mask, position_ids=places, **{CACHE: cache})
    made.set_attn_implementation("eager")
    return out.logits[:, -1]


class Pair:
    """Our cache beside the library's, under the same calls."""

    def __init__(self, settings: dict[str, Any], family: str = "llama") -> None:
        self.model = model(family)
        self.ours = pkt.PariskvCache(self.model.config, **settings)
        self.theirs = DynamicCache(config=self.model.config)
        self.mask = torch.zeros((0, 0), dtype=torch.long)

    def run(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Feeds tokens; their last logits agree."""
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = mask if len(self.mask) == 0 else torch.cat([self.mask, mask], dim=1)
        ours, theirs = (run(self.model, c, ids, self.mask) for c in (self.ours, self.theirs))
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=5e-3)

    def decode(self, steps: int) -> None:
        for token in prompt(len(self.mask), steps, seed=9)["input_ids"].split(1, dim=1):
            self.run(token)

    def each(self, verb: str, argument: Any) -> None:
        for cache in (self.ours, self.theirs):
            getattr(cache, verb)(argument)

    def lengths(self) -> list[int]:
        engine = self.ours.engine
        assert engine is not None
        lengths = [engine.length(sequence) for sequence in self.ours.sequences]
        assert sorted(engine.sequences()) == sorted(self.ours.sequences)
        assert lengths == self.mask.sum(dim=1).tolist()
        assert self.ours.get_seq_length() == self.theirs.get_seq_length() == self.mask.shape[1]
        return lengths


@pytest.fixture
def pair(settings: dict[str, Any]) -> Pair:
    made = Pair(settings)
    made.run(*ragged().values())
    return made


def test_reordered_rows(pair):
    pair.decode(7)
    order = torch.tensor([1, 1, 0])
    pair.each("reorder_cache", order)
    pair.mask = pair.mask[order]
    assert pair.lengths() == [44, 44, 67]
    pair.decode(9)


def test_repeated_rows(pair):
    pair.each("batch_repeat_interleave", 2)
    pair.mask = pair.mask.repeat_interleave(2, dim=0)
    assert pair.lengths() == [60, 60, 37, 37, 48, 48]
    pair.decode(9)


@pytest.mark.parametrize("rows", [[2], [0, 2], [2, 0, 2, 1]])
def test_selected_rows(pair, rows):
    pair.each("batch_select_indices", torch.tensor(rows))
    pair.mask = pair.mask[rows]
    pair.lengths()
    pair.decode(9)


@pytest.mark.parametrize("dropped", [1, 4, 12, 45])  # inside a buffer, over flushes, over padding
def test_dropped_columns(pair, dropped):
    pair.decode(11)
    pair.each("crop", -dropped)
    pair.mask = pair.mask[:, :-dropped]
    pair.lengths()
    pair.decode(11)


def test_a_crop_of_nothing(pair):
    before = pair.lengths()
    pair.ours.crop(-0)
    # Before 5.23 that is a length; from then on, nothing goes.
    assert [pair.ours.engine.length(s) for s in pair.ours.sequences] in (before, [0, 0, 0])


def test_a_turn_with_padding_in_the_middle_is_dropped_exactly(pair):
    turn = ragged((9, 20, 3), seed=8)
    pair.run(*turn.values())
    assert pair.lengths() == [69, 57, 51]
    pair.each("crop", -14)  # into the padding of the turn
    pair.mask = pair.mask[:, :-14]
    assert pair.lengths() == [60, 43, 48]
    pair.decode(5)


def test_a_row_that_is_all_padding_at_first(settings):
    pair = Pair(settings)
    inputs = ragged((60, 5, 40))
    for ids, mask in zip(*(tensor.split(20, dim=1) for tensor in inputs.values()), strict=True):
        pair.run(ids, mask)
        pair.lengths()
    pair.decode(9)


def test_reset_empties_it_for_another_batch(pair):
    engine = pair.ours.engine
    pair.ours.reset()
    assert engine.sequences() == []
    assert pair.ours.get_seq_length() == 0
    pair.theirs, pair.mask = DynamicCache(config=pair.model.config), torch.zeros((0, 0)).long()
    pair.run(*prompt(2).values())
    assert pair.ours.engine is engine
    pair.decode(9)


def test_a_copy_and_its_origin_go_their_own_ways(pair):
    twin = Pair.__new__(Pair)
    twin.__dict__.update(pair.__dict__)
    twin.ours, twin.theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    engine = pair.ours.engine
    assert engine.stats().row_bytes == twin.ours.engine.stats().row_bytes
    pair.run(prompt(3, 9, seed=8)["input_ids"])
    twin.run(prompt(3, 4, seed=7)["input_ids"])
    pair.decode(9)
    twin.decode(9)
    assert len(engine.sequences()) == 6
    del twin
    gc.collect()
    assert sorted(engine.sequences()) == sorted(pair.ours.sequences)


def test_a_cache_gives_its_memory_back_when_it_goes():
    made, kept = model("llama"), []
    cache = pkt.PariskvCache(made.config, **DENSE)
    run(made, cache, *prompt(2).values())
    kept.append(copy.deepcopy(cache))
    engine = cache.engine
    assert len(engine.sequences()) == 4
    gc.disable()  # by counting references alone: there are no cycles
    try:
        del cache
        assert engine.sequences() == kept[0].sequences
        kept.clear()
        assert engine.sequences() == []
        assert engine.stats().row_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_equal_prompts_of_a_batch_are_stored_once(family):
    made = model(family)
    inputs = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in prompt(2, 300).items()}
    cache = pkt.PariskvCache(made.config, **DENSE)
    pair = Pair(DENSE, family)
    run(made, cache, *inputs.values())
    pair.run(*inputs.values())
    assert cache.engine.stats().sequences == 2
    assert pair.lengths() == [300] * 6
    segments = cache.engine.stats().row_bytes
    assert pair.ours.engine.stats().row_bytes == segments, "rows are shared until they differ"
    pair.decode(7)
    check_use(pair.ours)


def test_prompts_that_differ_in_their_last_token_are_not_equal(pair):
    ids = prompt(1, 60)["input_ids"].repeat(2, 1)
    ids[1, -1] += 1
    other = Pair(SEARCHING)
    other.run(ids)
    assert other.ours.engine.stats().sequences == 2
    other.decode(9)


def test_no_layer_of_the_library_is_ours_and_none_of_ours_is_registered():
    made = model("gemma2")
    cache = pkt.PariskvCache(made.config)
    assert [type(layer).__name__ for layer in cache.layers] == [
        "DynamicSlidingWindowLayer",
        "PariskvLayer",
        "PariskvLayer",
    ]
    assert cache.engine_layers == {1: 0, 2: 1}
    assert cache.engine is None
    assert cache.sequences == []
    assert not cache.is_compileable
    assert list(cache.is_sliding) == [True, False, False]
    assert "PariskvLayer" not in repr(DynamicCache(config=made.config))


def test_settings_are_the_engines():
    made = model("llama")
    cache = pkt.PariskvCache(made.config, top_k=7, local=64, threads=1)
    run(made, cache, *prompt().values())
    config = cache.engine.config
    assert (config.layers, config.query_heads, config.kv_heads, config.head_dim) == (2, 4, 2, 64)
    assert (config.dtype, config.local, config.threads) == ("float32", 64, 1)
    own = pk.ParisKV(top_k=7, tail="sample")
    assert config.policy == own.replace(schedule=own.schedule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_16_bits(dtype):
    made = copy.deepcopy(model("llama")).to(dtype)
    ours = pkt.PariskvCache(made.config, **SETTINGS["dense"])
    theirs = DynamicCache(config=made.config)
    ids, mask = prompt().values()
    for _ in range(3):
        mine, expected = (run(made, cache, ids, mask).float() for cache in (ours, theirs))
        cosine = torch.nn.functional.cosine_similarity(mine, expected)
        assert float(cosine) > 0.999
        ids, mask = ids[:, :1], torch.cat([mask, mask[:, :1]], dim=1)
    assert str(ours.engine.config.dtype) == str(dtype).removeprefix("torch.")


def test_steps_report_their_error_where_they_are_asked_to():
    settings = {**SEARCHING, "policy": pk.ParisKV(top_k=4, block=0, tail="sample", tail_rows=32)}
    tokens = prompt(1, 400, seed=3)["input_ids"]
    made, outs, errors = model("llama"), [], []
    for reports in (False, True):
        cache = pkt.PariskvCache(made.config, **settings)
        if reports:
            cache.report_errors()
        run(made, cache, tokens[:, :-1], torch.ones_like(tokens[:, :-1]))
        fork = copy.deepcopy(cache)
        for each in (cache, fork):
            outs.append(run(made, each, tokens[:, -1:], torch.ones_like(tokens)))
        assert cache.engine is not None
        stats = cache.engine.stats()
        errors.append((stats.mean_error, stats.worst_error))
    assert all(torch.equal(outs[0], out) for out in outs), "the step itself is the same"
    assert math.isnan(errors[0][0]) and math.isnan(errors[0][1])
    assert 0 < errors[1][0] <= errors[1][1]


@pytest.mark.parametrize(
    "policy",
    [pk.ParisKV(tail="none"), pk.ParisKV(scorer="votes"), pk.HardKV(most=64), pk.PRKV()],
    ids=["no tail", "votes", "HardKV", "PRKV"],
)
def test_policies_without_an_estimate_report_no_error(policy):
    cache = pkt.PariskvCache(model("llama").config, policy=policy)
    with pytest.raises(ValueError, match="policy: expected ParisKV with a tail"):
        cache.report_errors()
