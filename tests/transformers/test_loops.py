"""A loop of one's own over an attached model, with the cache that the model's outputs have."""

from __future__ import annotations

import copy
from typing import Any

import pariskv_core.transformers as pkt
import pytest
import torch
from tiny import CACHE, DENSE, SEARCHING, Counting, generated, model, prompt, ragged
from transformers import DynamicCache


def attached(family: str = "llama", **settings: Any) -> Any:
    return pkt.attach(copy.deepcopy(model(family)), **(settings or DENSE))


def loop(made: Any, inputs: dict[str, torch.Tensor], steps: int) -> tuple[torch.Tensor, Any]:
    """Greedy tokens, as a person writes it: the prompt, then token after token."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        out = made(ids, attention_mask=mask)
        for step in range(steps):
            new = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
            mask = torch.cat([mask, torch.ones_like(new)], dim=1)
            if step + 1 < steps:
                out = made(new, attention_mask=mask, **{CACHE: out[CACHE]})
    return ids, out[CACHE]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_loop_is_served_by_the_engine(family, settings, recwarn):
    inputs = prompt(2, 40)
    tokens, cache = loop(attached(family, **settings), inputs, 12)
    assert torch.equal(tokens, generated(model(family), inputs, max_new_tokens=12))
    assert isinstance(cache, pkt.PariskvCache)
    assert isinstance(cache.engine, Counting)
    assert cache.engine.calls["decode"] == 11 * len(cache.engine_layers)
    assert not [w for w in recwarn if "[transformers]" in str(w.message)]


def test_a_loop_searches_as_generate_does():
    made, inputs = attached(**SEARCHING), prompt(1, 200)
    tokens, cache = loop(made, inputs, 8)
    assert torch.equal(tokens, made.generate(**inputs, max_new_tokens=8, do_sample=False))
    assert cache.engine.stats().searched_tokens > 0


def test_two_loops_have_caches_of_their_own():
    made = attached()
    first, second = loop(made, prompt(1, 20), 3)[1], loop(made, prompt(1, 30), 3)[1]
    assert first is not second and first.engine is not second.engine


@pytest.mark.parametrize(
    "how",
    [
        {"use_cache": False},
        {"attention_mask": torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()},
        {CACHE: "own"},
    ],
    ids=["use_cache=False", "a mask of its own", "a cache of its own"],
)
def test_what_a_call_says_is_done(how):
    made, ids = attached(), prompt(1, 20)["input_ids"]
    how = dict(how)
    if CACHE in how:
        how[CACHE] = DynamicCache(config=made.config)
    given = how.get(CACHE)
    with torch.no_grad():
        out = made(ids, **how)
        expected = model("llama")(ids).logits
    assert not isinstance(out.get(CACHE), pkt.PariskvCache)
    assert given is None or out[CACHE] is given
    torch.testing.assert_close(out.logits, expected, atol=1e-4, rtol=1e-4)


def test_a_call_with_gradients_is_the_models_own():
    """It is trained as before; and a loop over its cache is told why it attends in full."""
    made, ids = attached(), prompt(1, 20)["input_ids"]
    out = made(ids, labels=ids)
    out.loss.backward()
    assert made.lm_head.weight.grad is not None
    said = r"so this model runs full attention: .*where its first call runs under torch.no_grad\(\)"
    with torch.no_grad(), pytest.warns(UserWarning, match=said):
        made(ids[:, :1], **{CACHE: out[CACHE]})


def test_a_detached_model_makes_the_librarys_cache():
    made = attached()
    pkt.attach(made, **DENSE)  # once more: one hook, not two
    assert len(made._forward_pre_hooks) == 1
    pkt.detach(made)
    assert not made._forward_pre_hooks
    with torch.no_grad():
        assert type(made(prompt()["input_ids"])[CACHE]) is DynamicCache


def test_a_copy_of_an_attached_model_is_served_too():
    twin = copy.deepcopy(attached())
    assert isinstance(loop(twin, ragged(), 2)[1], pkt.PariskvCache)


def test_a_cache_prints_what_it_holds():
    cache = pkt.PariskvCache(model("gemma2").config, **DENSE)
    whole = f"{len(cache.engine_layers)} of {len(cache.layers)} layers the engine's"
    assert repr(cache) == f"PariskvCache(0 rows of 0 columns, {whole}: nothing yet)"
    cache = loop(attached(), prompt(2, 20), 3)[1]
    assert repr(cache).startswith(
        "PariskvCache(2 rows of 22 columns, 2 of 2 layers the engine's: Ca"
    )
    assert "0x" not in repr(cache)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("polcy", "policy"), ("topk", "top_k"), ("dense_bellow", "dense_below"), ("TopK", "top_k")],
)
@pytest.mark.parametrize("door", [pkt.attach, pkt.PariskvCache])
def test_the_nearest_setting_is_suggested(door, name, meant):
    made = model("llama")
    with pytest.raises(TypeError, match=rf"\] {name}: there is no such .*; did you mean {meant}\?"):
        door(made if door is pkt.attach else made.config, **{name: 3})


def test_a_budget_may_be_a_size_in_words():
    made = attached(**DENSE, memory_budget="1GiB")
    assert loop(made, prompt(), 2)[1].engine.config.memory_budget == 1 << 30
