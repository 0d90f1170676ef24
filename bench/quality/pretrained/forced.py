"""What a pretrained model makes of a text when every layer sees some rows alone.

The model reads a prefix with full attention. The tokens that follow are given, not chosen: each
method says how likely each was, in every global layer at once, and is held against full attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pariskv_core as pk
import torch
import torch.nn.functional as F
from pariskv_core.cli.weights import Unusable
from torch import Tensor

from quality.engine import MANY, PUBLISHED, reranked
from quality.methods import make_method
from quality.pretrained.attentions import ENGINES, ByHead, Engine, KeepingEngine, Rows, nothing
from quality.pretrained.prefix import Attention, Prefix, Pretrained, full, go_on, kept
from quality.pretrained.texts import TEXTS
from quality.regions import Residency

Say = Callable[[str], None]
Makers = dict[str, Callable[[], Attention]]
STEPS = 512
DEFAULT = "the default"
FIXED = "100 rows"
LONGER = "the default, tail_rows=2048"
WHOLE_ROWS = "rows as they come"
NARROW_ROWS = "rows in 8 bits"
_OFTEN = Residency(update=128)  # the interval of policies that keep rows


def rows(method: str, count: int, residency: Residency = ENGINES) -> Callable[[], Attention]:
    """So many rows by one of the lab's methods."""
    return lambda: Rows(ByHead(partial(make_method, method), count, residency), residency)


def paris(kv_dtype: str = "auto", **settings: Any) -> Callable[[], Attention]:
    """The engine's own output; without a tail unless the settings ask for one."""
    return lambda: Engine(pk.ParisKV(**{"tail": "none", **settings}), kv_dtype=kv_dtype)


def default(tail_rows: int = 1024, **settings: Any) -> Callable[[], Attention]:
    """What the engine does of itself in zones of 5,000 to 100,000 tokens."""
    return paris(tail="sample", tail_rows=tail_rows, **reranked(0.05), **settings)


def budget(error: float, tail_rows: int = 1024) -> Callable[[], Attention]:
    """The same with a budget by error: four candidates for each of the rows that it may take."""
    schedule = reranked(0.05)["schedule"]
    return paris(tail="sample", tail_rows=tail_rows, top_k=400, error=error, schedule=schedule)


def keeping(policy: pk.PRKV | pk.HardKV, local: int = 256) -> Callable[[], Attention]:
    """The engine's own output with a policy that keeps rows, at the policies' interval."""
    return lambda: KeepingEngine(policy, Residency(local=local, update=_OFTEN.update))


# Names are those of results files and of tables, and tables have their order. A new format or
# policy is a line here.
SEARCHES: Makers = {
    "full attention": lambda: full,
    "sinks and window": lambda: Rows(nothing),
    "best 100": rows("oracle", 100),
    "best 400": rows("oracle", 400),
    "published": paris(**PUBLISHED),
    "whole keys": paris(block=0),
    "block 256": paris(block=256, **MANY),
    "block 64": paris(**MANY),
    "block 64, 5 %": paris(**reranked(0.05)),
    "block 64, tail of 512": paris(tail="sample", tail_rows=512, **MANY),
    "block 64, tail of 1,024": paris(tail="sample", tail_rows=1024, **MANY),
    DEFAULT: default(),
    LONGER: default(2048),
}
ERRORS: Makers = {
    **{f"{count} rows": default(top_k=count) for count in (24, 32, 48, 64)},
    FIXED: default(),
    **{
        f"error {error:g}, at most 400 rows": budget(error)
        for error in (0.02, 0.014, 0.01, 0.007, 0.005)
    },
    LONGER: SEARCHES[LONGER],
    **{f"{LONGER}, error={error:g}": budget(error, 2048) for error in (0.02, 0.01, 0.005)},
}
# That are held against one another on texts of several kinds.
ACROSS = (DEFAULT, "error 0.01, at most 400 rows", *(name for name in ERRORS if LONGER in name))
# The same settings twice, measured in one run. A prefix is kept in float16, which float32 holds as
# it is: rows as they come are rows in 16 bits.
INT8: Makers = {WHOLE_ROWS: default(), NARROW_ROWS: default(kv_dtype="int8")}
POLICIES: Makers = {
    "sinks and window": SEARCHES["sinks and window"],
    "sinks and window, flush 128": lambda: Rows(nothing, _OFTEN),
    "best 100": SEARCHES["best 100"],
    "best 256": rows("oracle", 256),
    "best 512": rows("oracle", 512),
    "best 1,024": rows("oracle", 1024),
    DEFAULT: SEARCHES[DEFAULT],
    "ParisKV as it comes": paris(tail="own"),
    "ParisKV 1,024, no tail": paris(top_k=1024),
    **{
        f"PRKV {budget:,}, S = {static}": keeping(pk.PRKV(budget=budget, static_share=static))
        for budget in (1024, 256)
        for static in (0, 0.25, 0.5, 1, "auto")
    },
    "PRKV 1,024, S = 0.25, a window of 64": keeping(pk.PRKV(), local=64),
    **{
        f"HARD-KV {most:,}, p = 0.9, {metric}": keeping(pk.HardKV(most=most, metric=metric))
        for most in (2048, 1024, 512, 256)
        for metric in ("attention", "snapkv")
    },
    "HARD-KV 2,048, p = 0.9, snapkv, a window of 32": keeping(pk.HardKV(), local=32),
    **{
        f"HARD-KV {most:,}, p = 1": keeping(pk.HardKV(most=most, p=1, metric="attention"))
        for most in (1024, 512, 256)
    },
    **{
        f"{said} {count:,}": rows(method, count)
        for said, method in (("SnapKV", "snapkv"), ("StreamingLLM", "window"))
        for count in (1024, 512, 256)
    },
    **{
        f"{said} 1,024, flush 128": rows(method, 1024, _OFTEN)
        for said, method in (("SnapKV", "snapkv"), ("StreamingLLM", "window"))
    },
}
METHODS = SEARCHES | ERRORS | INT8 | POLICIES


def counted(attention: Attention) -> dict[str, float]:
    """Of the engine's own outputs: rows that were fetched per kv head and step, and the predicted
    error and the mass, where the policy says them."""
    found = attention.counted() if isinstance(attention, Engine) else {}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def against(
    logits: Tensor, reference: Tensor, following: Tensor, sizes: Tensor
) -> dict[str, float]:
    """Of logits (steps, vocabulary), by those of full attention.

    following  (steps): the token that came next
    sizes      (steps): its bytes
    """
    ours, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    bits = F.nll_loss(ours, following, reduction="none") / math.log(2)
    same = (logits.argmax(-1) == reference.argmax(-1)).float()
    return {
        "kl": kl.mean().item(),
        "kl_error": (kl.std() / math.sqrt(len(kl))).item(),
        "kl_median": kl.median().item(),
        "kl_worst": kl.max().item(),
        "kl_worst_step": kl.argmax().item(),
        "same_top": same.mean().item(),
        "bits_per_byte": (bits.sum() / sizes.sum()).item(),
    }


def sizes_of(pretrained: Pretrained, ids: Tensor) -> Tensor:
    """Bytes of each token's text."""
    return torch.tensor([len(pretrained.tokenizer.decode([i]).encode()) for i in ids.tolist()])


def text_of(pretrained: Pretrained, text: str, tokens: int) -> tuple[Prefix, Tensor]:
    """A prefix of so many tokens, and the STEPS + 1 tokens after it."""
    ids = pretrained.ids(TEXTS[text]())[: tokens + STEPS + 1]
    if len(ids) < tokens + STEPS + 1:
        raise Unusable(f"The text {text} is too short for {tokens:,} tokens and those after them.")
    return kept(pretrained, ids[:tokens]), ids[tokens:]


def measured(
    pretrained: Pretrained, prefix: Prefix, ids: Tensor, names: Sequence[str], say: Say
) -> dict[str, dict[str, float]]:
    """Each method by its name on the tokens `ids` that follow the prefix."""
    model, given, following = pretrained.model, ids[:-1], ids[1:]
    sizes = sizes_of(pretrained, following)
    reference = go_on(model, prefix, given, full)
    found = {}
    for name in names:
        begin = time.perf_counter()
        attention = METHODS[name]()
        logits = go_on(model, prefix, given, attention)
        found[name] = against(logits, reference, following, sizes) | counted(attention)
        taken = time.perf_counter() - begin
        say(f"{name}: {found[name]['kl']:.4f} {found[name]['same_top']:.3f} ({taken:.0f} s)")
    return found
