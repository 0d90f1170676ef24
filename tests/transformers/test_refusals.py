"""What is not supported is refused by name, before anything is computed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pytest
import torch
import transformers
from pariskv_core.transformers import versions
from tiny import CACHE, COMMON, DENSE, VERSION, Counting, generated, model, prompt
from transformers import DynamicCache, StaticCache

# Version 4.57 warns of these itself.
LIBRARY_REFUSES_WEIGHTS = pytest.mark.filterwarnings("ignore:.output_attentions=True. is not supp")


def forward(made: Any, cache: Any, **changes: Any) -> Any:
    with torch.no_grad():
        return made(**{**prompt(), CACHE: cache, **changes})


def tokens(count: int, rows: int = 1) -> torch.Tensor:
    return prompt(rows, count)["input_ids"]


@pytest.fixture
def llama() -> Any:
    made = copy.deepcopy(model("llama"))
    made.set_attn_implementation("pariskv")
    return made


def cache_of(made: Any) -> pkt.PariskvCache:
    return pkt.PariskvCache(made.config, **DENSE)


def test_latent_attention_is_refused():
    config = transformers.DeepseekV3Config(num_hidden_layers=2)
    with pytest.raises(NotImplementedError, match=r"deepseek_v3 .*latent.*\(kv_lora_rank\)"):
        pkt.PariskvCache(config)


def test_layers_that_are_not_attention_are_refused():
    """States are kept by the library's cache, if its version has one for them."""
    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("needs Qwen3-Next")
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    if versions.WITHOUT_ROWS:
        assert len(pkt.PariskvCache(config).engine_layers) == 1
        config = transformers.FalconH1Config(num_hidden_layers=2)
    name, kind = config.model_type, config.layer_types[0]
    with pytest.raises(NotImplementedError, match=rf'{name} .* layers of type "{kind}", expected'):
        pkt.PariskvCache(config)


def test_mamba_is_refused_where_the_library_keeps_no_states():
    config = transformers.JambaConfig(num_hidden_layers=8)
    if versions.WITHOUT_ROWS:
        assert len(pkt.PariskvCache(config).engine_layers) == 1
        return
    with pytest.raises(NotImplementedError, match=r'jamba .* layers of type "mamba", expected'):
        pkt.PariskvCache(config)


def test_states_cannot_be_taken_back():
    made = model("qwen3_next")
    cache = cache_of(made)
    tokens = generated(made, prompt(), cache)
    with pytest.raises(NotImplementedError, match=r"cache: .* got ones that keep a state; copy"):
        cache.crop(-3)
    assert cache.get_seq_length() == tokens.shape[1] - 1
    cache.crop(0)


def test_a_model_without_full_attention_is_refused():
    config = transformers.MistralConfig(**{**COMMON, "sliding_window": 64})
    with pytest.raises(NotImplementedError, match=r"mistral .* no layer of full attention"):
        pkt.PariskvCache(config)


def test_an_encoder_and_a_decoder_are_refused():
    with pytest.raises(NotImplementedError, match=r"t5 .*\(is_encoder_decoder\)"):
        pkt.PariskvCache(transformers.T5Config())


def test_a_model_whose_attention_cannot_be_exchanged_is_refused():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=1)
    with pytest.raises(NotImplementedError, match=r"bloom .*set_attn_implementation"):
        pkt.attach(transformers.BloomForCausalLM(config))
    with pytest.raises(TypeError, match=r"model: expected a model .* got Linear"):
        pkt.attach(torch.nn.Linear(2, 2))


def test_a_head_size_that_the_engine_lacks_is_named():
    config = transformers.LlamaConfig(**{**COMMON, "head_dim": 32})
    made = transformers.LlamaForCausalLM(config)
    made.set_attn_implementation("pariskv")
    with pytest.raises(ValueError, match=r"\[config\] head_dim: expected .* got 32"):
        forward(made, pkt.PariskvCache(config))


@pytest.mark.parametrize(
    ("settings", "exception", "sentence"),
    [
        ({"top_k": 0}, ValueError, "top_k: expected"),
        ({"top_k": 4, "policy": pk.ParisKV()}, ValueError, "top_k: expected it in the policy"),
        ({"local": -7}, ValueError, "local: expected"),
        ({"kv_heads": 2}, TypeError, "kv_heads: it is the model's"),
        ({"topk": 2}, TypeError, "topk"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_cache_is_made(settings, exception, sentence):
    made = copy.deepcopy(model("llama"))
    with pytest.raises(exception, match=sentence):
        pkt.PariskvCache(made.config, **settings)
    with pytest.raises(exception, match=sentence):
        pkt.attach(made, **settings)
    assert "generate" not in made.__dict__
    assert made.config._attn_implementation == "eager"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_forgotten_attention_is_noticed_in_the_first_pass(llama, attention):
    llama.set_attn_implementation(attention)
    with pytest.raises(RuntimeError, match=r'attention: expected "pariskv".*set_attn_impl'):
        forward(llama, cache_of(llama))


def test_a_forgotten_cache_is_warned_about(llama):
    with pytest.warns(UserWarning, match=rf"\[transformers\] cache: .* {CACHE}=PariskvCache"):
        ids = llama.generate(**prompt(), max_new_tokens=3, do_sample=False)
    assert torch.equal(ids, generated(model("llama"), prompt(), max_new_tokens=3))


def test_no_cache_at_all_is_full_attention_and_right(llama):
    inputs = prompt(2)
    inputs["attention_mask"][0, :9] = 0
    with torch.no_grad():
        ours = llama(**inputs, use_cache=False).logits
        expected = model("llama")(**inputs, use_cache=False).logits
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[kept], expected[kept], atol=1e-3, rtol=1e-3)


def test_a_static_cache_is_refused(llama):
    with pytest.raises(NotImplementedError, match=r"\[transformers\] cache: .*static"):
        llama.generate(**prompt(), max_new_tokens=3, cache_implementation="static")
    static = StaticCache(config=llama.config, max_cache_len=100)
    with pytest.raises(NotImplementedError, match=r"\[transformers\] cache: .*static"):
        forward(llama, static, attention_mask=None)


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_an_attached_model_refuses_other_caches(kind):
    made = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    with pytest.raises(NotImplementedError, match=f'cache_implementation: "{kind}"'):
        made.generate(**prompt(), max_new_tokens=3, cache_implementation=kind)


def test_continuous_batching_is_refused():
    made = pkt.attach(copy.deepcopy(model("llama")), **DENSE)
    with pytest.raises(NotImplementedError, match=r"\[transformers\] generate_batch"):
        made.generate_batch([[1, 2, 3]])


def test_another_batch_is_refused(llama):
    cache = cache_of(llama)
    forward(llama, cache)
    with pytest.raises(ValueError, match=r"batch: expected the 1 rows .* got 2"):
        forward(llama, cache, input_ids=tokens(60, 2), attention_mask=torch.ones(2, 120))


def test_a_mask_that_leaves_out_the_past_is_refused(llama):
    cache = cache_of(llama)
    forward(llama, cache)
    expected = r"attention_mask: expected 120 columns.* got 60"
    if VERSION < (5, 12):
        expected = "static cache, or a mask that leaves out earlier tokens"
    with pytest.raises((ValueError, NotImplementedError), match=expected):
        forward(llama, cache)


def test_a_mask_that_is_more_than_padding_is_refused(llama):
    mask = torch.ones(1, 1, 60, 60, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"attention_mask: .*\(1, 1, 60, 60\)"):
        forward(llama, cache_of(llama), attention_mask=mask)


def test_a_mask_that_changes_the_past_is_refused(llama):
    cache = cache_of(llama)
    forward(llama, cache)
    mask = torch.ones(1, 65, dtype=torch.long)
    mask[0, 10] = 0
    with pytest.raises(ValueError, match="attention_mask: expected earlier tokens"):
        forward(llama, cache, input_ids=tokens(5), attention_mask=mask)


def test_gradients_are_refused(llama):
    with pytest.raises(NotImplementedError, match=r"key: expected no gradients.*no_grad"):
        llama(**prompt(), **{CACHE: cache_of(llama)})


@pytest.mark.parametrize(
    ("family", "trained", "name"),
    [
        ("llama", "q_proj.weight", "query"),
        ("llama", "k_proj.weight", "key"),
        ("llama", "v_proj.weight", "value"),
        ("gpt_oss", "sinks", "s_aux"),
    ],
)
def test_gradients_of_one_parameter_are_refused(family, trained, name):
    made = copy.deepcopy(model(family))
    made.set_attn_implementation("pariskv")
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    ours = max(cache_of(made).engine_layers)
    made.model.layers[ours].self_attn.get_parameter(trained).requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"\] {name}: expected no gradients.*no_grad"):
        made(**prompt(), **{CACHE: cache_of(made)})
    forward(made, cache_of(made))  # under torch.no_grad() there is none to lose


@LIBRARY_REFUSES_WEIGHTS
def test_attention_weights_are_refused(llama):
    with pytest.raises(NotImplementedError, match="output_attentions"):
        forward(llama, cache_of(llama), output_attentions=True)


def test_a_pass_that_ended_halfway_is_noticed(llama, monkeypatch):
    cache = cache_of(llama)
    forward(llama, cache)
    turn = {"input_ids": tokens(3), "attention_mask": torch.ones(1, 63)}
    with monkeypatch.context() as broken:
        broken.setattr(llama.model.layers[0].mlp, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(llama, cache, **turn)
    with pytest.raises(RuntimeError, match=r"ended halfway.*reset\(\)"):
        forward(llama, cache, **{**turn, "attention_mask": None})
    cache.reset()
    assert torch.equal(generated(llama, prompt(), cache), generated(model("llama"), prompt()))


@pytest.mark.parametrize(("failing", "turn"), [("prefill", 0), ("attend", 5), ("decode", 1)])
def test_a_call_that_fails_undoes_the_pass(llama, monkeypatch, failing, turn):
    cache, inputs = cache_of(llama), prompt()
    new = inputs["input_ids"]
    if turn > 0:
        forward(llama, cache)
        new = tokens(turn)
        ids = torch.cat([inputs["input_ids"], new], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    real = getattr(Counting, failing)

    def fail(self, layer, *args, **kwargs):
        if layer == 1:
            raise pk.OutOfMemory("none left")
        return real(self, layer, *args, **kwargs)

    with monkeypatch.context() as broken:
        broken.setattr(Counting, failing, fail)
        with pytest.raises(pk.OutOfMemory):
            forward(llama, cache, **{**inputs, "input_ids": new})
    assert cache.get_seq_length() == (60 if turn > 0 else 0)
    assert torch.equal(generated(llama, inputs, cache), generated(model("llama"), inputs))


def test_a_call_that_fails_beside_sliding_layers_asks_for_a_reset(monkeypatch):
    made = copy.deepcopy(model("gemma2"))
    made.set_attn_implementation("pariskv")
    cache = cache_of(made)
    forward(made, cache)
    turn = {"input_ids": tokens(3), "attention_mask": None}
    with monkeypatch.context() as broken:
        broken.setattr(Counting, "attend", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(made, cache, **turn)
    with pytest.raises(RuntimeError, match=r"ended halfway.*reset\(\)"):
        forward(made, cache, **turn)


@LIBRARY_REFUSES_WEIGHTS
def test_a_refused_pass_leaves_the_cache_usable(llama):
    cache = cache_of(llama)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        forward(llama, cache, output_attentions=True)
    assert torch.equal(generated(llama, prompt(), cache), generated(model("llama"), prompt()))


def test_a_cache_is_copied_and_not_pickled(llama):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache_of(llama))


@pytest.mark.skipif(VERSION >= (5, 23), reason="there, a positive number is refused")
def test_a_crop_to_a_length(llama):
    cache = cache_of(llama)
    forward(llama, cache)
    cache.crop(50)
    assert cache.get_seq_length() == cache.engine.length(cache.sequences[0]) == 50


def test_other_caches_run_as_before():
    made = model("gemma2")
    before = generated(made, prompt(), DynamicCache(config=made.config))
    pkt.attach(copy.deepcopy(made), **DENSE)
    assert torch.equal(generated(made, prompt(), DynamicCache(config=made.config)), before)
