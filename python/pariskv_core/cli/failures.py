"""Exit codes, and the exceptions that end a command with one sentence."""

from __future__ import annotations

import importlib.util

OK = 0
DOES_NOT_HOLD = 1  # what was asked about is not so: it does not fit, it differs, a fact was missed
WRONG_INPUT = 2  # nothing was done: the input is wrong, or something that is needed is missing
STOPPED = 130  # by Ctrl-C, as shells count

_EXTRAS = {
    "rich": ("cli", "draw tables"),
    "torch": ("torch", "run torch's attention"),
    "transformers": ("transformers", "run a model"),
    "gguf": ("models", "read the weights of a GGUF file"),
    "accelerate": ("models", "load a model onto a GPU"),
}


class CannotRunError(Exception):
    """Says in one sentence what is wrong or missing, and what to do."""


def need(*modules: str) -> None:
    """Raises unless these packages are installed; loads none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            extra, purpose = _EXTRAS[module]
            raise CannotRunError(
                f"{module} is not installed, and it is needed to {purpose}: "
                f"pip install 'pariskv_core[{extra}]'"
            )
