"""Arguments of commands: numbers as people write them, and errors of one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

import pariskv_core as pk
from pariskv_core.cli.failures import WRONG_INPUT

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and leaves the usage to --help."""

    # A sentence for options that a command does not have; {} is the option.
    strange_option = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest and self.strange_option:
            self.error(self.strange_option.format(rest[0].partition("=")[0]))
        return found, rest

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"{self.prog}: {message}\n")


def _whole(text: str) -> int:
    """131072, 131,072, 131_072, 128K: K and M are 1,024 and its square, as models count tokens."""
    digits = text.replace(",", "").replace("_", "").lower()
    unit = digits[-1:] if digits[-1:] in ("k", "m") else ""
    return int(digits.removesuffix(unit)) * (1 << 10 * _UNITS[unit])


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    expected = f"a whole number from {least:,} {'up' if most is None else f'to {most:,}'}"

    def parse(text: str) -> int:
        try:
            value = _whole(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return parse


def size(text: str) -> int:
    """Bytes: 24GB (10^9), 24GiB (2^30), 800M, 1e9."""
    trimmed = text.strip().lower().replace(",", "").replace("_", "").removesuffix("b")
    binary = trimmed.endswith("i")
    trimmed = trimmed.removesuffix("i").strip()
    unit = trimmed[-1:] if trimmed[-1:] in _UNITS else ""
    try:
        value = float(trimmed.removesuffix(unit)) * (1024 if binary else 1000) ** _UNITS[unit]
        if not 0 <= value < 1e18:
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"expected a size, like 24GB or 64GiB, got {text}"
        ) from None
    return int(value)


def share(text: str) -> float:
    """Of a whole: .92."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and up to 1, got {text}")
    return value


def _engine_setting(name: str, make: Callable[[int], object]) -> Callable[[str], int]:
    """What the engine itself accepts."""

    def parse(text: str) -> int:
        value = whole(1)(text)
        try:
            make(value)
        except ValueError as reason:
            said = str(reason).partition(f"{name}: ")[2]
            raise argparse.ArgumentTypeError(said or str(reason)) from None
        return value

    return parse


threads = _engine_setting(
    "threads", lambda n: pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64, threads=n)
)
top_k = _engine_setting("top_k", lambda n: pk.ParisKV(top_k=n))
