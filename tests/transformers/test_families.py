"""Every family of models: forced tokens give the logits of eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pariskv_core.transformers as pkt
import pytest
import torch
from tiny import (
    CACHE,
    FAMILIES,
    SETTINGS,
    VERSION,
    check_use,
    generated,
    model,
    prompt,
    ragged,
    with_attention,
)
from transformers import DynamicCache

STEPS = 24


def forced(made: Any, cache: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """(rows, steps + 1, vocabulary): a prompt, then tokens that do not depend on the logits."""
    with_attention(made, "pariskv" if isinstance(cache, pkt.PariskvCache) else "eager")
    mask = inputs["attention_mask"]
    tokens = prompt(len(mask), STEPS, seed=9)["input_ids"]
    try:
        with torch.no_grad():
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)
            found = [made(**inputs, position_ids=places, **{CACHE: cache}).logits]
            for token in tokens.split(1, dim=1):
                mask = torch.cat([mask, torch.ones_like(token)], dim=1)
                places = mask.cumsum(dim=1)[:, -1:] - 1
                out = made(token, attention_mask=mask, position_ids=places, **{CACHE: cache})
                found.append(out.logits)
    finally:
        with_attention(made, "eager")
    padding = (inputs["attention_mask"] == 0)[:, :, None]
    found[0] = found[0].masked_fill(padding, 0.0)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("batch", ["one", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_eager_attention(family, batch, settings):
    made = model(family)
    inputs = prompt() if batch == "one" else ragged()
    expected = forced(made, DynamicCache(config=made.config), inputs)
    cache = pkt.PariskvCache(made.config, **settings)
    actual = forced(made, cache, inputs)
    check_use(cache, inputs)
    scale = float(expected.std())
    # What a search leaves out is little, not nothing.
    allowed = 1e-3 if settings is SETTINGS["dense"] else 5e-3
    torch.testing.assert_close(actual / scale, expected / scale, atol=allowed, rtol=allowed)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_and_a_second_turn_of_every_family(family):
    made, inputs = model(family), prompt(2)
    cache = pkt.PariskvCache(made.config, **SETTINGS["dense"])
    how = {"num_beams": 2, "max_new_tokens": 16}
    first = generated(made, inputs, cache, **how)
    assert torch.equal(first, generated(made, inputs, **how))

    cache = pkt.PariskvCache(made.config, **SETTINGS["dense"])
    first = generated(made, inputs, cache, max_new_tokens=16)
    ids = torch.cat([first, prompt(2, 9, seed=8)["input_ids"]], dim=1)
    second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    own = DynamicCache(config=made.config)
    generated(made, inputs, own, max_new_tokens=16)
    expected = generated(made, second, own, max_new_tokens=16)
    assert torch.equal(generated(made, second, cache, max_new_tokens=16), expected)


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_prompt_lookup_takes_drafts_back_past_a_sliding_window(family, rollback):
    if not rollback and VERSION < (5, 23):
        pytest.skip("the library's sliding layers cannot take rows back")
    made, inputs = model(family), prompt()
    cache = pkt.PariskvCache(made.config, rollback=rollback, **SETTINGS["dense"])
    how = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 16}
    tokens = generated(made, inputs, cache, **how)
    assert torch.equal(tokens, generated(made, inputs, max_new_tokens=16))
    attached = pkt.attach(copy.deepcopy(made), **SETTINGS["dense"])
    assert torch.equal(attached.generate(**inputs, do_sample=False, **how), tokens)


def test_prompt_lookup_takes_drafts_back_from_convolutions():
    made, inputs = model("lfm2"), prompt()
    if VERSION < (5, 23):
        pytest.skip("the library's convolutions cannot take tokens back")
    how = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 16}
    tokens = generated(made, inputs, pkt.PariskvCache(made.config, **SETTINGS["dense"]), **how)
    assert torch.equal(tokens, generated(made, inputs, max_new_tokens=16))
