"""RULER's samples answered by a model that sees the rows that another method has chosen.

    python -m quality asked MODEL --prompts SAMPLES --out FOLDER --methods SnapKV Quest --rows 100

The prompt is read with full attention. Each step of the answer attends to the first and the last
tokens, as the engine does, and to `rows` of the others for each kv head. What comes out joins with
a result of `pariskv eval`, whose prompts these are: `pariskv eval --compare`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pariskv_core as pk
import torch
from pariskv_core.cli import evaluate_model, evaluate_prompts, evaluate_run, models
from pariskv_core.cli.evaluate_run import Job
from pariskv_core.cli.screen import Screen
from pariskv_core.evaluation.answers import Answer, Journal
from pariskv_core.evaluation.record import Result
from pariskv_core.evaluation.server import at_once
from torch import Tensor

from quality.methods import Method, Oracle
from quality.peers import ArkVale, PQCache, Quest, SnapKV
from quality.regions import Residency

METHODS: dict[str, Callable[[], Method]] = {
    "SnapKV": SnapKV,
    "Quest": Quest,
    "ArkVale": ArkVale,
    "PQCache": PQCache,
    "best": Oracle,
}
_ATTENTION = "quality_asked"  # its name among those of transformers
_WINDOW = 32  # of a prompt's last queries, for methods that look at them


class _Layer(NamedTuple):
    heads: list[Method]  # of each kv head
    zone: slice


class _Chosen:
    """What one method has chosen for one prompt, layer by layer."""

    def __init__(self, name: str, rows: int) -> None:
        self.make, self.rows = METHODS[name], rows
        self.layers: dict[int, _Layer] = {}

    def read(self, layer: int, query: Tensor, key: Tensor) -> None:
        """The prompt: query (query heads, tokens, dim), key (kv heads, tokens, dim)."""
        zone = Residency().zone(key.shape[1])
        heads = [self.make() for _ in key]
        groups = query.float().unflatten(0, (len(heads), -1))
        for method, keys, group in zip(heads, key.float(), groups, strict=True):
            method.prefill(keys[zone], group[:, -_WINDOW:].transpose(0, 1))
        self.layers[layer] = _Layer(heads, zone)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A step: query (query heads, dim), rows (kv heads, tokens, dim) -> (query heads, dim).

        All heads at once, and nothing of it waits for the device: several processes share one.
        """
        heads, zone = self.layers[layer]
        groups, dim = query.float().unflatten(0, (len(heads), -1)), query.shape[-1]
        tokens = torch.arange(key.shape[1], device=key.device)
        outside = torch.cat([tokens[: zone.start], tokens[zone.stop :]])
        resident = torch.logsumexp(groups @ key[:, outside].float().mT / math.sqrt(dim), -1)
        each = zip(heads, groups[:, None], resident[:, None], strict=True)
        chosen = torch.cat([method.select(own, self.rows, told) for method, own, told in each])
        places = torch.cat([outside.expand(len(heads), -1), chosen.clamp(min=0) + zone.start], 1)
        rows = places[..., None].expand(-1, -1, dim)
        logits = groups @ key.gather(1, rows).float().mT / math.sqrt(dim)
        logits[..., len(outside) :].masked_fill_((chosen < 0)[:, None], -math.inf)
        return (torch.softmax(logits, -1) @ value.gather(1, rows).float()).flatten(0, 1)


_chosen: _Chosen | None = None  # of the answer that is being written, in this process


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, with a batch of one."""
    assert _chosen is not None
    layer, dim = int(module.layer_idx), query.shape[-1]  # type: ignore[arg-type]
    if scaling is not None and not math.isclose(scaling, dim**-0.5):
        raise NotImplementedError(f"logits of this model are scaled by {scaling}")
    if sliding_window or softcap:
        raise NotImplementedError("some layers of this model have a window or a soft cap")
    if query.shape[2] > 1:
        _chosen.read(layer, query[0], key[0])
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2), None
    step = _chosen.attend(layer, query[0, :, 0], key[0], value[0])
    return step.to(query.dtype)[None, None], None


class _Said(NamedTuple):
    text: str
    tokens: int
    seconds: float


class _Model(NamedTuple):
    place: str  # a folder or a GGUF file
    device: str | None
    threads: int


@functools.cache
def _load(model: _Model) -> models.Loaded:
    """In a process that answers: what it refuses, the program says."""
    from transformers import AttentionInterface

    own = {"model": model.place, "device": model.device, "threads": model.threads}
    loaded = models.load(argparse.Namespace(**own))
    AttentionInterface.register(_ATTENTION, _attention)
    return loaded


def _answer(model: _Model, method: str, rows: int, ids: Sequence[int], most: int) -> _Said:
    global _chosen
    loaded = _load(model)
    begin = time.perf_counter()
    _chosen = _Chosen(method, rows)
    prompt = torch.tensor([list(ids)], device=loaded.device)
    tokens = evaluate_model.likeliest(loaded, prompt, most, _ATTENTION)
    text = evaluate_model.text_of(loaded, tokens)
    return _Said(text, len(tokens), time.perf_counter() - begin)


class Asked:
    """Answers by some processes, each with the model."""

    BY = "a method of the lab"

    def __init__(self, arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self._pool, self._processes = pool, int(arguments.processes)
        self._model = _Model(str(arguments.model), arguments.device, arguments.threads)
        self._of = {
            f"{method}={rows}": (method, rows)
            for method in arguments.methods
            for rows in arguments.rows
        }

    @property
    def settings(self) -> list[str]:
        return list(self._of)

    def answers(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        def ask(job: Job) -> _Said:
            method, rows = self._of[job.setting]
            ids, most = list(job.sample.ids), job.file.answer_tokens
            return self._pool.submit(_answer, self._model, method, rows, ids, most).result()

        for job, said in at_once(jobs, self._processes, ask):
            yield evaluate_run.answer_of(job, *said)

    def details(self) -> dict[str, Any]:
        return {"processes": self._processes}


def run(arguments: argparse.Namespace) -> Path:
    """The result of these methods, in --out; a run that was stopped goes on."""
    own = (Path(arguments.prompts), arguments.tasks, arguments.lengths, arguments.samples)
    prompts = evaluate_prompts.in_folder(*own)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, spawn) as pool:
        asked = Asked(arguments, pool)
        identity = {**prompts.identity(), "by": Asked.BY}
        journal = Journal(Path(arguments.out), identity)
        try:
            details = evaluate_run.run(asked, prompts, journal, Screen())
        finally:
            journal.close()
    more = {"version": pk.__version__, "makers": prompts.makers(), **details}
    result = Result({**identity, **more}, evaluate_run.in_order(journal))
    path = Path(arguments.out) / "result.json"
    path.write_text(json.dumps(result.record(), indent=1) + "\n", encoding="utf-8")
    return path
