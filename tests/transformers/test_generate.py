"""Every way to generate gives the tokens of eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pytest
import torch
from tiny import CACHE, Counting, check_use, distinct, generated, model, prompt, ragged
from transformers import TextStreamer

WAYS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "greedy": (prompt(), {}),
    "one_token": (prompt(tokens=1), {"max_new_tokens": 60}),
    "sampling": (prompt(2), {"do_sample": True, "temperature": 0.8, "top_k": 20}),
    "batch": (prompt(3), {}),
    "padded_batch": (ragged(), {}),
    "beams": (prompt(), {"num_beams": 3}),
    "beams_of_a_padded_batch": (ragged(), {"num_beams": 2}),
    "several_beams_returned": (prompt(2), {"num_beams": 4, "num_return_sequences": 3}),
    "sampled_beams": (prompt(), {"num_beams": 3, "do_sample": True}),
    "several_returned": (prompt(2), {"do_sample": True, "num_return_sequences": 3}),
    "chunks": (prompt(), {"prefill_chunk_size": 16}),
    "chunks_of_a_padded_batch": (ragged(), {"prefill_chunk_size": 20}),
    "a_last_chunk_of_one": (prompt(tokens=61), {"prefill_chunk_size": 20}),
    "prompt_lookup": (prompt(), {"prompt_lookup_num_tokens": 4}),
    "repetition_penalty": (prompt(2), {"repetition_penalty": 1.2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_eager_attention(way, settings):
    inputs, how = WAYS[way]
    llama = model("llama")
    expected = generated(llama, inputs, **how)
    cache = pkt.PariskvCache(llama.config, **settings)
    actual = generated(llama, inputs, cache, **how)
    assert torch.equal(actual, expected)
    assert distinct(expected, inputs["input_ids"].shape[1]) >= 20
    check_use(cache, inputs)
    assert isinstance(cache.engine, Counting)
    assert (cache.engine.calls["attend"] > 0) == (way.startswith(("chunks", "a_last", "prompt_lo")))


def test_the_defaults_search_and_estimate_the_rest():
    # So short a zone has all of its rows in the tail: nothing is left out, and tokens are eager's.
    llama, inputs = model("llama"), prompt(tokens=1100)
    expected = generated(llama, inputs)
    cache = pkt.PariskvCache(
        llama.config, policy=pk.ParisKV(top_k=20), local=16, update=5, dense_below=0, threads=1
    )
    assert torch.equal(generated(llama, inputs, cache), expected)
    check_use(cache, inputs)
    assert distinct(expected, 1100) >= 20


@pytest.mark.parametrize(
    ("policy", "all_rows"),
    [
        (pk.HardKV(most=16, p=1.0), pk.HardKV(most=500, p=1.0)),
        (pk.PRKV(budget=32, static_share=0.5, page=8), pk.PRKV(budget=500, page=8)),
    ],
    ids=["HardKV", "PRKV"],
)
def test_rows_are_kept_by_the_queries_of_the_prompt_and_of_every_flush(policy, all_rows):
    llama, inputs = model("llama"), prompt(tokens=100)
    few = {"policy": policy, "local": 8, "update": 10, "threads": 1}
    cache = pkt.PariskvCache(llama.config, **few)
    llama.set_attn_implementation("pariskv")
    with torch.no_grad():
        llama(**inputs, **{CACHE: cache})
    stats = cache.engine.stats()
    assert (stats.keeps, stats.kept_rows) == (2, 2 * 2 * 16)  # layers; kv heads
    tokens = generated(llama, inputs, pkt.PariskvCache(llama.config, **few))
    assert tokens.shape == generated(llama, inputs).shape
    # With room for all rows tokens are eager's.
    roomy = {**few, "policy": all_rows}
    tokens = generated(llama, inputs, pkt.PariskvCache(llama.config, **roomy))
    assert torch.equal(tokens, generated(llama, inputs))


def test_a_draft_of_an_assistant_is_verified(settings):
    llama, assistant, inputs = model("llama"), model("qwen2"), prompt()
    expected = generated(llama, inputs, assistant_model=assistant)
    cache = pkt.PariskvCache(llama.config, **settings)
    assert torch.equal(generated(llama, inputs, cache, assistant_model=assistant), expected)
    check_use(cache, inputs)
    assert distinct(expected, 60) >= 20


def test_an_assistant_may_be_ours_as_well(settings):
    llama, inputs = model("llama"), prompt()
    expected = generated(llama, inputs)
    assistant = pkt.attach(copy.deepcopy(llama), **settings)  # which is right about every token
    cache = pkt.PariskvCache(llama.config, **settings)
    assert torch.equal(generated(llama, inputs, cache, assistant_model=assistant), expected)
    assert isinstance(cache.engine, Counting)
    assert cache.engine.calls["decode"] < 20, "drafts were not accepted"


@pytest.mark.parametrize("inputs", [prompt(), prompt(3), ragged()], ids=["one", "three", "padded"])
def test_a_second_turn_goes_on_where_the_first_ended(inputs, settings):
    llama = model("llama")
    cache = pkt.PariskvCache(llama.config, **settings)
    first = generated(llama, inputs, cache)
    rows = first.shape[0]
    turn = prompt(rows, 23, seed=8)["input_ids"]
    ids = torch.cat([first, turn], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, ids.shape[1] - 60).long()], dim=1)
    if rows > 1:  # the turns are ragged, too: padding comes to lie in the middle
        mask[1, first.shape[1] : first.shape[1] + 9] = 0
    second = {"input_ids": ids, "attention_mask": mask}
    calls = dict(cache.engine.calls)
    actual = generated(llama, second, cache)
    assert torch.equal(actual, generated(llama, second))
    assert cache.engine.calls["prefill"] == calls["prefill"], "the first turn was stored again"
    assert cache.engine.calls["attend"] > calls["attend"]
    lengths = [cache.engine.length(sequence) for sequence in cache.sequences]
    assert lengths == [actual.shape[1] - 1 - int((row == 0).sum()) for row in mask]


def test_padding_behind_a_finished_row_is_dropped_when_it_is_masked(settings):
    llama, inputs = model("llama"), prompt(2)
    free = generated(llama, inputs)
    # One row ends early, the other goes on.
    eos = next(token for token in free[0, 66:].tolist() if token not in free[1, 60:])
    cache = pkt.PariskvCache(llama.config, **settings)
    first = generated(llama, inputs, cache, eos_token_id=eos)
    assert torch.equal(first, generated(llama, inputs, eos_token_id=eos))
    ids = torch.cat([first, prompt(2, 11, seed=8)["input_ids"]], dim=1)
    mask = torch.ones_like(ids)
    end = 60 + free[0, 60:].tolist().index(eos) + 1
    mask[0, end : first.shape[1]] = 0
    second = {"input_ids": ids, "attention_mask": mask}
    actual = generated(llama, second, cache)
    assert torch.equal(actual, generated(llama, second))
    assert cache.engine.length(cache.sequences[0]) == int(mask[0].sum()) + 29


def test_tokens_are_streamed(settings):
    class Streamer(TextStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    llama, inputs, streamer = model("llama"), prompt(), Streamer()
    cache = pkt.PariskvCache(llama.config, **settings)
    tokens = generated(llama, inputs, cache, streamer=streamer)
    assert streamer.tokens == [*tokens[0].tolist(), "end"]
    assert torch.equal(tokens, generated(llama, inputs))


def test_a_copied_cache_serves_a_prefix_again(settings):
    llama, inputs = model("llama"), prompt()
    prefix = pkt.PariskvCache(llama.config, **settings)
    llama.set_attn_implementation("pariskv")
    with torch.no_grad():
        llama(**inputs, **{CACHE: prefix})
    stored = prefix.engine.stats().row_bytes
    for seed in (8, 9):
        ids = torch.cat([inputs["input_ids"], prompt(1, 7, seed)["input_ids"]], dim=1)
        question = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        cache = copy.deepcopy(prefix)
        assert torch.equal(generated(llama, question, cache), generated(llama, question))
        assert cache.engine is prefix.engine
        assert prefix.get_seq_length() == prefix.engine.length(prefix.sequences[0]) == 60
        del cache
    assert prefix.engine.sequences() == prefix.sequences
    assert prefix.engine.calls["prefill"] == 2  # of two layers, once
    assert prefix.engine.stats().row_bytes == stored


def test_a_sparse_row_in_a_batch_is_the_row_alone():
    # Bit for bit in the engine: so far as torch's own products of a batch allow, in the model.
    llama, lengths = model("llama", sharpness=1.0), (60, 37, 48)
    inputs = ragged(lengths)
    few = {"policy": pk.ParisKV(top_k=6, block=0, tail="none"), "sink": 2, "local": 4}
    few |= {"update": 5, "dense_below": 0, "threads": 1}

    def logits(inputs, rows):
        llama.set_attn_implementation("pariskv")
        cache, found = pkt.PariskvCache(llama.config, **few), []
        tokens = prompt(3, 40, seed=9)["input_ids"][rows]
        mask = inputs["attention_mask"]
        with torch.no_grad():
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)
            llama(**inputs, position_ids=places, **{CACHE: cache})
            for t in range(40):
                mask = torch.cat([mask, torch.ones(len(mask), 1).long()], dim=1)
                places = mask.cumsum(dim=1)[:, -1:] - 1
                out = llama(
                    tokens[:, t : t + 1],
                    attention_mask=mask,
                    position_ids=places,
                    **{CACHE: cache},
                )
                found.append(out.logits[:, -1])
        check_use(cache)
        return torch.stack(found, dim=1)

    together = logits(inputs, [0, 1, 2])
    for row, length in enumerate(lengths):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        torch.testing.assert_close(logits(alone, [row])[0], together[row], atol=2e-4, rtol=2e-4)
