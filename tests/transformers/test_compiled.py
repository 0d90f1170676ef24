"""attach(model, compiled=True): the layers of a step are torch.compile's; tokens stay the same."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pytest
import torch
from test_graph import both_ways, caches, gpu, moved, on_gpu  # noqa: F401  (caches: a fixture)
from tiny import CACHE, SEARCHING, distinct, generated, model, ragged

NEAR = {"atol": 2e-4, "rtol": 0}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}


def made_of(family: str):
    return copy.deepcopy(model(family))


def steps_compiled(monkeypatch) -> list[int]:
    """Numbers of rows of the steps that run over compiled layers, in their order."""
    import pariskv_core.transformers.compiled as compiled

    seen = []
    used = compiled.CompiledLayers.used

    def noted(self):
        run = used(self)

        def with_note(forward):
            wrapped = run(forward)

            def step(**kwargs):
                seen.append(kwargs["input_ids"].shape[0])
                return wrapped(**kwargs)

            return step

        return with_note

    monkeypatch.setattr(compiled.CompiledLayers, "used", noted)
    return seen


def test_tokens_and_nearly_the_logits_are_those_of_eager_steps(monkeypatch):
    inputs = ragged()
    rows, length = inputs["input_ids"].shape
    made = made_of("llama")
    how = {"max_new_tokens": 30, "do_sample": False, **LOGITS}
    plain = pkt.attach(made, **SEARCHING).generate(**inputs, **how)
    seen = steps_compiled(monkeypatch)
    pkt.attach(made, compiled=True, **SEARCHING)
    for _ in range(2):  # the second call, with a cache of its own, compiles nothing
        compiled = made.generate(**inputs, **how)
        assert torch.equal(plain.sequences, compiled.sequences)
        for mine, its in zip(compiled.logits, plain.logits, strict=True):
            torch.testing.assert_close(mine, its, **NEAR)
        assert distinct(compiled.sequences, length) >= 20
    assert seen == [rows] * 29 * 2  # the prompt gives the first token
    assert all("forward" not in layer.__dict__ for layer in made.model.layers)
    assert "forward" not in made.__dict__
    pkt.detach(made)
    assert torch.equal(
        generated(made, inputs, max_new_tokens=30),
        generated(model("llama"), inputs, max_new_tokens=30),
    )


def test_layers_that_keep_rows_elsewhere_run_as_without(monkeypatch):
    seen = steps_compiled(monkeypatch)
    made, inputs = made_of("gemma2"), ragged()
    how = {"max_new_tokens": 8, "do_sample": False, **LOGITS}
    plain = pkt.attach(made, **SEARCHING).generate(**inputs, **how)
    compiled = pkt.attach(made, compiled=True, **SEARCHING).generate(**inputs, **how)
    assert all(map(torch.equal, compiled.logits, plain.logits))
    assert seen == []


@pytest.mark.parametrize("chunk", [1, 59])
def test_padding_in_a_chunk_of_one_column_is_not_stored(chunk):
    made, inputs = made_of("llama"), ragged()
    how = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": chunk}
    plain = pkt.attach(made, **SEARCHING).generate(**inputs, **how)
    pkt.attach(made, compiled=True, **SEARCHING)
    cache = pkt.PariskvCache(made.config, **SEARCHING)
    assert torch.equal(plain, made.generate(**inputs, **{CACHE: cache}, **how))
    lengths = [cache.engine.length(sequence) for sequence in cache.sequences]
    assert lengths == (inputs["attention_mask"].sum(dim=1) + 5).tolist()


def test_threads_generate_one_after_another():
    made, inputs = pkt.attach(made_of("llama"), compiled=True, **SEARCHING), ragged()
    how = {"max_new_tokens": 8, "do_sample": False}
    expected = made.generate(**inputs, **how)
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(made.generate, **inputs, **how) for _ in range(3)]
        assert all(torch.equal(one.result(), expected) for one in found)
    assert all("forward" not in layer.__dict__ for layer in made.model.layers)
    assert "forward" not in made.__dict__


def test_a_step_that_fails_leaves_the_layers_as_they_were(monkeypatch):
    made = pkt.attach(made_of("llama"), compiled=True, **SEARCHING)

    calls = 0

    def fail(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 2 * made.config.num_hidden_layers:
            raise RuntimeError("a failure of the test's own")
        return decode(*args, **kwargs)

    inputs = ragged()
    cache = pkt.PariskvCache(made.config, **SEARCHING)
    tokens = made.generate(**inputs, **{CACHE: cache}, max_new_tokens=3, do_sample=False)
    decode = pk.Cache.decode
    monkeypatch.setattr(pk.Cache, "decode", fail)
    with pytest.raises(RuntimeError, match="the test's own"):
        made.generate(tokens, **{CACHE: cache}, max_new_tokens=5, do_sample=False)
    assert all("forward" not in layer.__dict__ for layer in made.model.layers)


def test_a_decoder_without_layers_is_refused():
    made = made_of("llama")
    made.get_decoder = lambda: torch.nn.Identity()
    with pytest.raises(NotImplementedError, match="compiled: llama is not supported"):
        pkt.attach(made, compiled=True)
    assert made.config._attn_implementation == "eager"


@gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_a_graph_of_compiled_layers(rows, caches):  # noqa: F811
    inputs = moved(ragged((60, 37, 48)[:rows]))
    made = on_gpu()
    how = {"max_new_tokens": 40, **LOGITS}
    plain, replayed, _ = both_ways(made, inputs, caches, SEARCHING, **how)
    pkt.attach(made, graph=True, compiled=True, **SEARCHING)
    caches.clear()
    compiled = made.generate(**inputs, do_sample=False, **how)
    assert torch.equal(plain.sequences, compiled.sequences)
    assert torch.equal(plain.sequences, replayed.sequences)
    for mine, its in zip(compiled.logits, plain.logits, strict=True):
        torch.testing.assert_close(mine, its, **NEAR)
    assert caches[0].replays == 38
