"""The exception that ends a command with one sentence, and how a missing package is installed."""

from __future__ import annotations

CHECKOUT = "in a checkout of the repository"  # where the package is installed from


def install(extra: str) -> str:
    """The command that brings an extra."""
    return f"{CHECKOUT}: pip install '.[{extra}]'"


class CannotRunError(Exception):
    """Says in one sentence what is wrong or missing, and what to do."""
