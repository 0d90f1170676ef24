"""Exit codes, and the exception that ends a command with one sentence."""

from __future__ import annotations

import importlib.util

from pariskv_core._failures import CHECKOUT as CHECKOUT
from pariskv_core._failures import CannotRunError as CannotRunError
from pariskv_core._failures import install as install

OK = 0
DOES_NOT_HOLD = 1  # what was asked about is not so: it does not fit, it differs, a fact was missed
WRONG_INPUT = 2  # nothing was done: the input is wrong, or something that is needed is missing
STOPPED = 130  # by Ctrl-C, as shells count

# What a package is needed for, and the extra that brings it; a later one brings those before it.
_EXTRAS = {
    "rich": ("cli", "draw tables"),
    "torch": ("torch", "run torch's attention"),
    "transformers": ("transformers", "run a model"),
    "gguf": ("models", "read the weights of a GGUF file"),
}


def need(*modules: str) -> None:
    """Raises unless these packages are installed; loads none of them."""
    sentence = lacking(*modules)
    if sentence:
        raise CannotRunError(sentence)


def lacking(*modules: str) -> str:
    """Which of these packages are not installed, and what to do; empty: none."""
    missing = [name for name in _EXTRAS if name in modules and not _is_installed(name)]
    if not missing:
        return ""
    extra, purpose = _EXTRAS[missing[-1]]
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {are} not installed, and needed to {purpose}; {install(extra)}"


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
