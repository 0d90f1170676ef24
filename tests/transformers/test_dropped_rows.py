"""HardKV(placement="dropped") under generate(): memory stops growing with the answer."""

from __future__ import annotations

import copy
from typing import Any

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pytest
import torch
from tiny import CACHE, generated, model, prompt

SETTINGS: dict[str, Any] = {
    "policy": pk.HardKV(most=16, p=1.0, placement="dropped"),
    "sink": 2,
    "local": 8,
    "update": 10,
    "segment_tokens": 64,
    "threads": 1,
}
HOST = {**SETTINGS, "policy": pk.HardKV(most=16, p=1.0)}


def forward(made: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = made(input_ids=ids, **{CACHE: cache}).logits
    return logits


@pytest.fixture
def llama() -> Any:
    made = copy.deepcopy(model("llama"))
    made.set_attn_implementation("pariskv")
    return made


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_an_attached_model_generates_the_same_tokens_in_constant_memory(way):
    llama = copy.deepcopy(model("llama"))
    inputs, options = prompt(tokens=70), {"max_new_tokens": 150, "do_sample": False, **way}
    found, sizes = [], []
    for settings in (HOST, SETTINGS):
        pkt.attach(llama, **settings)
        found.append(llama.generate(**inputs, **options))
        pkt.detach(llama)
        caches = [pkt.PariskvCache(llama.config, **settings) for _ in range(2)]
        for cache, tokens in zip(caches, (150, 400), strict=True):
            generated(llama, inputs, cache, max_new_tokens=tokens)
            sizes.append(cache.engine.stats().row_bytes)
    assert torch.equal(*found)
    assert sizes[1] > sizes[0]
    assert sizes[3] <= sizes[2]


def test_a_second_turn_is_decoded_token_by_token(llama):
    ids = prompt(tokens=250)["input_ids"]
    turn, alone = (pkt.PariskvCache(llama.config, **SETTINGS) for _ in range(2))
    for cache in (turn, alone):
        forward(llama, cache, ids[:, :200])
        for token in range(200, 220):
            forward(llama, cache, ids[:, token : token + 1])
        assert cache.engine.stats().dropped_rows > 0
    together = forward(llama, turn, ids[:, 220:])
    one_by_one = [forward(llama, alone, ids[:, token : token + 1]) for token in range(220, 250)]
    torch.testing.assert_close(together, torch.cat(one_by_one, dim=1), rtol=1e-4, atol=1e-4)


def test_ragged_turns_are_decoded_token_by_token(llama):
    rows = [prompt(tokens=180)["input_ids"], prompt(tokens=180)["input_ids"].flip(1)]
    mask = torch.ones(2, 180, dtype=torch.long)
    mask[0, :30] = 0
    ids = torch.cat(rows)
    cache = pkt.PariskvCache(llama.config, **SETTINGS)
    alone = [pkt.PariskvCache(llama.config, **SETTINGS) for _ in rows]
    for begin, end in ((0, 150), *((t, t + 1) for t in range(150, 160)), (160, 180)):
        with torch.no_grad():
            logits = llama(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, begin:end],
                **{CACHE: cache},
            ).logits
        for row, mine in enumerate(alone):
            first = max(begin, 30) if row == 0 else begin
            expected = forward(llama, mine, ids[row : row + 1, first:end])
            torch.testing.assert_close(
                logits[row : row + 1, first - begin :], expected, rtol=1e-3, atol=1e-3
            )


def test_a_crop_into_dropped_rows_is_refused_and_a_short_one_works(llama):
    cache = pkt.PariskvCache(llama.config, **SETTINGS)
    generated(llama, prompt(tokens=200), cache, max_new_tokens=40)
    before = cache.get_seq_length()
    with pytest.raises(ValueError, match=r"\[truncate\] drop: expected .* were dropped after"):
        cache.crop(-150)
    assert cache.get_seq_length() == before
    cache.crop(-1)
    assert cache.get_seq_length() == before - 1


def test_drafts_are_refused(llama):
    pkt.attach(llama, **SETTINGS)
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model("qwen2")}):
        with pytest.raises(NotImplementedError, match=r"drafts .*placement=\"host\""):
            llama.generate(**prompt(), max_new_tokens=3, **drafts)
