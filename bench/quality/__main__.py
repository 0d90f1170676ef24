"""The quality lab, from bench/: python -m quality cpu | gpu | models | keys | inside | tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from pariskv_core.cli import weights
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from quality import ablations, experiments, kept, lists, report, sizes, sources, tables
from quality.pretrained import (
    capture,
    claims,
    forced,
    needles,
    policies,
    prefilter,
    prefix,
    ruler,
    shares,
    stretches,
    texts,
    written,
)
from quality.sizes import Size

EXPERIMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "ingredients": experiments.ingredients,
    "slow_drift": partial(experiments.drift, kind="slow"),
    "switch": partial(experiments.drift, kind="switch"),
    "switched_on": ablations.switched_on,
    "alpha": ablations.alpha,
    "design_space": ablations.design_space,
    "tiers": ablations.tiers,
    "lengths": ablations.lengths,
    "budgets": experiments.budgets,
    "candidates": experiments.candidates,
}
OF_KEYS = {
    **stretches.PARTS,
    "policies": policies.policies,
    "prefilter": prefilter.prefilter,
    "claims": claims.claims,
}
TEXT_PARTS = {"text": forced.SEARCHES, "policies": forced.POLICIES}
PARTS = (*TEXT_PARTS, "written", *ruler.PARTS)  # of what is inside
_TRAINING_SECONDS, _EVALUATION_SECONDS = 300, 280
_INSTALLED_MEGABYTES = 48  # of installed packages' text; the standard library alone is little


def synthetic(size: Size, names: Sequence[str]) -> dict[str, Any]:
    """Every experiment that needs no model."""
    results: dict[str, Any] = {"workload": experiments.workload_facts(size)}
    with Progress() as progress:
        whole = progress.add_task("quality", total=len(names))
        for name in names:

            def track(items: Sequence[Any], what: str) -> Iterable[Any]:
                return progress.track(items, description=what)

            begin = time.perf_counter()
            results[name] = EXPERIMENTS[name](size, track)
            progress.console.print(f"{name}: {time.perf_counter() - begin:.0f} s")
            progress.advance(whole)
    return results


def program(name: str, what: str, seconds: float, *arguments: str) -> None:
    """Runs quality.<name> in a process of its own, its lines above a bar that fills with time."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    command = [sys.executable, "-u", "-m", f"quality.{name}", *arguments]
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=seconds)
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                progress.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
                progress.update(task, completed=time.perf_counter() - begin)
        progress.update(task, completed=seconds)
    if running.returncode != 0:
        sys.exit(f"quality.{name} ended with {running.returncode}")


def language_model(weights: Path | None) -> dict[str, Any]:
    """Trains the model if there are no weights yet, and puts everybody inside it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lm.json"
        at = weights or Path(folder) / "model.pt"
        if not at.exists():
            takes, text = f"{_TRAINING_SECONDS}", f"{_INSTALLED_MEGABYTES}"
            length = ("--seconds", takes, "--installed", text)
            program("train", "training", _TRAINING_SECONDS + 60, "--out", str(at), *length)
        takes = f"{_EVALUATION_SECONDS}"
        within = ("--weights", str(at), "--out", str(out), "--seconds", takes)
        program("lm", "inside the model", _EVALUATION_SECONDS, *within)
        found: dict[str, Any] = {"model": kept.of_model(json.loads(out.read_text()))}
        trained = at.with_suffix(".json")
        if trained.exists():
            found["training"] = kept.of_training(json.loads(trained.read_text()))
    return found


def cpu(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    size = dataclasses.replace(sizes.CPU, seeds=arguments.seeds or sizes.CPU.seeds)
    begin = time.perf_counter()
    results = synthetic(size, arguments.only or list(EXPERIMENTS))
    report.show(results)
    if not arguments.only:
        found = kept.of_synthetic({"size": vars(size), **results})
        save(found, "cpu", time.perf_counter() - begin)


def gpu(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        sys.exit("This needs a GPU; `python -m quality cpu` does not.")
    size = dataclasses.replace(sizes.GPU, seeds=arguments.seeds or sizes.GPU.seeds)
    names = arguments.only or ["model", *EXPERIMENTS]
    begin = time.perf_counter()
    # What is not asked for stays as an earlier run has left it.
    results = sources.read(sources.RESULTS / "quality-gpu.json").get("results", {})
    facts = {"gpu": torch.cuda.get_device_name()}
    if "model" in names:
        results.update(language_model(arguments.weights))
        save(results, "gpu", time.perf_counter() - begin, facts)
    some = [name for name in names if name != "model"]
    if some:
        found = synthetic(size, some)
        report.show(found)
        results.update(kept.of_synthetic({"size": vars(size), **found}))
        save(results, "gpu", time.perf_counter() - begin, facts)


def models(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    results = sources.read(sources.RESULTS / "quality-models-cpu.json").get("results", {})
    begin = time.perf_counter()
    for name in arguments.model:
        pretrained = weights.MODELS[name]
        tokens = arguments.tokens or pretrained.tokens
        print(f"{name}: keys and queries of {tokens:,} tokens of {arguments.text} ...", flush=True)
        try:
            taken = capture.make(pretrained, arguments.text, tokens, layers=arguments.layers)
        except weights.Unusable as error:
            sys.exit(str(error))
        some = {method: shares.METHODS[method] for method in arguments.only or shares.METHODS}
        with Progress() as progress:
            found = shares.of_capture(
                taken, lambda of, what: progress.track(of, description=what), some
            )
        report.pretrained(found)
        if arguments.layers:
            found["first_layers"] = taken.manifest.layers
        key = f"{name}, {arguments.text}, {tokens}"
        key += f", {arguments.layers} layers" if arguments.layers else ""
        if arguments.only:  # the others stay as an earlier run has left them
            known = results.get(key, {}).get("methods", {})
            found["methods"] = {**known, **found["methods"]}
        results[key] = found
    save(results, "cpu", time.perf_counter() - begin, name="quality-models")


def keys(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    begin = time.perf_counter()
    for name in arguments.model:
        for part in arguments.parts:
            print(f"{name}: {part} ...", flush=True)
            try:
                with Progress() as progress:
                    found = OF_KEYS[part](
                        weights.MODELS[name],
                        lambda of, what: progress.track(of, description=what),
                    )
            except weights.Unusable as error:
                sys.exit(str(error))
            # Read now: another run may have added its own since.
            results = sources.read(sources.RESULTS / "quality-keys-cpu.json").get("results", {})
            results.setdefault(part, {})[name] = found
            save(results, "cpu", time.perf_counter() - begin, name="quality-keys")


def inside(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    begin = time.perf_counter()

    def keep(key: str, facts: dict[str, Any], part: str, found: dict[str, Any]) -> None:
        # Read again: another run may have added its own since.
        results = sources.read(sources.RESULTS / "quality-inside-cpu.json").get("results", {})
        known = results.setdefault(key, {})
        known |= facts
        known[part] = known.get(part, {}) | found
        save(results, "cpu", time.perf_counter() - begin, name="quality-inside")

    for name in arguments.model:
        tokens = arguments.tokens
        key = f"{name}, {arguments.text}, {tokens}"
        print(f"{name}: text after {tokens:,} tokens of {arguments.text} ...", flush=True)
        try:
            pretrained = prefix.load(weights.MODELS[name])
            facts = {"model": pretrained.weights.model, "tokens": tokens, "steps": forced.STEPS}
            for part in (part for part in arguments.parts if part in TEXT_PARTS):
                taken, ids = forced.text_of(pretrained, arguments.text, tokens)
                names = arguments.only or list(TEXT_PARTS[part])
                keep(key, facts, "text", forced.measured(pretrained, taken, ids, names, say))
            if "written" in arguments.parts:
                names = arguments.only or written.ASKED
                for one, found in written.measured(pretrained, arguments.text, names, say):
                    keep(key, facts, "written", {one: found})
            for part in (part for part in arguments.parts if part in ruler.PARTS):
                count = arguments.needles
                haystack = ruler.of_part(part, pretrained, tokens, count)
                names = arguments.only or list(needles.ASKED)
                found = needles.measured(pretrained, haystack, count, names, say)
                keep(key, facts, part, found)
        except weights.Unusable as error:
            sys.exit(str(error))


def say(line: str) -> None:
    print(line, flush=True)


def save(
    results: dict[str, Any],
    on: str,
    seconds: float,
    facts: dict[str, Any] | None = None,
    name: str = "quality",
) -> None:
    command = " ".join(["cd bench && python -m quality", *sys.argv[1:]])
    known = {"command": command, "seconds": round(seconds, 1), **(facts or {})}
    harness.save(name, results, on=on, facts=known)


def draw(arguments: argparse.Namespace) -> None:
    # Matplotlib is an extra that nothing else needs.
    from quality import plots

    given = sources.load(arguments.synthetic, arguments.lm)
    for name, what in plots.all_of(given, arguments.out or lists.FIGURES).items():
        print(f"{name}: {what}")


def show_tables(arguments: argparse.Namespace) -> None:
    given = sources.load(arguments.synthetic, arguments.lm)
    if arguments.write:
        page = tables.PAGE.read_text(encoding="utf-8")
        tables.PAGE.write_text(tables.filled(page, given), encoding="utf-8")
        return
    for name in tables.TABLES:
        print(f"<!-- table: {name} -->\n{tables.made(name, given)}<!-- end -->\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quality",
        description="How good are the rows that are picked? Synthetic keys, and a language model.",
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, run, what in (
        ("cpu", cpu, "synthetic keys, in minutes on two cores"),
        ("gpu", gpu, "a language model trained here, and larger synthetic keys"),
        ("models", models, "keys of pretrained models, which are fetched; minutes to an hour"),
        ("keys", keys, "the same keys under drift, at other lengths, by other policies; an hour"),
        (
            "inside",
            inside,
            "pretrained models that see chosen rows alone: KL, bits, needles; hours",
        ),
        ("plots", draw, "figures of the results"),
        ("tables", show_tables, "tables of the results, as markdown"),
    ):
        some = modes.add_parser(mode, help=what, description=what)
        some.set_defaults(run=run)
        if mode in ("cpu", "gpu"):
            names = [*EXPERIMENTS, *(["model"] if mode == "gpu" else [])]
            some.add_argument("--only", nargs="+", choices=names)
            some.add_argument("--seeds", type=int)
        elif mode not in ("models", "keys", "inside"):
            some.add_argument("--synthetic", choices=["cpu", "gpu"], help="of which run")
            some.add_argument("--lm", type=Path, help="a file of quality.lm's, not the GPU run's")
    modes.choices["cpu"].add_argument("--threads", type=int, default=2)
    for mode in ("models", "keys", "inside"):
        some = modes.choices[mode]
        some.add_argument("--model", nargs="+", choices=weights.MODELS, default=["smollm2"])
        some.add_argument("--threads", type=int, default=2)
        if mode != "keys":
            some.add_argument("--text", choices=texts.TEXTS, default="documentation")
    few = "the first so many of the layers that are captured; all if left out"
    modes.choices["models"].add_argument("--layers", type=int, help=few)
    parts = modes.choices["keys"]
    but_claims = [part for part in OF_KEYS if part != "claims"]
    parts.add_argument("--parts", nargs="+", choices=OF_KEYS, default=but_claims)
    some = modes.choices["models"]
    some.add_argument("--only", nargs="+", choices=shares.METHODS, metavar="METHOD")
    lengths = "of the text; each model has its own default"
    modes.choices["models"].add_argument("--tokens", type=int, help=lengths)
    within = modes.choices["inside"]
    within.add_argument("--tokens", type=int, default=7168, help="that are read before")
    searches = [part for part in PARTS if part not in ("policies", "written")]
    within.add_argument("--parts", nargs="+", choices=PARTS, default=searches)
    within.add_argument("--only", nargs="+", choices=forced.METHODS, metavar="METHOD")
    within.add_argument("--needles", type=int, default=102, help="questions of each kind of text")
    modes.choices["gpu"].add_argument(
        "--weights", type=Path, help="of the model; made if not there"
    )
    modes.choices["plots"].add_argument("--out", type=Path, help="a folder")
    modes.choices["tables"].add_argument("--write", action="store_true", help="into RESULTS.md")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
