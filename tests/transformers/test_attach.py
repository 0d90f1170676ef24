"""attach(model): plain generate() uses the engine; and what importing us does not do."""

from __future__ import annotations

import copy
import subprocess
import sys

import pariskv_core.transformers as pkt
import pariskv_core.transformers.attached as attached
import pytest
import torch
import transformers
from tiny import CACHE, DENSE, Counting, generated, model, prompt, ragged
from transformers import GenerationConfig


@pytest.fixture
def made_caches(monkeypatch) -> list[pkt.PariskvCache]:
    found = []

    class Noted(pkt.PariskvCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(attached, "PariskvCache", Noted)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_attached_model_generates_with_the_engine(family, settings, made_caches):
    made = pkt.attach(copy.deepcopy(model(family)), **settings)
    inputs = ragged()
    made_caches.clear()
    tokens = made.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert torch.equal(tokens, generated(model(family), inputs))
    [cache] = made_caches
    assert isinstance(cache.engine, Counting)
    assert cache.engine.calls["decode"] == 29 * 2


def test_every_call_has_a_cache_of_its_own(made_caches):
    made = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    made_caches.clear()
    for seed in (1, 2):
        inputs = prompt(seed, 30, seed)
        tokens = made.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert torch.equal(tokens, generated(model("llama"), inputs, max_new_tokens=5))
    assert len(made_caches) == 2
    assert made_caches[0].engine is not made_caches[1].engine


def test_arguments_may_come_by_position(made_caches):
    made = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    made_caches.clear()
    how = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    how.cache_implementation = "dynamic_full"
    tokens = made.generate(prompt()["input_ids"], how, attention_mask=prompt()["attention_mask"])
    assert torch.equal(tokens, generated(model("llama"), prompt(), max_new_tokens=5))
    assert len(made_caches) == 1
    assert how.cache_implementation == "dynamic_full"


def test_a_cache_that_is_passed_is_used(made_caches):
    made = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    cache = pkt.PariskvCache(made.config, **DENSE)
    made_caches.clear()
    out = made.generate(
        **prompt(),
        **{CACHE: cache},
        generation_config=GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0),
        return_dict_in_generate=True,
    )
    assert out[CACHE] is cache
    assert made_caches == []
    assert cache.get_seq_length() == 63


@pytest.mark.skipif(CACHE == "past_key_values", reason="this transformers has one name alone")
def test_a_cache_that_is_passed_by_its_older_name_is_used(made_caches):
    made = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    cache = pkt.PariskvCache(made.config, **DENSE)
    made_caches.clear()
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
        made.generate(**prompt(), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert made_caches == []
    assert cache.get_seq_length() == 63


@pytest.mark.parametrize("how", [{}, {"compiled": True}, {"graph": True}])
def test_an_attached_model_warns_of_nothing(how, caplog, recwarn):
    made = copy.deepcopy(model("llama"))
    transformers.logging.enable_propagation()
    try:
        caplog.clear()
        recwarn.clear()
        pkt.attach(made, **how, **DENSE)
        for kind in ({}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}):
            made.generate(**prompt(), max_new_tokens=4, do_sample=False, **kind)
        pkt.detach(made)
    finally:
        transformers.logging.disable_propagation()
    shown = [w for w in recwarn if not issubclass(w.category, DeprecationWarning)]  # torch has some
    assert [str(warning.message) for warning in shown] == []
    theirs = [record for record in caplog.records if record.name.startswith("transformers")]
    assert [record.getMessage() for record in theirs if record.levelname != "DEBUG"] == []


def test_a_call_without_a_cache_makes_none(made_caches):
    made = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    made_caches.clear()
    tokens = made.generate(**prompt(), max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(tokens, generated(model("llama"), prompt(), max_new_tokens=5))
    assert made_caches == []


def test_a_copy_of_an_attached_model_is_attached_to_itself():
    first = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    second = copy.deepcopy(first)
    assert second.generate.__self__ is second
    with torch.no_grad():
        second.lm_head.weight.neg_()
    how = {"max_new_tokens": 5, "do_sample": False}
    assert not torch.equal(second.generate(**prompt(), **how), first.generate(**prompt(), **how))


def test_detach_takes_it_back():
    made = copy.deepcopy(model("llama"))
    pkt.attach(pkt.attach(made, top_k=3, **DENSE), **DENSE)  # the second one counts
    assert pkt.detach(made) is made
    assert made.config._attn_implementation == "eager"
    assert "generate" not in made.__dict__
    assert torch.equal(
        made.generate(**prompt(), max_new_tokens=5, do_sample=False),
        generated(model("llama"), prompt(), max_new_tokens=5),
    )
    with pytest.raises(ValueError, match="expected one that was attached"):
        pkt.detach(made)


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_engine_alone_loads_neither_torch_nor_transformers():
    loaded = "import sys, pariskv_core; print({'torch', 'transformers'} & set(sys.modules))"
    assert child(loaded) == "set()"


def test_importing_leaves_the_library_as_it_was():
    code = """
import transformers, transformers.cache_utils as c
from transformers import DynamicCache, LlamaConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions

def state():
    tables = {n: dict(v) for n, v in vars(c).items() if n.endswith("_MAPPING")}
    layers = [type(layer) for layer in DynamicCache(config=LlamaConfig(num_hidden_layers=2)).layers]
    return tables, layers

before, names = state(), (set(masks.valid_keys()), set(attentions.valid_keys()))
import pariskv_core.transformers
assert state() == before
assert set(masks.valid_keys()) - names[0] == {"pariskv"}
assert set(attentions.valid_keys()) - names[1] == {"pariskv"}
print("untouched")
"""
    assert child(code) == "untouched"
