"""What RULER.md shows of a result: rows by setting and by task, and samples that are lost."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from pariskv_core.evaluation.answers import Answer
from pariskv_core.evaluation.record import Result
from quality import __main__ as program
from quality import served

TASKS = ("vt", "qa_1", "qa_2")


def answer(setting: str, task: str, index: int, score: float, **more: Any) -> Answer:
    return Answer(
        setting, task, 4096, index, f"{task}{index}", "said", ["x"], score, 3, 0.1, **more
    )


@pytest.fixture
def result() -> dict[str, Any]:
    answers = []
    for task in ("vt", "qa_1"):
        answers += [answer("full", task, index, 1.0 if index < 3 else 0.5) for index in range(4)]
        for index, score in enumerate((1.0, 0.0, 1.0, 0.25)):
            errors = {"mean_error": 0.01 * (1 + index), "worst_error": 0.1 * (1 + index)}
            answers.append(answer("default", task, index, score, **errors))
    run = {"samples": 4, "seed": 42, "template": "chat"}
    made: dict[str, Any] = json.loads(json.dumps(Result(run, answers).record()))
    return made


def test_lost_samples_are_those_that_full_attention_has_right(result):
    found = served.kept(result, "a model", "a machine")
    # Number 3 is worth less as well, and full attention does not have it right.
    assert [(each["task"], each["index"]) for each in found["lost"]] == [("qa_1", 1), ("vt", 1)]
    # Of four errors one is smaller, and one is its own.
    assert {each["rank"] for each in found["lost"]} == {(1 + 0.5) / 4}
    assert found["settings"] == ["full", "default"] and "answers" not in found


def test_tables_have_each_setting_each_task_and_each_loss(result):
    runs = [served.kept(result, "a model", "a machine")]
    rows = served.every_setting(runs).splitlines()
    assert rows[2] == "| a model | 4,096 | full | 87.5 | – | – | – | – | – | – |"
    cells = rows[3].strip("| ").split(" | ")
    assert cells[-8:-2] == ["default", "56.2", "-31.2 ± 30.4", "4 / 0", "2 of 6", "100 %"]
    assert cells[-2] == ".0250, 0.4" and cells[-1].startswith(("vt -31.2", "qa_1 -31.2"))
    rows = served.every_task(runs).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| `vt`", "| `qa_1`"]
    assert rows[2].split(" | ")[1].startswith("87.5 / -31.2 ±")
    loss = served.every_loss(runs).splitlines()[2]
    assert loss == "| a model | 4,096 | `qa_1` 1 | .0200, 0.2: larger than 38 % |"
    assert served.measured_on(runs) == "- a model: a machine\n"


def test_settings_that_were_asked_fewer_tasks_say_so():
    answers = [answer(setting, task, 0, 1.0) for setting in ("full", "default") for task in TASKS]
    answers += [answer("again", task, 0, 1.0) for task in TASKS[:2]]
    longer = [dataclasses.replace(each, length=8192) for each in answers if each.task != "vt"]
    answers += [each for each in longer if each.setting != "again"]
    run = {"samples": 1, "seed": 42, "template": "chat"}
    made = json.loads(json.dumps(Result(run, answers).record()))
    runs = [served.kept(made, "a model", "a machine")]
    rows = [row.strip("| ").split(" | ") for row in served.every_setting(runs).splitlines()[2:]]
    said = [row[-8] for row in rows]
    assert said == ["full", "default", "again, 2 tasks", "full, 2 tasks", "default, 2 tasks"]
    of_vt = next(row for row in served.every_task(runs).splitlines() if row.startswith("| `vt`"))
    assert of_vt.endswith("| – |")


def test_a_result_goes_into_the_page(result, monkeypatch, tmp_path):
    source, page = tmp_path / "result.json", tmp_path / "RULER.md"
    source.write_text(json.dumps(result))
    page.write_text("before\n<!-- table: measured_on -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(served, "PAGE", page)
    monkeypatch.setattr(served, "RESULTS", tmp_path)
    words = ["served", "tiny", str(source), "--model", "a model", "--where", "a machine"]
    program.main(words)
    assert served.load()[0]["model"] == "a model"
    assert page.read_text() == (
        "before\n<!-- table: measured_on -->\n- a model: a machine\n<!-- end -->\nafter\n"
    )


def test_the_page_has_a_place_for_every_table():
    page = served.PAGE.read_text()
    for name in served.TABLES:
        assert page.count(f"<!-- table: {name} -->") == 1
    assert page.count("<!-- table: ") == page.count("<!-- end -->") == len(served.TABLES)
    assert len(page.splitlines()) <= 400
