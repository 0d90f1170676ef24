"""The samples that `eval` asks about: found in a folder, or made by the model's tokenizer."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pariskv_core import _shapes as shapes
from pariskv_core.cli.failures import CannotRunError, need
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import count, size
from pariskv_core.evaluation import needles, samples, tasks
from pariskv_core.evaluation.answers import check
from pariskv_core.evaluation.prompts import Template, load_tokenizer
from pariskv_core.evaluation.ruler import Generators
from pariskv_core.evaluation.samples import Samples, Wanted

_SAMPLES, _SEED = 100, 42  # RULER has 500 samples, and this seed
_FIRST = 4096  # of the lengths that are taken by default


def identity(model: str, tokenizer: str, template: str, seed: int, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "tokenizer": tokenizer,
        "template": template,
        "seed": seed,
        "samples": number,
    }


@dataclass(frozen=True)
class Prompts:
    name: str  # of the model
    folder: Path
    files: list[Samples]  # by length, then in the order of the tasks

    def identity(self) -> dict[str, Any]:
        """What has to be the same for answers to be of one run."""
        one = self.files[0]
        return identity(self.name, one.tokenizer, one.template, one.seed, one.count)

    def makers(self) -> list[str]:
        return sorted({each.maker for each in self.files})

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "path": str(each.path),
                "task": each.task,
                "length": each.length,
                "count": each.count,
                "bytes": each.path.stat().st_size,
            }
            for each in self.files
        ]


def out_of(arguments: argparse.Namespace, name: str) -> Path:
    """Where answers go. name: of the model."""
    if arguments.out:
        return Path(arguments.out)
    return Path("pariskv-eval") / (f"{name}-{arguments.name}" if arguments.server else name)


def prepare(arguments: argparse.Namespace, screen: Screen) -> Prompts:
    """Samples of what was asked for. Nothing is made for a folder that has another run."""
    if not arguments.model:  # a folder has what it has
        return _found(arguments, tasks.chosen(arguments.tasks or ["all"]))
    chosen = tasks.chosen(arguments.tasks or ["ruler"])
    place = Path(arguments.model)
    context = _context(arguments, place)
    lengths = _lengths(arguments.lengths, context, arguments.model)
    if arguments.server and not arguments.make_only:
        check_server(arguments, lengths)
    need("transformers", *(["gguf"] if place.is_file() and place.suffix != ".json" else []))
    template = Template.of(load_tokenizer(place), arguments.template)
    name = place.resolve().stem if place.is_file() else place.resolve().name
    root = Path(arguments.prompts) if arguments.prompts else samples.default_folder()
    folder = samples.folder_of(root, name, template)
    number, seed = arguments.samples or _SAMPLES, arguments.seed
    seed = _SEED if seed is None else seed
    if not arguments.make_only:
        run = identity(name, template.digest, template.kind, seed, number)
        check(out_of(arguments, name), run)
    wanted = [Wanted(task, length, number, seed) for length in lengths for task in chosen]
    files = _made(wanted, folder, place, template, screen)
    return Prompts(name, folder, files)


def _context(arguments: argparse.Namespace, place: Path) -> int:
    """Tokens that the model was made for; 0: not known. A tokenizer's folder alone will do where
    nothing runs here."""
    runs_here = not arguments.server and not arguments.make_only
    if not place.exists() or runs_here or place.is_file() or (place / "config.json").exists():
        return shapes.read(arguments.model).context
    return 0


def _lengths(given: Sequence[int] | None, context: int, model: str) -> list[int]:
    if given is None:
        if not context:
            raise CannotRunError(
                f"--lengths: expected lengths, since {model} does not say what it was made for"
            )
        if context < _FIRST:
            raise CannotRunError(
                f"--lengths: expected lengths up to {context:,} tokens, which {model} was made for"
            )
        given = [_FIRST << i for i in range((context // _FIRST).bit_length())]
    longest = max(given)
    if context and longest > context:
        raise CannotRunError(
            f"--lengths: {model} was made for {context:,} tokens, fewer than {longest:,}"
        )
    return sorted(set(given))


def check_server(arguments: argparse.Namespace, lengths: Sequence[int]) -> Any:
    """The server, if it takes prompts of these lengths."""
    from pariskv_core.evaluation.server import Server

    server = Server.at(arguments.server, arguments.served_model, arguments.patience)
    longest = max(lengths)
    if server.context and longest > server.context:
        raise CannotRunError(
            f"--lengths: the server at {server.url} takes {server.context:,} tokens, fewer than "
            f"{longest:,}"
        )
    return server


def in_folder(
    folder: Path,
    names: Sequence[str],
    lengths: Sequence[int] | None = None,
    number: int | None = None,
) -> Prompts:
    """Samples that are there, of these tasks; of all lengths and numbers unless some are given."""
    given = {"lengths": lengths, "samples": number, "seed": None, "template": None}
    return _found(argparse.Namespace(prompts=folder, **given), tasks.chosen(names))


def _found(arguments: argparse.Namespace, chosen: Sequence[str]) -> Prompts:
    """Without a model: all that is in the folder, of the tasks and numbers that were given."""
    folder = Path(arguments.prompts)

    def fits(each: Samples) -> bool:
        wanted = {
            "length": arguments.lengths,
            "count": arguments.samples,
            "seed": arguments.seed,
            "template": arguments.template,
        }
        return each.task in chosen and all(
            given is None or getattr(each, name) in (given if name == "length" else [given])
            for name, given in wanted.items()
        )

    files = samples.found(folder, fits)
    if not files:
        raise CannotRunError(
            f"--prompts: {folder} has no samples of these --tasks, --lengths, --samples, --seed "
            "and --template; `pariskv eval MODEL --make-only` makes them"
        )
    for name in ("tokenizer", "template", "count", "seed"):
        kinds = sorted({str(getattr(each, name)) for each in files})
        if len(kinds) > 1:
            said = {"tokenizer": "a folder inside it", "count": "--samples"}.get(name, f"--{name}")
            raise CannotRunError(
                f"--prompts: {folder} has samples of several {name}s ({', '.join(kinds)}); "
                f"choose one with {said}"
            )
    files.sort(key=lambda each: (each.length, tasks.ALL.index(each.task)))
    folder = files[0].path.parent
    name = folder.name.removesuffix(f"-{files[0].template}-{files[0].tokenizer}")
    return Prompts(name, folder, files)


def _made(
    wanted: Sequence[Wanted], folder: Path, place: Path, template: Template, screen: Screen
) -> list[Samples]:
    """Files of these samples; those that are not here are made."""
    missing = [each for each in wanted if not samples.place(folder, each).exists()]
    if missing:
        tasks.check_packages([each.task for each in missing])
        _check_room(missing, folder)
        total = count(sum(each.count for each in missing), "sample")
        screen.say(f"Making {total} into {folder}")
        with Generators(place, template.extra) as generators:
            for length in sorted({each.length for each in missing}):
                with screen.stages() as stages:
                    for each in (one for one in missing if one.length == length):
                        with stages.stage(f"{each.task}, {length:,}", each.count) as advance:
                            _make(each, folder, template, generators, advance)
        screen.say()
    return [samples.opened(samples.place(folder, each)) for each in wanted]


def _make(
    wanted: Wanted, folder: Path, template: Template, generators: Generators, advance: Any
) -> None:
    if wanted.task == tasks.NEEDLES:
        made = needles.make(wanted, template, advance)
    else:
        made = generators.make(wanted, advance)
    path = samples.place(folder, wanted)
    try:
        samples.write(path, wanted, made, template, tasks.maker(wanted.task))
    except OSError as reason:
        raise CannotRunError(f"cannot write {path}: {reason.strerror}") from reason


def _check_room(missing: Sequence[Wanted], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise CannotRunError(f"cannot write {folder}: {reason.strerror}") from reason
    needed = samples.BYTES * sum(each.count * each.length for each in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CannotRunError(
            f"{folder} takes about {size(needed)} more and {size(free)} are free there: choose "
            "another --prompts, or fewer --samples"
        )
