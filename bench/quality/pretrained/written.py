"""A short prompt and much text after it, as HARD-KV is made for: bits and KL by position.

The text is given, not chosen, so that every method sees the same tokens. Positions are counted
from the prompt's end, and each stretch of them has a mean and its standard error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quality.pretrained.forced import METHODS, Say, counted
from quality.pretrained.prefix import Pretrained, full, go_on, read
from quality.pretrained.texts import TEXTS

PROMPT, WRITTEN, STRETCH = 512, 4096, 1024
ASKED = (
    "ParisKV as it comes",
    "HARD-KV 1,024, p = 0.9, attention",
    "HARD-KV 1,024, p = 0.9, snapkv",
    "HARD-KV 512, p = 1",
    "HARD-KV 256, p = 1",
    "PRKV 1,024, S = 0.25",
    "StreamingLLM 512",
    "best 512",
)
_AT_ONCE = 256  # positions whose whole vocabulary is worked on


def by_token(logits: Tensor, reference: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """(steps) each: KL from the reference, and bits that the next token costs."""
    kl, bits = [], []
    parts = (rows.split(_AT_ONCE) for rows in (logits, reference, following))
    for mine, whole, wanted in zip(*parts, strict=True):
        ours, theirs = mine.log_softmax(-1), whole.log_softmax(-1)
        kl.append((theirs.exp() * (theirs - ours)).sum(-1))
        bits.append(-ours.gather(1, wanted[:, None])[:, 0] / math.log(2))
    return torch.cat(kl), torch.cat(bits)


def mean_and_error(values: Tensor) -> list[float]:
    return [values.mean().item(), (values.std() / math.sqrt(len(values))).item()]


def by_position(kl: Tensor, bits: Tensor, whole: Tensor, stretch: int) -> dict[str, Any]:
    """Of each stretch: bits of full attention, what they are more here, and KL, with errors.

    Beside them each stretch's largest KL of a token.
    """
    parts = [rows.split(stretch) for rows in (whole, bits - whole, kl)]
    names = ("bits_of_full_attention", "more_bits", "kl")
    found: dict[str, Any] = {
        name: [mean_and_error(part) for part in of] for name, of in zip(names, parts, strict=True)
    }
    return {**found, "worst_kl": [part.max().item() for part in kl.split(stretch)]}


def measured(
    pretrained: Pretrained,
    text: str,
    names: Sequence[str],
    say: Say,
    prompt: int = PROMPT,
    written: int = WRITTEN,
    stretch: int = STRETCH,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each method by its name, as it is done, after a prompt of so many tokens."""
    ids = pretrained.ids(TEXTS[text]())[: prompt + written + 1]
    prefix = read(pretrained.model, ids[:prompt])
    given, following = ids[prompt:-1], ids[prompt + 1 :]
    reference = go_on(pretrained.model, prefix, given, full)
    _, whole = by_token(reference, reference, following)
    for name in names:
        begin = time.perf_counter()
        attention = METHODS[name]()
        kl, bits = by_token(go_on(pretrained.model, prefix, given, attention), reference, following)
        found = {
            "prompt": prompt,
            "stretch": stretch,
            **by_position(kl, bits, whole, stretch),
            **counted(attention),
        }
        more = mean_and_error(bits - whole)
        taken = time.perf_counter() - begin
        say(f"{name}: KL {kl.mean():.4f}, {more[0]:+.4f} ± {more[1]:.4f} bits ({taken:.0f} s)")
        yield name, found
