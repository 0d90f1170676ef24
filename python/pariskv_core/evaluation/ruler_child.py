"""RULER's own generators, run as they are: a process that is told what to make, a line each.

They are scripts that need a tokenizer, sentences by nltk's data, and a few packages for other
things. These modules are made here instead, so that neither data nor packages are fetched.

In: one line of JSON with the tokenizer's place, the package's folder and the seconds that a
generator may count no tokens; then a job a line.
Out: {"sample": 1} after each sample, {"made": ...} or {"failed": ...} after each job.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pariskv_core.evaluation.prompts import load_tokenizer

# A generator tries again for ever where a sample cannot be made. So many tries of one sample are
# the end of it, and so are some seconds of work without counting tokens: a timer ends the process.
# It stands still while others have the processor, or while the run is stopped.
_TRIES = 300
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])")


class _Tokens:
    """What the generators count tokens with. `extra` are a template's, in every text."""

    def __init__(self, tokenizer: Any, patience: int) -> None:
        self._tokenizer = tokenizer
        self.patience = patience
        self.extra = 0
        self.left: int | None = None  # tries of the sample that is being made

    def begin(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self.patience)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def text_to_tokens(self, text: str) -> range:
        self.begin()
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGPROF)
        found = self._tokenizer(text, add_special_tokens=False).input_ids
        return range(len(found) + self.extra)


def zeta(s: float, first: int = 64) -> float:
    """Riemann's, for s > 1: a sum, and Euler and Maclaurin's rest of it."""
    total = math.fsum(math.pow(k, -s) for k in range(1, first))
    last = math.pow(first, -s)
    rest = first * last / (s - 1) + last / 2 + s * last / first / 12
    rest -= s * (s + 1) * (s + 2) * last / first**3 / 720
    rest += s * (s + 1) * (s + 2) * (s + 3) * (s + 4) * last / first**5 / 30240
    return total + rest


def sentences(text: str) -> list[str]:
    """Always by this rule, whatever data nltk may have here: samples are the same everywhere."""
    return _SENTENCE_END.split(text)


def _module(name: str, **names: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module


def _stand_in(tokens: _Tokens, told: Callable[[dict[str, Any]], None]) -> None:
    def tqdm(each: Iterable[Any]) -> Iterator[Any]:
        for item in each:
            tokens.left = _TRIES
            yield item
            told({"sample": 1})
        tokens.left = None  # a script may look for a length once more

    def select_tokenizer(kind: str, path: str) -> _Tokens:
        return tokens

    _module("tqdm", tqdm=tqdm)
    _module("nltk")
    _module("nltk.tokenize", sent_tokenize=sentences)
    _module("scipy")
    _module("scipy.special", zeta=zeta)
    for name in ("tokenizer", "long_context_eval.data.tokenizer"):
        _module(name, select_tokenizer=select_tokenizer)


def _parts(text: str, prefix: str) -> tuple[str, str]:
    """The question, and how its answer begins; `prefix` is RULER's, with places in braces."""
    at = text.rindex(prefix.partition("{")[0])
    return text[:at], text[at:]


def _make(job: dict[str, Any], package: Path, tokens: _Tokens) -> dict[str, Any]:
    import yaml

    tasks = yaml.safe_load((package / "synthetic.yaml").read_text(encoding="utf-8"))
    config = tasks[job["task"]]
    folder = package / "data" / "synthetic"
    known = runpy.run_path(str(folder / "constants.py"))["TASKS"][config["task"]]
    most = known["tokens_to_generate"]
    tokens.extra = job["extra"]
    # The first does not count the answer, the second counts its example before it is varied.
    tokens.extra += {"freq_words_extraction": most, "variable_tracking": 24}.get(config["task"], 0)
    out = Path(job["folder"])
    options = {
        "save_dir": out,
        "save_name": "samples",
        "tokenizer_path": "-",
        "max_seq_length": job["length"],
        "tokens_to_generate": most,
        "num_samples": job["count"],
        "random_seed": job["seed"],
        "template": known["template"] + known["answer_prefix"],
        **config["args"],
    }
    script = str(folder / f"{config['task']}.py")
    sys.argv = [script, *(text for name, at in options.items() for text in (f"--{name}", str(at)))]
    tokens.begin()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        tokens.end()
    samples = []
    with (out / "samples" / "validation.jsonl").open(encoding="utf-8") as file:
        for line in file:
            made = json.loads(line)
            question, begin = _parts(made["input"], known["answer_prefix"])
            samples.append({"question": question, "begin": begin, "outputs": made["outputs"]})
    (out / "made.json").write_text(json.dumps(samples), encoding="utf-8")
    return {"made": str(out / "made.json"), "answer_tokens": most}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the generators would take it for a bad sample
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # what they print

    def told(what: dict[str, Any]) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        given = json.loads(sys.stdin.readline())
        package = Path(given["package"])
        tokens = _Tokens(load_tokenizer(Path(given["tokenizer"])), given["patience"])
        sys.path.insert(0, str(package.parent))
        sys.path.append(str(package / "data" / "synthetic"))
        _stand_in(tokens, told)
    except Exception as reason:
        told({"failed": f"{type(reason).__name__}: {reason}"})
        return
    for line in sys.stdin:
        try:
            told(_make(json.loads(line), package, tokens))
        except Exception as reason:
            told({"failed": f"{type(reason).__name__}: {reason}"})


if __name__ == "__main__":
    main()
