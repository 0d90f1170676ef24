"""Who answers, a model here or a server, and the run over all samples that are not answered."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

from pariskv_core.cli import evaluate_settings
from pariskv_core.cli.evaluate_prompts import Prompts, check_server
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import count
from pariskv_core.evaluation import tasks
from pariskv_core.evaluation.answers import Answer, Journal
from pariskv_core.evaluation.samples import Sample, Samples

_DEFAULT = ("full", "default")


class Job(NamedTuple):
    setting: str
    file: Samples
    sample: Sample


class Answerer(Protocol):
    @property
    def settings(self) -> list[str]: ...

    def answers(self, jobs: Iterator[Job]) -> Iterator[Answer]: ...

    def details(self) -> dict[str, Any]: ...


class Here:
    """A model of transformers, with the engine or without."""

    BY: ClassVar[str] = "transformers"

    def __init__(self, arguments: argparse.Namespace, prompts: Prompts) -> None:
        from pariskv_core.cli import models

        names = arguments.settings or _DEFAULT
        self._settings = {name: evaluate_settings.parse(name) for name in names}
        self._loaded = models.load(arguments)
        self._own = str(self._loaded.model.config._attn_implementation)
        self._threads = arguments.threads

    @property
    def settings(self) -> list[str]:
        return list(self._settings)

    def answers(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        from pariskv_core.cli.evaluate_model import answer

        for job in jobs:
            said = answer(
                self._loaded,
                self._settings[job.setting],
                job.sample.ids,
                job.file.answer_tokens,
                self._threads,
                self._own,
            )
            yield answer_of(
                job,
                said.text,
                said.tokens,
                said.seconds,
                searched=said.searched,
                mean_error=said.mean_error,
                worst_error=said.worst_error,
            )

    def details(self) -> dict[str, Any]:
        dtype = str(self._loaded.model.dtype).removeprefix("torch.")
        return {"device": self._loaded.device, "dtype": dtype, "threads": self._threads}


class AtServer:
    """A server: one setting, whatever it is."""

    BY: ClassVar[str] = "server"

    def __init__(self, arguments: argparse.Namespace, prompts: Prompts) -> None:
        self._server = check_server(arguments, [each.longest for each in prompts.files])
        self._name = str(arguments.name)
        self._requests = int(arguments.requests)

    @property
    def settings(self) -> list[str]:
        return [self._name]

    def answers(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        from pariskv_core.evaluation.server import Completion, at_once

        def ask(job: Job) -> Completion:
            found: Completion = self._server.complete(job.sample.ids, job.file.answer_tokens)
            return found

        for job, found in at_once(jobs, self._requests, ask):
            error = found.error or {}
            yield answer_of(
                job,
                found.text,
                found.tokens,
                found.seconds,
                searched=True if error else None,
                mean_error=error.get("mean_error"),
                worst_error=error.get("worst_error"),
            )

    def details(self) -> dict[str, Any]:
        server = self._server
        return {
            "server": server.url,
            "served_model": server.model,
            "served_tokens": server.context,
            "requests": self._requests,
        }


def answer_of(job: Job, text: str, tokens: int, seconds: float, **more: Any) -> Answer:
    """more: searched, mean_error, worst_error."""
    file, sample = job.file, job.sample
    return Answer(
        job.setting,
        file.task,
        file.length,
        sample.index,
        file.digests[sample.index],
        text,
        sample.outputs,
        tasks.score(file.task, text, sample.outputs),
        tokens,
        seconds,
        **more,
    )


def run(answerer: Answerer, prompts: Prompts, journal: Journal, screen: Screen) -> dict[str, Any]:
    """Answers what is not in the journal, and keeps each answer as it comes."""
    settings = answerer.settings
    total = len(settings) * sum(each.count for each in prompts.files)
    had = total - sum(len(_left(file, settings, journal)) for file in prompts.files)
    there = f", {had:,} of them there from before" if had else ""
    screen.say(f"{prompts.name}: {count(total, 'answer')}{there}; {', '.join(settings)}")
    screen.say(f"Kept as they come in {journal.folder}: the same command goes on there\n")
    for length in sorted({each.length for each in prompts.files}):
        with screen.stages() as stages:
            for file in (each for each in prompts.files if each.length == length):
                left = _left(file, settings, journal)
                whole = len(settings) * file.count
                with stages.stage(f"{file.task}, {length:,}", whole) as advance:
                    advance(whole - len(left))
                    for answer in answerer.answers(_jobs(file, settings, left)):
                        journal.add(answer)
                        advance(1)
    screen.say()
    return answerer.details()


def _left(file: Samples, settings: list[str], journal: Journal) -> set[tuple[int, str]]:
    """Samples and settings that are not answered yet."""
    return {
        (index, setting)
        for index, digest in enumerate(file.digests)
        for setting in settings
        if not journal.has(setting, file.task, file.length, index, digest)
    }


def _jobs(file: Samples, settings: list[str], left: set[tuple[int, str]]) -> Iterator[Job]:
    """All settings of one sample after another: what a stopped run has can be compared."""
    samples = {index for index, _ in left}
    for sample in file.read(samples.__contains__):
        for setting in settings:
            if (sample.index, setting) in left:
                yield Job(setting, file, sample)


def in_order(journal: Journal) -> list[Answer]:
    place = {task: i for i, task in enumerate(tasks.ALL)}
    names = list(dict.fromkeys(each.setting for each in journal.answers.values()))
    return sorted(
        journal.answers.values(),
        key=lambda each: (each.length, place[each.task], each.index, names.index(each.setting)),
    )
