"""Methods inside pretrained models: text that goes on, needles, tasks. No downloads."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pariskv_core as pk
import pytest
import torch
from pariskv_core.cli.weights import MODELS
from quality import __main__ as program
from quality import predicted
from quality.methods import make_method
from quality.predicted import Judged
from quality.pretrained import forced, needles, prefix, ruler
from quality.pretrained.attentions import ByHead, Engine, KeepingEngine, Rows, nothing
from quality.pretrained.prefix import Prefix, Step
from tiny_models import tiny_model

TOKENS, STEPS = 1024, 6


@pytest.fixture
def step(rng) -> Step:
    """One layer: two kv heads of 64, three query heads each, some keys alike their queries."""

    def rows(tokens: int, heads: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((tokens, heads, 64), np.float32))

    keys = rows(TOKENS, 2)
    near = keys[rng.integers(4, 700, (STEPS, 20))].sum(dim=1) / 3
    queries = near.repeat_interleave(3, dim=1) + rows(STEPS, 6) / 2
    early, recent = rows(512, 6).half(), rows(64, 6).half()
    values = rows(TOKENS, 2).half()
    known = Prefix(torch.arange(TOKENS), [keys.half()], [values], [early], [recent])
    return Step(0, known, queries, rows(STEPS, 2), rows(STEPS, 2))


# --- Attention -----------------------------------------------------------------------------------


def test_full_attention_is_a_softmax_over_all_that_came_before(step):
    out = prefix.full(step)
    keys, values = step.rows(1)
    q, seen = step.queries[2, 4], TOKENS + 3
    weights = (keys[:seen] @ q / 8).softmax(0)
    torch.testing.assert_close(out[2, 4], weights @ values[:seen])


def test_a_sliding_window_sees_its_last_tokens_alone(step):
    out = prefix.full(step, window=10)
    keys, values = step.rows(0)
    last = slice(TOKENS + 3 - 9, TOKENS + 4)
    weights = (keys[last] @ step.queries[3, 1] / 8).softmax(0)
    torch.testing.assert_close(out[3, 1], weights @ values[last])


def test_all_rows_are_full_attention(step):
    everything = Rows(ByHead(lambda: make_method("full"), 100))
    torch.testing.assert_close(everything(step), prefix.full(step), atol=1e-5, rtol=1e-4)


def test_the_engine_attends_to_sinks_window_and_all_that_it_may_select(step):
    engine = Engine(pk.ParisKV(top_k=1024, tail="none", schedule=[(0, 1.0, 0.2)]))
    torch.testing.assert_close(engine(step), prefix.full(step), atol=1e-4, rtol=1e-3)
    few = Engine(pk.ParisKV(top_k=50, tail="none"))(step)
    best = Rows(ByHead(lambda: make_method("oracle"), 50))(step)
    window = Rows(nothing)(step)
    assert (few - best).norm() < 0.5 * (window - best).norm()


def test_without_rows_there_are_the_sinks_and_the_window(step):
    out = Rows(nothing)(step)
    keys, values = (torch.cat([rows[:4], rows[TOKENS - 256 :]]) for rows in step.rows(0))
    seen = 260 + 1
    weights = (keys[:seen] @ step.queries[0, 0] / 8).softmax(0)
    torch.testing.assert_close(out[0, 0], weights @ values[:seen])


@pytest.mark.parametrize(
    "policy", [pk.PRKV(budget=2048), pk.HardKV(most=2048, p=1, metric="attention")]
)
def test_policies_that_may_keep_every_row_attend_to_all(step, policy):
    engine = KeepingEngine(policy)
    torch.testing.assert_close(engine(step), prefix.full(step), atol=1e-4, rtol=1e-3)
    assert engine.counted()["rows"] == TOKENS - 4 - 256


@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [
        (pk.PRKV(budget=256, static_share=0.25), 200, 256),
        (pk.HardKV(most=128, p=1, metric="attention"), 128, 128),
        (pk.HardKV(most=512, p=0.5), 1, 400),
    ],
)
def test_policies_keep_what_the_last_queries_of_the_prefix_need(step, policy, least, most):
    engine = KeepingEngine(policy)
    out = engine(step)
    assert least <= engine.counted()["rows"] <= most
    missed = (out - prefix.full(step)).norm()
    assert 0 < missed < (Rows(nothing)(step) - prefix.full(step)).norm()
    engine.close()


def repeat_prefix(step: Step) -> None:
    """Twice, so that there is a zone."""
    known = step.prefix
    for rows in (known.keys, known.values):
        rows[0] = rows[0].repeat(2, 1, 1)
    known.ids = torch.arange(2 * TOKENS)


def test_rows_in_8_bits_change_outputs_a_little(step):
    repeat_prefix(step)
    whole, narrow = (forced.INT8[name]()(step) for name in (forced.WHOLE_ROWS, forced.NARROW_ROWS))
    missed = (narrow - whole).norm() / whole.norm()
    assert 1e-5 < missed < 0.02


def test_a_judged_engine_holds_its_outputs_against_full_attention(step):
    repeat_prefix(step)
    policy = pk.ParisKV(top_k=32, tail="sample", tail_rows=64)
    judged = Judged(policy)
    out = judged(step)
    assert torch.equal(out, Engine(policy)(step))
    errors = judged.tallies[0].together()
    assert errors is not None and errors.searches == STEPS * 2
    exact = prefix.full(step)
    apart = (out - exact).view(STEPS, 2, -1).norm(dim=2) / exact.view(STEPS, 2, -1).norm(dim=2)
    assert errors.relative == pytest.approx(apart.square().mean().sqrt().item(), rel=1e-4)
    assert errors.predicted > 0


def test_methods_of_all_tables_attend_to_something(step):
    for name in (
        forced.DEFAULT,
        forced.NARROW_ROWS,
        "published",
        "error 0.01, at most 400 rows",
        "SnapKV 256",
        "HARD-KV 256, p = 1",
    ):
        out = forced.METHODS[name]()(step)
        assert out.shape == step.queries.shape and bool(out.isfinite().all()), name


# --- Models --------------------------------------------------------------------------------------


@torch.no_grad()
def at_once(model, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(ids[None]).logits[0]


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_text_that_goes_on_is_what_the_model_says_at_once(transformers, family):
    model = tiny_model(transformers, family)
    ids = torch.randint(256, (40,))
    told = at_once(model, ids)[30:]
    logits = prefix.go_on(model, prefix.read(model, ids[:30]), ids[30:], prefix.full)
    torch.testing.assert_close(logits, told, atol=2e-2, rtol=2e-2)


def test_an_answer_is_as_likely_as_the_model_says_at_once(transformers):
    model = tiny_model(transformers, "Llama")
    known = prefix.read(model, torch.randint(256, (30,)))
    fact = needles.Fact("words", "", "Is it", " so?")
    pretrained = SimpleNamespace(model=model, pieces=pieces)
    (found,) = needles.asked(pretrained, known, [fact], prefix.full)
    ids = torch.cat([known.ids, pieces("\n\nIs it so?")])
    chances = at_once(model, ids[:-1]).log_softmax(-1)[-4:].gather(1, ids[-4:, None])
    assert found["log_probability"] == pytest.approx(chances.sum().item(), abs=0.05)
    assert found["found"] == 0.0  # this model knows nothing


def test_a_prefix_is_read_once(transformers, tmp_path, monkeypatch):
    model = tiny_model(transformers, "Llama")
    pretrained = prefix.Pretrained(MODELS["smollm2"], None, model)
    ids = torch.randint(256, (30,))
    first = prefix.kept(pretrained, ids, tmp_path)
    monkeypatch.setattr(prefix, "read", None)
    again = prefix.kept(pretrained, ids, tmp_path)
    assert torch.equal(again.keys[2], first.keys[2]) and torch.equal(again.ids, ids)
    with pytest.raises(TypeError, match="not callable"):  # it is, for another text
        prefix.kept(pretrained, ids + 1, tmp_path)


def test_full_attention_differs_from_itself_by_nothing():
    torch.manual_seed(3)
    logits, following = torch.randn(20, 30), torch.randint(30, (20,))
    sizes = torch.full((20,), 4)
    same = forced.against(logits, logits, following, sizes)
    assert same["kl"] == 0 and same["same_top"] == 1
    bits = -logits.log_softmax(-1).gather(1, following[:, None]).mean() / math.log(2)
    assert same["bits_per_byte"] == pytest.approx(bits.item() / 4, rel=1e-5)
    other = forced.against(torch.randn(20, 30), logits, following, sizes)
    one = torch.where(torch.arange(20)[:, None] == 7, -logits, logits)
    worst = forced.against(one, logits, following, sizes)
    assert worst["kl_worst_step"] == 7 and worst["kl_worst"] == pytest.approx(20 * worst["kl"])
    assert other["kl"] > 0.1 and other["same_top"] < 0.5


# --- Needles -------------------------------------------------------------------------------------


def pieces(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def told(ids: torch.Tensor) -> str:
    return bytes(ids.tolist()).decode("utf-8", "replace")


BEGIN = torch.empty(0, dtype=torch.int64)


def test_facts_lie_where_they_are_said_to_lie_and_none_is_in_the_window():
    found = needles.among_text(pieces, BEGIN, 20_000, 30, "documentation")
    assert len(found.ids) == 20_000 and len(found.facts) == len(found.places) == 30
    for fact, place in zip(found.facts, found.places, strict=True):
        assert told(found.ids[place : place + 200]).startswith(f"\n\n{fact.told}\n\n")
        assert told(found.ids).count(fact.question) == 1
        assert fact.told.startswith(fact.question + fact.answer)
    assert found.places[-1] < 20_000 - 600
    gaps = np.diff([0, *found.places])
    assert gaps.max() < 20_000 / 30 + 3000  # as long as a paragraph may be
    kinds = [fact.kind for fact in found.facts]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == dict(words=10, numbers=10, keys=10)


def test_haystacks_are_always_the_same():
    one, two = (needles.one_dictionary(pieces, BEGIN, 8000, "documentation") for _ in range(2))
    assert torch.equal(one.ids, two.ids) and one.facts == two.facts
    assert len(one.ids) == 8000 and len(one.facts) > 250
    fact, place = one.facts[100], one.places[100]
    assert told(one.ids[place:]).startswith(fact.told)
    assert len({fact.question for fact in one.facts}) == len(one.facts)


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="900 tokens are too few for 30 facts"):
        needles.among_text(pieces, BEGIN, 900, 30, "documentation")


@pytest.mark.parametrize("task", ruler.TASKS)
def test_answers_of_a_task_follow_from_its_text(task):
    found = ruler.haystack(task, pieces, BEGIN, 24_000, "documentation")
    again = ruler.haystack(task, pieces, BEGIN, 24_000, "documentation")
    text = told(found.ids)
    assert torch.equal(found.ids, again.ids) and len(found.ids) == 24_000
    assert len(found.facts) == 24 and found.places[-1] < 24_000 - 300  # before the window
    solved = {
        "variables": chain_of,
        "several": numbers_of,
        "frequent": most_frequent_of,
        "walks": nodes_of,
        "records": record_of,
    }[task]
    for fact in found.facts:
        assert fact.answer == " " + solved(text, fact.question)


def chain_of(text: str, question: str) -> str:
    value = re.search(r"value (\d+)", question)[1]
    names = re.findall(rf"VAR (\w+) = {value}\n", text)
    for name, source in re.findall(r"VAR (\w+) = VAR (\w+)", text):
        if source in names:
            names.append(name)
    return " ".join(names)


def numbers_of(text: str, question: str) -> str:
    place = re.search(r"numbers of (.+), in", question)[1]
    return ", ".join(re.findall(rf"lucky number of {place} is (\d+)\.", text))


def most_frequent_of(text: str, question: str) -> str:
    place = re.search(r"list of (.+) is", question)[1]
    words = re.search(rf"The list of {place}: (.+)\.", text)[1].split()
    return max(words, key=words.count)


def nodes_of(text: str, question: str) -> str:
    edges = re.findall(r"EDGE (\w+) -> (\w+)\n", text)
    at = re.findall(r"from (\w+),", question)
    for _ in range(2):
        at = [b for a, b in edges if a in at]
    return " ".join(sorted(at))


def record_of(text: str, question: str) -> str:
    place = re.search(r"record of (.+) as JSON", question)[1]
    told = {
        "symbol": rf"symbol of {place} is the (\w+)\.",
        "river": rf"river of {place} is called (\w+)\.",
        "founded": rf"{place} was founded in (\d+)\.",
        "buses": rf"There are (\d+) buses in {place}\.",
    }
    found = {field: re.search(pattern, text)[1] for field, pattern in told.items()}
    return json.dumps({f: int(x) if x.isdigit() else x for f, x in found.items()})


def test_haystacks_are_made_by_their_part():
    pretrained = SimpleNamespace(pieces=pieces, ids=pieces)
    for part in ruler.PARTS:
        found = ruler.of_part(part, pretrained, 24_000, 9)
        assert len(found.ids) == 24_000
        assert part in ("facts", "dictionary") or {f.kind for f in found.facts} == {part}


def test_what_was_found_is_counted_by_kind():
    facts = [needles.Fact(kind, "", "", "") for kind in ("words", "words", "keys")]
    results = [{"found": f, "log_probability": -f} for f in (1.0, 0.0, 1.0)]
    found = needles.summary(facts, results)
    assert found["words"] == {"asked": 2, "found": 1, "log_probability": -0.5, "worst": -1.0}
    assert found["all"]["found"] == 2 and found["keys"]["asked"] == 1


def test_the_command_keeps_what_was_measured_before(results, monkeypatch):
    loaded = {name: SimpleNamespace(weights=MODELS[name]) for name in MODELS}
    monkeypatch.setattr(prefix, "load", lambda weights: loaded[weights.name])
    monkeypatch.setattr(forced, "text_of", lambda *_: (None, None))
    monkeypatch.setattr(ruler, "of_part", lambda *_: None)
    for module in (forced, needles):
        monkeypatch.setattr(module, "measured", lambda *given: dict.fromkeys(given[-2], 1.0))
    for model, part, method in (
        ("smollm2", "text", "block 64"),
        ("smollm2", "text", "best 100"),
        ("smollm2", "facts", "block 64"),
        ("qwen-0.5b", "dictionary", "published"),
    ):
        program.main(["inside", "--model", model, "--parts", part, "--only", method])
    program.main(["inside", "--model", "gemma-270m", "--parts", "int8"])
    found = json.loads((results / "quality-inside-cpu.json").read_text())["results"]
    first, second, third = (
        found[f"{name}, documentation, 7168"] for name in ("smollm2", "qwen-0.5b", "gemma-270m")
    )
    assert list(first["text"]) == ["full attention", "block 64", "best 100"]
    assert list(first["facts"]) == ["block 64"]
    assert list(second["dictionary"]) == ["published"] and "text" not in second
    assert list(third["text"]) == ["full attention", *forced.INT8]
    assert list(third["facts"]) == list(forced.INT8)


def test_the_command_keeps_errors_that_were_predicted_before(results, monkeypatch, capsys):
    ways = {"100 rows": {"predicted": 0.02, "true": 0.01, "ratio": 2.0}}
    monkeypatch.setattr(prefix, "load", lambda weights: SimpleNamespace(weights=weights))
    monkeypatch.setattr(predicted, "inside", lambda *_: ways)
    monkeypatch.setattr(predicted, "on_structured_keys", lambda *_: {"lines": ways})
    for of in ("structured", "gemma-270m"):
        program.main(["predicted", "--of", of])
    found = json.loads((results / "quality-predicted-cpu.json").read_text())["results"]
    assert found["structured"] == {"lines": ways} and found["gemma-270m"]["ways"] == ways
    assert "| Gemma-3-270M, 7,168 | **2.00** (.0200 / .0100) |" in capsys.readouterr().out
