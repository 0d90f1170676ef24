"""Samples for `pariskv eval`: prompts of a template, and the generators that make the texts."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from conftest import Pariskv
from pariskv_core.cli.failures import CannotRunError
from pariskv_core.evaluation import needles, samples, tasks
from pariskv_core.evaluation.prompts import Template, load_tokenizer
from pariskv_core.evaluation.ruler import Generators
from pariskv_core.evaluation.ruler_child import sentences, zeta
from pariskv_core.evaluation.samples import Wanted

NOT_HERE = f"the packages that make samples are not here: {tasks.INSTALL}"
HAS_RULER = all(map(importlib.util.find_spec, ("long_context_eval", "wonderwords")))
HAS_NEEDLES = importlib.util.find_spec("hard_needle") is not None


@pytest.fixture(scope="module")
def template(model: Path) -> Template:
    return Template.of(load_tokenizer(model), None)


def test_a_chat_template_stands_around_the_question(template: Template, model: Path):
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}:"
    chat = Template.of(tokenizer, None)
    assert (chat.kind, template.kind) == ("chat", "base")
    assert chat.prompt("Why {x}?", "\n Because").text == "<Why {x}?>:Because"
    assert template.prompt("Why?", " Because").text == "Why? Because"
    assert chat.digest != template.digest
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(CannotRunError, match="does not take a question of one turn"):
        Template.of(tokenizer, "chat")
    with pytest.raises(CannotRunError, match="has no chat template"):
        Template.of(load_tokenizer(model), "chat")


def test_sentences_end_where_the_next_one_begins():
    text = 'It rains. "Does it?" Yes: 3.5 mm, e.g. here. (So it is.) 7 of them!'
    parts = ["It rains.", '"Does it?"', "Yes: 3.5 mm, e.g. here.", "(So it is.)", "7 of them!"]
    assert sentences(text) == parts
    assert zeta(2) == pytest.approx(1.6449340668482264, rel=1e-15)


@pytest.mark.skipif(not HAS_RULER, reason=NOT_HERE)
def test_rulers_generators_run_as_they_are(model: Path, tmp_path: Path, pariskv: Pariskv):
    """By a tokenizer of letters, alone in a folder. RULER's own example in `vt` is too long for it,
    and texts with needles take seconds to begin with."""
    folder = tmp_path / "letters"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    options = ["--make-only", "--prompts", tmp_path, "--lengths", 16384, "--samples", 2, "--json"]
    done = pariskv("eval", folder, "--tasks", "cwe", "fwe", "qa_1", *options)
    assert done.code == 0, done.err
    made = {each["task"]: samples.opened(Path(each["path"])) for each in done.record["files"]}
    assert list(made) == ["cwe", "fwe", "qa_1"]
    begins = {"cwe": "in the list are:", "fwe": "words are:", "qa_1": "Answer:"}
    for task, file in made.items():
        assert 8192 < file.longest <= 16384 and file.maker == "nvidia-long-context-eval 26.3"
        for sample in file.read():
            assert len(sample.ids) + file.answer_tokens <= file.longest
            assert sample.prompt.endswith(begins[task])
            assert tasks.score(task, sample.prompt, sample.outputs) == 1
    again = pariskv("eval", folder, "--tasks", "cwe", *options, "--seed", 43).record["files"][0]
    first, other = next(made["cwe"].read()), next(samples.opened(Path(again["path"])).read())
    assert first.prompt != other.prompt


@pytest.mark.skipif(not HAS_NEEDLES, reason=NOT_HERE)
def test_needles_are_as_long_as_they_may_be(template: Template):
    wanted = Wanted("hard_needle", 4096, 3, 7)
    done: list[int] = []
    made = needles.make(wanted, template, done.append)
    assert len(made.samples) == sum(done) == 3
    for each in made.samples:
        prompt = template.prompt(each["question"], each["begin"])
        assert 3900 < len(prompt.ids) + made.answer_tokens <= 4096
        assert prompt.text.endswith("\nAnswer:") and each["outputs"][0] in prompt.text
    assert needles.make(wanted, template, done.append) == made
    other = Wanted("hard_needle", 4096, 3, 8)
    assert needles.make(other, template, done.append) != made


STAND_IN = """
import argparse, json, pathlib
from tqdm import tqdm
from tokenizer import select_tokenizer
parser = argparse.ArgumentParser()
for name in ("save_dir", "save_name", "tokenizer_path", "template"):
    parser.add_argument(f"--{name}")
for name in ("max_seq_length", "tokens_to_generate", "num_samples", "random_seed"):
    parser.add_argument(f"--{name}", type=int)
args = parser.parse_args()
print("what a generator prints")
tokens = select_tokenizer("", "")
made = []
for i in tqdm(range(args.num_samples)):
    text = args.template.format(context="abc " * 9, query=i)
    length = len(tokens.text_to_tokens(text))
    while args.max_seq_length == 2048:
        try:
            raise ValueError
        except:
            pass
    while args.max_seq_length == 1024:
        tokens.text_to_tokens(text)
    assert args.max_seq_length != 8192, "words run out"
    made.append({"index": i, "input": text, "outputs": [str(i)], "length": length})
folder = pathlib.Path(args.save_dir) / args.save_name
folder.mkdir()
(folder / "validation.jsonl").write_text("".join(json.dumps(m) + "\\n" for m in made))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is laid out as RULER's is, with one generator."""
    package = tmp_path / "stand_in" / "long_context_eval"
    (package / "data" / "synthetic").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "synthetic.yaml").write_text("vt:\n  task: one\n  args: {}\n")
    known = "'template': '{context}{query}?', 'answer_prefix': ' A {query}'"
    known = f"TASKS = {{'one': {{'tokens_to_generate': 9, {known}}}}}\n"
    (package / "data/synthetic/constants.py").write_text(known)
    (package / "data/synthetic/one.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(package.parent)


@pytest.mark.usefixtures("stand_in")
def test_a_generator_runs_in_a_child_that_can_be_told_more(model: Path, capfd):
    with Generators(model, 3, patience=2) as generators:
        for count in (2, 3):
            done: list[int] = []
            made = generators.make(Wanted("vt", 4096, count, 1), done.append)
            assert (len(made.samples), sum(done), made.answer_tokens) == (count, count, 9)
            assert made.samples[1] == {
                "question": "abc " * 9 + "1?",
                "begin": " A 1",
                "outputs": ["1"],
            }
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("length", "why"),
    [(8192, "AssertionError: words run out"), (2048, "no text that is so"), (1024, "no text that")],
    ids=["an error", "no token is counted", "tokens are counted for ever"],
)
def test_a_generator_that_cannot_is_ended_with_a_sentence(model: Path, length: int, why: str):
    with Generators(model, 3, patience=2) as generators:
        with pytest.raises(CannotRunError, match=why) as raised:
            generators.make(Wanted("vt", length, 1, 1), lambda done: None)
        assert f"vt cannot be made at {length:,} tokens" in str(raised.value)
