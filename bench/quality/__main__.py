"""The quality lab, from bench/: python -m quality synthetic | structured | models | ..."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from pariskv_core.cli import weights
from pariskv_core.cli.failures import CannotRunError
from rich.progress import Progress

from quality import predicted, served, sources, structured, tables
from quality.experiments import EXPERIMENTS, Size, Track
from quality.pretrained import (
    asked,
    capture,
    claims,
    forced,
    lengths,
    needles,
    policies,
    prefix,
    ruler,
    shares,
    texts,
    while_writing,
    written,
)
from quality.sources import Sources

# Measurements on captured keys: each is of one model and answers with its part of a results file.
OF_KEYS: dict[str, Callable[[weights.Weights, Track], dict[str, Any]]] = {
    "written": while_writing.while_writing,
    "lengths": lengths.lengths,
    "policies": policies.policies,
    "claims": claims.claims,
}
TEXT_PARTS = {
    "text": forced.SEARCHES,
    "error": forced.ERRORS,
    "int8": forced.INT8,
    "policies": forced.POLICIES,
}
PARTS = (*TEXT_PARTS, "written", *ruler.PARTS)  # of what is inside


def tracked(measure: Callable[[Track], Any]) -> Any:
    with Progress() as progress:
        return measure(lambda of, what: progress.track(of, description=what))


def say(line: str) -> None:
    print(line, flush=True)


def save(name: str, results: dict[str, Any], begin: float) -> None:
    command = " ".join(["cd bench && python -m quality", *sys.argv[1:]])
    known = {"command": command, "seconds": round(time.perf_counter() - begin, 1)}
    harness.save(name, results, on="cpu", facts=known)


def show(names: Iterable[str], given: Sources) -> None:
    for name in names:
        say(f"{name}\n\n{tables.ALL[name](given)}")


def synthetic(arguments: argparse.Namespace) -> None:
    size, begin = Size(seeds=arguments.seeds), time.perf_counter()
    names = arguments.only or list(EXPERIMENTS)
    found = {name: tracked(lambda track, of=name: EXPERIMENTS[of](size, track)) for name in names}
    if not arguments.only:
        save("quality", {"size": vars(size), **found}, begin)
    shown = ("drift" if name in tables.DRIFTS else name for name in found)
    full = {"workloads": "every_workload"}
    show(dict.fromkeys(full.get(name, name) for name in shown), Sources(synthetic=found))


def on_structured_keys(arguments: argparse.Namespace) -> None:
    begin = time.perf_counter()
    found = tracked(lambda track: structured.structured(Size(seeds=arguments.seeds), track))
    save("quality-structured", found, begin)
    show(["every_structure"], Sources(structured=found))


def predicted_errors(arguments: argparse.Namespace) -> None:
    begin = time.perf_counter()
    for name in arguments.of:
        if name == "structured":
            size = Size(seeds=arguments.seeds)
            found = tracked(lambda track, of=size: predicted.on_structured_keys(of, track))
        else:
            say(f"{name}: errors after {arguments.tokens:,} tokens of documentation ...")
            pretrained = prefix.load(weights.MODELS[name])
            ways = predicted.inside(pretrained, "documentation", arguments.tokens, say)
            facts = {"model": pretrained.weights.model, "tokens": arguments.tokens}
            found = {**facts, "steps": predicted.STEPS, "ways": ways}
        # Read now: another run may have added its own since.
        results = {**sources.results_of("predicted"), name: found}
        save("quality-predicted", results, begin)
    show(["predicted_errors"], Sources(predicted=sources.results_of("predicted")))


def models(arguments: argparse.Namespace) -> None:
    begin = time.perf_counter()
    results = sources.results_of("pretrained")
    for name in arguments.model:
        pretrained = weights.MODELS[name]
        tokens = arguments.tokens or pretrained.tokens
        say(f"{name}: keys and queries of {tokens:,} tokens of {arguments.text} ...")
        taken = capture.make(pretrained, arguments.text, tokens, layers=arguments.layers)
        some = {method: shares.METHODS[method] for method in arguments.only or shares.METHODS}
        found = tracked(lambda track, of=taken, by=some: shares.of_capture(of, track, by))
        key = f"{name}, {arguments.text}, {tokens}"
        key += f", {arguments.layers} layers" if arguments.layers else ""
        if arguments.only:  # the others stay as an earlier run has left them
            known = results.get(key, {}).get("methods", {})
            found["methods"] = {**known, **found["methods"]}
        results[key] = found
        show(("pretrained_measures", "every_peer"), Sources(pretrained={key: found}))
    save("quality-models", results, begin)


def keys(arguments: argparse.Namespace) -> None:
    begin = time.perf_counter()
    for name in arguments.model:
        for part in arguments.parts:
            say(f"{name}: {part} ...")
            measure = OF_KEYS[part]
            found = tracked(lambda track, by=measure, of=name: by(weights.MODELS[of], track))
            # Read now: another run may have added its own since.
            results = sources.results_of("keys")
            results.setdefault(part, {})[name] = found
            save("quality-keys", results, begin)


def inside(arguments: argparse.Namespace) -> None:
    begin = time.perf_counter()
    for name in arguments.model:
        tokens = arguments.tokens
        key = f"{name}, {arguments.text}, {tokens}"
        say(f"{name}: text after {tokens:,} tokens of {arguments.text} ...")
        pretrained = prefix.load(weights.MODELS[name])
        facts = {"model": pretrained.weights.model, "tokens": tokens, "steps": forced.STEPS}
        for part, found in measured_inside(pretrained, arguments):
            # Read now: another run may have added its own since.
            results = sources.results_of("inside")
            known = results.setdefault(key, {})
            known |= {**facts, part: known.get(part, {}) | found}
            save("quality-inside", results, begin)


def measured_inside(
    pretrained: prefix.Pretrained, arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parts of a results file, and what was measured there of each method."""
    text, tokens = arguments.text, arguments.tokens
    for part in arguments.parts:
        if part in TEXT_PARTS:
            before, ids = forced.text_of(pretrained, text, tokens)
            # Tables hold everything against full attention.
            names = ["full attention", *(arguments.only or TEXT_PARTS[part])]
            names = list(dict.fromkeys(names))
            yield "text", forced.measured(pretrained, before, ids, names, say)
            if part == "int8":  # and what is found with such rows
                yield "facts", found_needles(pretrained, "facts", arguments, names[1:])
        elif part == "written":
            for name, found in written.measured(
                pretrained, text, arguments.only or written.ASKED, say
            ):
                yield part, {name: found}
        else:
            yield part, found_needles(pretrained, part, arguments, needles.ASKED)


def found_needles(
    pretrained: prefix.Pretrained, part: str, arguments: argparse.Namespace, names: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Of a part's questions, by method: those of `names` if none were asked for."""
    haystack = ruler.of_part(part, pretrained, arguments.tokens, arguments.needles)
    names = arguments.only or list(names)
    return needles.measured(pretrained, haystack, arguments.needles, names, say)


def show_tables(arguments: argparse.Namespace) -> None:
    given = sources.load()
    if arguments.write:
        page = tables.PAGE.read_text(encoding="utf-8")
        tables.PAGE.write_text(tables.filled(page, given), encoding="utf-8")
        served.refill()
    elif arguments.all is not None:
        text = tables.everything(given)
        if arguments.all == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.all).write_text(text, encoding="utf-8")
    else:
        show(tables.TABLES, given)


def ask(arguments: argparse.Namespace) -> None:
    try:
        say(f"Written: {asked.run(arguments)}")
    except NotImplementedError as reason:  # of a model whose attention is another
        raise CannotRunError(str(reason)) from None


def keep_served(arguments: argparse.Namespace) -> None:
    say(str(served.write(arguments.name, arguments.result, arguments.model, arguments.where)))
    served.refill()


_MODES: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
    "synthetic": (synthetic, "synthetic keys, in minutes on two cores"),
    "structured": (on_structured_keys, "errors of outputs on keys with a structure; minutes"),
    "models": (models, "keys of pretrained models, which are fetched; minutes to an hour"),
    "keys": (
        keys,
        "the same keys while tokens are written, in long zones, by other policies; an hour",
    ),
    "inside": (inside, "pretrained models that see chosen rows alone: KL, bits, needles; hours"),
    "predicted": (predicted_errors, "errors that steps predict beside true ones; minutes"),
    "asked": (ask, "RULER's samples answered by a model that sees what peers choose; hours"),
    "served": (keep_served, "a result of pariskv eval or of servers, into RULER.md"),
    "tables": (show_tables, "tables of the results, as markdown"),
}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m quality", description="How good are the rows that are selected?"
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    of = {
        name: modes.add_parser(name, help=what, description=what)
        for name, (_, what) in _MODES.items()
    }
    of["synthetic"].add_argument("--only", nargs="+", choices=EXPERIMENTS)
    for name in ("synthetic", "structured", "predicted"):
        of[name].add_argument("--seeds", type=int, default=Size().seeds)
    for name in ("models", "keys", "inside"):
        of[name].add_argument("--model", nargs="+", choices=weights.MODELS, default=["smollm2"])
    for name, methods in (("models", shares.METHODS), ("inside", forced.METHODS)):
        of[name].add_argument("--text", choices=texts.TEXTS, default="documentation")
        of[name].add_argument("--only", nargs="+", choices=methods, metavar="METHOD")
    of["predicted"].add_argument(
        "--of", nargs="+", choices=("structured", *weights.MODELS), default=["structured"]
    )
    of["predicted"].add_argument("--tokens", type=int, default=7168, help="that a model has read")
    for name in ("synthetic", "structured", "models", "keys", "inside", "predicted", "asked"):
        of[name].add_argument("--threads", type=int, default=2)
    few = "the first so many of the layers that are captured; all if left out"
    of["models"].add_argument("--layers", type=int, help=few)
    lengths_of = "of the text; each model has its own default"
    of["models"].add_argument("--tokens", type=int, help=lengths_of)
    but_claims = [part for part in OF_KEYS if part != "claims"]
    of["keys"].add_argument("--parts", nargs="+", choices=OF_KEYS, default=but_claims)
    of["inside"].add_argument("--tokens", type=int, default=7168, help="that are read before")
    searches = [part for part in PARTS if part not in ("error", "int8", "policies", "written")]
    of["inside"].add_argument("--parts", nargs="+", choices=PARTS, default=searches)
    of["inside"].add_argument("--needles", type=int, default=102, help="questions of each text")
    asks = of["asked"].add_argument
    asks("model", help="a folder or a GGUF file")
    asks("--prompts", required=True, help="samples of pariskv eval --make-only")
    asks("--out", required=True)
    asks("--methods", nargs="+", choices=asked.METHODS, default=["SnapKV", "Quest"])
    asks("--rows", nargs="+", type=int, default=[100], help="for each kv head")
    asks("--tasks", nargs="+", default=["ruler"])
    asks("--lengths", nargs="+", type=int)
    asks("--samples", type=int)
    asks("--processes", type=int, default=1, help="each with the model")
    asks("--device", choices=("cpu", "cuda"))
    of["served"].add_argument("name", help="of the file under bench/results")
    of["served"].add_argument("result", type=Path, help="a result.json")
    of["served"].add_argument("--model", required=True, help="what the page calls it")
    of["served"].add_argument("--where", required=True, help="machine, versions, commit")
    where = of["tables"].add_mutually_exclusive_group()
    where.add_argument("--write", action="store_true", help="into RESULTS.md and RULER.md")
    more = "every table, of those too that RESULTS.md has no room for, into FILE or to the terminal"
    where.add_argument("--all", nargs="?", const="-", metavar="FILE", help=more)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parsed(words)
    if arguments.mode not in ("served", "tables"):
        torch.set_num_threads(arguments.threads)
    try:
        _MODES[arguments.mode][0](arguments)
    except (weights.Unusable, CannotRunError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
