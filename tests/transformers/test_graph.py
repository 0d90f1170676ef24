"""attach(model, graph=True): steps are replays of a captured graph; tokens stay what they were."""

from __future__ import annotations

import copy

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pariskv_core.transformers.attached as attached
import pytest
import torch
from tiny import CACHE, SEARCHING, distinct, generated, model, prompt, ragged, with_attention

HAS_GPU = torch.cuda.is_available() and pk.is_built("cuda") and pk.is_available("cuda")
gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU and a build with the CUDA backend")
STEPS = 40


@pytest.fixture
def caches(monkeypatch) -> list[pkt.PariskvCache]:
    found = []

    class Noted(pkt.PariskvCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(attached, "PariskvCache", Noted)
    return found


def on_gpu(family: str = "llama", dtype: torch.dtype = torch.float32):
    return copy.deepcopy(model(family)).to("cuda", dtype)


def moved(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def both_ways(made, inputs, caches, settings, **how):
    """Tokens without graphs, tokens with them, and the cache of the latter."""
    how = {"max_new_tokens": STEPS, "do_sample": False, **how}
    results = []
    for graph in (False, True):
        pkt.attach(made, graph=graph, **settings)
        caches.clear()
        torch.manual_seed(3)
        results.append(made.generate(**inputs, **how))
    [cache] = caches
    return (*results, cache)


def test_on_a_cpu_steps_are_eager(settings, caches):
    made = copy.deepcopy(model("llama"))
    eager, other, cache = both_ways(made, ragged(), caches, settings)
    assert torch.equal(eager, other)
    assert cache.replays == 0
    assert "forward" not in made.__dict__


def test_the_next_call_takes_over_the_engine_and_nothing_else(caches):
    made = pkt.attach(copy.deepcopy(model("llama")), graph=True, **SEARCHING)
    caches.clear()
    for seed in (1, 2):
        inputs = prompt(seed, 40, seed)
        tokens = made.generate(**inputs, max_new_tokens=9, do_sample=False)
        assert torch.equal(tokens, generated(model("llama"), inputs, max_new_tokens=9))
    first, second = caches
    assert first.engine is second.engine
    assert set(first.sequences).isdisjoint(second.sequences)
    caches.clear()
    del first, second
    engine = attached._last[made][1].engine
    assert engine.stats().sequences == 0
    pkt.detach(made)
    assert made not in attached._last


@gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_say_what_eager_steps_say(rows, dtype, settings, caches):
    inputs = moved(ragged((60, 37, 48)) if rows > 1 else prompt())
    made = on_gpu(dtype=dtype)
    how = {"output_logits": True, "return_dict_in_generate": True}
    eager, other, cache = both_ways(made, inputs, caches, settings, **how)
    assert torch.equal(eager.sequences, other.sequences)
    for step, (mine, its) in enumerate(zip(other.logits, eager.logits, strict=True)):
        assert torch.equal(mine, its), step
    assert cache.replays == STEPS - 2  # the prompt gives the first token; one step is eager
    assert distinct(other.sequences, inputs["input_ids"].shape[1]) >= 20
    lengths = [cache.engine.length(s) for s in cache.sequences]
    assert lengths == (inputs["attention_mask"].sum(dim=1) + STEPS - 1).tolist()


WAYS = {
    "sampling": {"do_sample": True, "top_k": 20},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "repetition penalty": {"repetition_penalty": 1.3},
    "chunks of a prompt": {"prefill_chunk_size": 16},
}


@gpu
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_way_to_generate_may_replay(way, settings, caches):
    rows = 1 if "prompt_lookup_num_tokens" in way else 2
    inputs = moved(prompt(rows, 60))
    eager, other, cache = both_ways(on_gpu(), inputs, caches, settings, **way)
    assert torch.equal(eager, other)
    # Drafts are passes of several tokens, and few are refused whole.
    assert cache.replays > (0 if "prompt_lookup_num_tokens" in way else 30)


@gpu
def test_calls_share_a_graph_and_batches_have_their_own(settings, caches):
    made, plain = on_gpu(), on_gpu()
    pkt.attach(made, graph=True, **settings)
    pkt.attach(plain, **settings)
    for rows in (1, 2, 1, 2):
        inputs = moved(prompt(rows, 50, rows))
        how = {"max_new_tokens": 12, "do_sample": False}
        assert torch.equal(made.generate(**inputs, **how), plain.generate(**inputs, **how))
    assert len(attached._last[made][1].graphs.of) == 2


@gpu
def test_a_second_turn_and_a_copy_go_on(settings, caches):
    made = pkt.attach(on_gpu(), graph=True, **settings)
    cache = pkt.PariskvCache(made.config, **settings)
    inputs = moved(ragged())
    first = made.generate(**inputs, **{CACHE: cache}, max_new_tokens=9, do_sample=False)
    twin = copy.deepcopy(cache)
    turn = torch.cat([first, moved(prompt(3, 6, 9))["input_ids"]], dim=1)
    mask = torch.ones_like(turn)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    results = []
    for graph, used in ((True, cache), (False, twin)):
        pkt.attach(made, graph=graph, **settings)
        replays = used.replays
        results.append(
            made.generate(
                turn, attention_mask=mask, **{CACHE: used}, max_new_tokens=15, do_sample=False
            )
        )
        assert (used.replays > replays) == graph
    assert torch.equal(*results)


@gpu
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt_oss", "phi3", "olmo2"])
def test_where_steps_cannot_be_captured_they_are_eager(family, caches):
    made = on_gpu(family)
    eager, other, _ = both_ways(made, moved(ragged()), caches, SEARCHING)
    assert torch.equal(eager, other)


@gpu
@pytest.mark.parametrize("kept", ["output_hidden_states", "output_attentions"])
def test_outputs_that_are_kept_are_not_replayed(kept, caches):
    made = with_attention(on_gpu(), "eager")
    pkt.attach(made, graph=True, **SEARCHING)
    caches.clear()
    how = {kept: True, "return_dict_in_generate": True, "max_new_tokens": 6}
    if kept == "output_attentions":
        with pytest.raises(NotImplementedError, match="output_attentions"):
            made.generate(**moved(prompt()), **how)
        return
    out = made.generate(**moved(prompt()), do_sample=False, **how)
    assert caches[0].replays == 0
    assert not torch.equal(out.hidden_states[2][0], out.hidden_states[3][0])


@gpu
def test_out_of_memory_in_a_replay_changes_nothing(caches):
    made = pkt.attach(on_gpu(), graph=True, **{**SEARCHING, "memory_budget": 4 << 20})
    with pytest.raises(pk.OutOfMemory):
        made.generate(**moved(prompt()), max_new_tokens=40_000, do_sample=False)
    assert "forward" not in made.__dict__
