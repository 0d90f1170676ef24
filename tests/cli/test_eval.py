"""`pariskv eval`: scores, intervals and agreement by hand, runs on a tiny model and a server."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Pariskv, plain
from fake_server import FakeServer
from pariskv_core.cli import evaluate_settings, main
from pariskv_core.cli.evaluate_table import show
from pariskv_core.cli.failures import CannotRunError
from pariskv_core.cli.screen import Screen
from pariskv_core.evaluation import samples, tasks
from pariskv_core.evaluation.answers import Answer, Journal
from pariskv_core.evaluation.prompts import Template, load_tokenizer
from pariskv_core.evaluation.record import AVERAGE, Result
from pariskv_core.evaluation.samples import Made, Wanted
from pariskv_core.evaluation.statistics import interval
from pariskv_core.vllm import settings as vllm_settings

SHORT, LONG = 1024, 5120  # tokens: of a text that is not searched, and of one that is


@pytest.fixture(scope="module")
def template(model: Path) -> Template:
    return Template.of(load_tokenizer(model), None)


def plant(
    root: Path, template: Template, task: str, length: int, count: int = 2, seed: int = 42
) -> Path:
    """Samples as the command keeps them, of texts that no generator made."""
    wanted = Wanted(task, length, count, seed)
    texts = [f"{i} {task} " + "abc " * ((length - 40) // 4) for i in range(count)]
    made = Made([{"question": t, "begin": " So:", "outputs": ["x", "qq"]} for t in texts], 8)
    folder = samples.folder_of(root, "tiny", template)
    return samples.write(samples.place(folder, wanted), wanted, made, template, "by hand").path


@pytest.fixture
def planted(tmp_path: Path, template: Template, model: Path) -> Path:
    """Two tasks at two lengths, named as the model's folder is."""
    root = tmp_path / "prompts"
    for task in ("vt", "qa_1"):
        for length in (SHORT, LONG):
            plant(root, template, task, length)
    found = samples.folder_of(root, "tiny", template)
    found.rename(samples.folder_of(root, model.name, template))
    return root


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


# --- By hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "answer", "expected", "score"),
    [
        ("niah_single_1", " It is 12345.", ["12345"], 1),
        ("niah_multivalue", "1, 2 and 3", ["1", "2", "3", "4"], 0.75),
        ("cwe", "Apple, PEAR", ["apple", "pear", "fig", "plum"], 0.5),
        ("qa_1", "in france", ["Paris", "France"], 1),
        ("qa_2", "no", ["yes"], 0),
        ("hard_needle", " Dr. Michael Parker.", ["Dr. Michael Park"], 0),
        ("hard_needle", "\n$1.4M.\nThe other is $2.1M", ["$1.4M"], 1),
        ("hard_needle", "$1.4M.\nThe other is $2.1M", ["$2.1M"], 0),
    ],
)
def test_an_answer_is_worth_what_it_has(task: str, answer: str, expected: list[str], score: float):
    assert tasks.score(task, answer, expected) == score


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (1, 2, 0.3424, 1), (0, 100, 0, 0.0370), (0.5, 4, 0.1500, 0.8500)],
)
def test_intervals_are_wilsons(mean: float, count: int, low: float, high: float):
    assert interval(mean, count) == pytest.approx((low, high), abs=5e-5)


def said(setting: str, task: str, index: int, score: float, **more: Any) -> Answer:
    prompt = f"{task}{index}"
    return Answer(setting, task, 4096, index, prompt, f"{score}", ["x"], score, 3, 0.1, **more)


def some_result() -> Result:
    full = {("vt", 0): 1.0, ("vt", 1): 0.4, ("qa_1", 0): 1.0, ("qa_1", 1): 0.0}
    ours = {("vt", 0): 0.6, ("vt", 1): 0.4, ("qa_1", 0): 0.0, ("qa_1", 1): 1.0}
    errors = {("vt", 0): (0.1, 0.5), ("vt", 1): (0.3, 0.4), ("qa_1", 0): (0.2, 0.9)}
    answers = [said("full", *key, score) for key, score in full.items()]
    for key, score in ours.items():
        mean, worst = errors.get(key, (None, None))
        answers.append(said("default", *key, score, mean_error=mean, worst_error=worst))
    return Result({"samples": 2}, answers)


def test_agreement_is_counted_sample_by_sample():
    cells = {(cell.task, cell.setting): cell for cell in some_result().cells()}
    vt, together = cells["vt", "default"], cells[AVERAGE, "default"]
    assert (vt.score, vt.count) == (pytest.approx(0.5), 2)
    assert (vt.same, vt.compared, vt.lost, vt.gained) == (1, 2, 1, 0)
    assert vt.agreement == pytest.approx(interval(0.5, 2))
    assert (vt.mean_error, vt.worst_error) == (pytest.approx(0.2), 0.5)
    assert vt.worst is not None and (vt.worst.index, vt.worst.score) == (1, 0.4)
    assert (together.same, together.lost, together.gained, together.equal) == (1, 2, 1, 1)
    assert (together.score, together.worst_error) == (pytest.approx(0.5), 0.9)
    assert vt.beside == pytest.approx(-0.2)
    assert vt.beside_within == pytest.approx((-0.2 - 1.959964 * 0.2, -0.2 + 1.959964 * 0.2))
    assert (vt.right, vt.right_lost) == (1, 1) and (together.right, together.right_lost) == (2, 2)
    # Of two errors of vt the lost sample has the smaller one; qa_1 has one error.
    assert vt.lost_rank == pytest.approx(0.25)
    assert together.lost_rank == pytest.approx((0.25 + 0.5) / 2)
    full = cells["vt", "full"]
    assert full.score == pytest.approx(0.7) and full.same is None and full.agreement is None


def test_the_table_says_what_is_less_than_full_attention(capsys):
    show(Screen(as_json=False), some_result())
    said = capsys.readouterr().out
    assert "-20.0±39.2" in said
    assert "default loses 2 of 2 samples that full attention has right (100.0 %)" in said


def test_losses_are_listed_with_their_errors_the_largest_first():
    losses = some_result().losses()
    assert [(loss.answer.task, loss.answer.index) for loss in losses] == [("qa_1", 0), ("vt", 0)]
    assert losses[0].full.score == 1 and losses[0].answer.worst_error == 0.9
    listed = some_result().record()["lost"]
    assert [each["full_score"] for each in listed] == [1, 1]
    assert [each["mean_error"] for each in listed] == [0.2, 0.1]


def test_settings_are_those_of_the_engine():
    parsed = evaluate_settings.parse("int8,error=.01,block=128")
    assert parsed.cache is not None and parsed.cache["kv_dtype"] == "int8"
    policy = parsed.cache["policy"]
    assert (policy.error, policy.top_k, policy.block) == (0.01, 400, 128)
    published = (evaluate_settings.parse("published").cache or {})["policy"]
    assert (published.scorer, published.group_rule, published.block) == ("votes", "mean_query", 0)
    assert evaluate_settings.parse("full").cache is None


@pytest.mark.parametrize("name", ["default", "int8,error=.01", "published", "tail_rows=2048"])
def test_servers_of_vllm_take_the_same_settings(name: str):
    setting = evaluate_settings.parse(name)
    assert setting.cache is not None
    taken = vllm_settings.parse(setting.served)
    assert taken.of_config()["policy"] == setting.cache["policy"]
    assert taken.kv_dtype == setting.cache.get("kv_dtype", "auto")
    assert taken.report_error == (name != "published")  # that one estimates none


@pytest.mark.parametrize("name", ["fast", "error", "top_k=many", "error=2", "int8,full", ""])
def test_a_setting_that_is_none_is_refused(name: str):
    with pytest.raises(CannotRunError, match="--settings: "):
        evaluate_settings.parse(name)


# --- Runs --------------------------------------------------------------------------------------


def test_a_model_is_asked_under_each_setting(
    pariskv: Pariskv, model: Path, planted: Path, tmp_path: Path
):
    out = tmp_path / "out"
    options = ["--prompts", planted, "--samples", 2, "--threads", 1]
    options += ["--tasks", "vt", "--lengths", SHORT, LONG, "--out", out]
    settings = ["--settings", "full", "error=.1,top_k=16", "published"]
    done = pariskv("eval", model, *options, *settings)
    assert done.code == 0, done.err
    assert plain(done.out)
    assert "12 answers; full, error=.1" in done.out
    assert f"{LONG:,} tokens, 2 samples a task" in done.out
    assert f"Nothing was searched at {SHORT:,} tokens" in done.out
    assert "Score by tokens, vt" in done.out
    found = json.loads((out / "result.json").read_text())
    assert found["run"]["samples"] == 2 and found["baseline"] == "full"
    answers = {(a["setting"], a["task"], a["length"], a["index"]): a for a in found["answers"]}
    assert len(answers) == 12
    for (setting, _, length, _), each in answers.items():
        searched = setting != "full" and length == LONG
        assert each["searched"] is searched and 1 <= each["tokens"] <= 8
        reports = searched and setting != "published"
        assert (each["worst_error"] is not None and each["worst_error"] > 0) is reports
        assert not reports or each["mean_error"] <= each["worst_error"]
    for cell in found["cells"]:
        assert cell["within"][0] <= cell["score"] <= cell["within"][1]
        assert (cell["same"] is None) == (cell["setting"] == "full")
        if cell["length"] == SHORT and cell["setting"] != "full":
            assert cell["same"] == cell["compared"], "nothing was searched"
    assert (out / "score.png").read_bytes().startswith(b"\x89PNG")
    again = pariskv("eval", model, *options, *settings, "--json")
    assert again.record["answers"] == found["answers"], "none was answered again"
    other = pariskv("eval", model, *options, "--seed", 1)
    assert other.code == 2 and other.out == "", "before samples are made"
    assert "has a run with another seed (42, now 1)" in other.err


def test_a_killed_run_goes_on_where_it_was(
    server: FakeServer, planted: Path, tmp_path: Path, pariskv: Pariskv
):
    out = tmp_path / "out"
    words = ["eval", "--server", server.url, "--prompts", planted, "--name", "full", "--out", out]
    words += ["--requests", 1]
    server.hold_after = 3
    child = subprocess.Popen(
        [sys.executable, "-m", "pariskv_core", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert server.held.wait(60)
    journal = out / "answers.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with journal.open("a") as file:
        file.write('{"setting": "full", "task": "v')  # a line that was being written
    server.hold_after, server.seen = None, []
    done = pariskv(*words, "--json")
    assert done.code == 0, done.err
    assert len(server.seen) == 5, "eight, of which three were there"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len({(a["task"], a["length"], a["index"]) for a in lines}) == len(lines) == 8
    assert len(done.record["answers"]) == 8


def test_several_requests_are_under_way_at_once(
    server: FakeServer, planted: Path, tmp_path: Path, pariskv: Pariskv
):
    server.together = 2  # each answer waits for another one
    options = ["--prompts", planted, "--name", "full", "--out", tmp_path / "out"]
    done = pariskv("eval", "--server", server.url, *options, "--requests", 2)
    assert done.code == 0, done.err
    assert len(server.seen) == 8
    asked = server.seen[0]
    assert asked["temperature"] == 0 and asked["model"] == "tiny" and asked["max_tokens"] == 8
    assert all(isinstance(token, int) for token in asked["prompt"])


def test_runs_of_two_servers_are_compared(
    server: FakeServer, planted: Path, tmp_path: Path, pariskv: Pariskv
):
    files = []
    for name, says in (("full", "x qq"), ("default", "x")):
        server.says = says
        out = tmp_path / name
        options = ["--prompts", planted, "--name", name, "--out", out]
        assert pariskv("eval", "--server", server.url, *options).code == 0
        files.append(out / "result.json")
    done = pariskv("eval", "--compare", *files, "--out", tmp_path / "both")
    assert done.code == 0 and plain(done.out), done.err
    assert "4 samples lost" in done.out and "no error reported" in done.out
    found = json.loads((tmp_path / "both/result.json").read_text())
    cells = {(c["task"], c["length"], c["setting"]): c for c in found["cells"]}
    vt, qa = cells["vt", LONG, "default"], cells["qa_1", LONG, "default"]
    assert (vt["score"], vt["same"], vt["lost"]) == (0.5, 0, 2)
    assert (qa["score"], qa["same"], qa["lost"]) == (1, 2, 0)
    assert vt["agreement"] == pytest.approx(list(interval(0, 2)))
    twice = pariskv("eval", "--compare", files[0], files[0])
    assert twice.code == 2 and "run one of them with another --name" in twice.err
    changed = json.loads(files[1].read_text())
    changed["run"]["seed"] = 1
    files[1].write_text(json.dumps(changed))
    other = pariskv("eval", "--compare", *files)
    assert other.code == 2 and "another seed (1) than the file before it (42)" in other.err


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_quoted(
    server: FakeServer, planted: Path, tmp_path: Path, capsys
):
    command = ["eval", "--server", server.url, "--prompts", str(planted), "--name", "full"]
    command += ["--out", str(tmp_path / "out"), "--json"]
    server.refuses = [503, 429]
    assert main(command) == 0
    capsys.readouterr()
    server.refuses = [400] * 99
    shutil.rmtree(tmp_path / "out")
    assert main(command) == 2
    assert "refuses a prompt (400): no such luck" in capsys.readouterr().err


# --- Wrong input -------------------------------------------------------------------------------

WRONG = [
    ("eval", "or --server with --prompts, or --compare"),
    ("eval --tasks vt {model}", "expected a model, before options that take several words"),
    (
        "eval {model} --tasks vtt",
        "--tasks: there is no task vtt; expected all, ruler, niah_",
    ),
    ("eval {model} --lengths 16384", "was made for 8,192 tokens, fewer than 16,384"),
    ("eval {model} --lengths 100", "expected a whole number from 1,024 up, got 100"),
    ("eval {model} --settings fast {made}", "--settings: there is no setting fast; expected full"),
    ("eval {model} --name full", "--name is of a server"),
    ("eval /nowhere", "there is no file or folder /nowhere"),
    ("eval /nowhere --make-only --lengths 4096", "there is no file or folder /nowhere"),
    ("eval {model} --server {url} --settings full", "a server has its own, which --name names"),
    ("eval {model} --server {url}", "expected --name beside it"),
    ("eval --server {url} --name full", "expected a model, whose tokenizer makes the samples"),
    ("eval --server {url} --name full --prompts /nowhere", "there is no folder /nowhere"),
    ("eval --server {url} --name full --prompts {made_folder} --lengths 2K", "has no samples of"),
    ("eval --server localhost --name full {made}", "expected an address like http://"),
    ("eval --server http://127.0.0.1:9 --name full {made}", "no server answers at http://127.0.0"),
    ("eval --server {url}/x --name full {made}", "is not the list of a server with OpenAI's"),
    ("eval --server {url} --served-model big --name full {made}", "serves tiny, not big"),
    ("eval --server {short_url} --name full {made}", "takes 2,048 tokens, fewer than"),
    ("eval --compare /nowhere", "cannot read /nowhere: No such file"),
    ("eval --compare {model}/config.json", "is no result of pariskv eval"),
    ("eval {model} --compare x", "expected results alone"),
    ("eval {model} --requests 0", "expected a whole number from 1 to 256"),
]


@pytest.mark.parametrize(("command", "sentence"), WRONG, ids=[row[0] for row in WRONG])
def test_wrong_input_is_one_sentence(
    command: str,
    sentence: str,
    server: FakeServer,
    model: Path,
    planted: Path,
    tmp_path: Path,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    with FakeServer(context=2048) as short:
        places = {
            "model": model,
            "url": server.url,
            "short_url": short.url,
            "made": f"--prompts {planted} --samples 2 --tasks vt",
            "made_folder": planted,
        }
        try:
            code: object = main(command.format(**places).split())
        except SystemExit as ended:  # argparse's
            code = ended.code
    out, err = capsys.readouterr()
    assert code == 2 and sentence in err, out + err
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    assert not (tmp_path / "pariskv-eval").exists() and server.seen == []


def test_without_the_generators_it_says_how_to_install_them(
    model: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    found = importlib.util.find_spec
    missing = ("long_context_eval", "wonderwords", "hard_needle")

    def hide(name: str, *rest: Any) -> Any:
        return None if name in missing else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    command = ["eval", str(model), "--tasks", "all", "--prompts", str(tmp_path), "--make-only"]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "eval and wonderwords and hard-needle are not installed, and needed to make" in err
    assert f"to install: {tasks.INSTALL}" in err
    pins = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text().split()
    assert {word for word in tasks.INSTALL.split() if "==" in word} <= set(pins)


def test_a_folder_of_another_run_is_left_alone(tmp_path: Path):
    Journal(tmp_path, {"seed": 1}).close()
    with pytest.raises(CannotRunError, match=r"another seed \(1, now 2\); name another --out"):
        Journal(tmp_path, {"seed": 2})
    (tmp_path / "answers.jsonl").write_text("[]\n")
    with pytest.raises(CannotRunError, match="has a line that is no answer"):
        Journal(tmp_path, {"seed": 1})
    readonly = tmp_path / "file"
    readonly.touch()
    with pytest.raises(CannotRunError, match="cannot write"):
        Journal(readonly, {})


def test_samples_that_cannot_be_read_are_named(planted: Path, capsys, server: FakeServer):
    broken = next(planted.rglob("*.gz"))
    broken.write_bytes(broken.read_bytes()[:50])
    assert main(["eval", "--server", server.url, "--name", "a", "--prompts", str(planted)]) == 2
    assert f"{broken} is no file of samples that can be read" in capsys.readouterr().err
