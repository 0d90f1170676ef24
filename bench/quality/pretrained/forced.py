"""What a pretrained model makes of a text when every layer sees some rows alone.

The model reads a prefix with full attention. The tokens that follow are given, not chosen: each
method says how likely each was, in every global layer at once, and is held against full attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pariskv_core as pk
import torch
import torch.nn.functional as F
from pariskv_core.cli.weights import Unusable
from torch import Tensor

from quality.inside import Residency
from quality.methods import make_method
from quality.paris import PUBLISHED_SCHEDULE
from quality.pretrained.attentions import ByHead, Engine, KeepingEngine, Rows, nothing
from quality.pretrained.prefix import Attention, Prefix, Pretrained, full, go_on, kept
from quality.pretrained.shares import MANY
from quality.pretrained.texts import TEXTS

_OFTEN = Residency(update=128)  # the interval of policies that keep rows
Say = Callable[[str], None]
STEPS = 512
TAILS = (256, 512, 1024)
BLOCK = 64
MASSES = (0.99, 0.98, 0.95, 0.9)
_PUBLISHED = {
    "scorer": "votes",
    "group_rule": "mean_query",
    "schedule": PUBLISHED_SCHEDULE,
    "block": 0,
}


def reranked(ratio: float) -> dict[str, Any]:
    return {"schedule": [(0, ratio, 0.2)], "min_candidates_per_row": 1}


def oracle(rows: int) -> ByHead:
    return ByHead(lambda: make_method("oracle"), rows)


def peer(name: str, **options: Any) -> Rows:
    return Rows(ByHead(lambda: make_method(name, **options), 100))


def prkv(rows: int, static: float) -> Rows:
    """PRKV with its own interval; S = 1 keeps rows alone."""
    return Rows(ByHead(lambda: make_method("prkv", static=static), rows, interval=128))


def keeping(policy: pk.PRKV | pk.HardKV, local: int = 256) -> Attention:
    """The engine's own output with a policy that keeps rows, at the policies' interval."""
    return KeepingEngine(
        residency=Residency(local=local, update=_OFTEN.update), keeping=policy
    ).decoded


def with_tail(rows: int, **policy: Any) -> Attention:
    """The engine's output, its own tail included."""
    return Engine({"block": BLOCK, "tail": "sample", "tail_rows": rows, **policy}).decoded


def budget(mass: float) -> Attention:
    """The default with a budget by mass; with 1 it is the default, and its share is known."""
    return with_tail(1024, mass=mass, **reranked(0.05))


def counted(attention: Attention) -> dict[str, float]:
    """Of the engine's own outputs: rows that were fetched per kv head and step, and the estimated
    share of the attention to what was attended to exactly, where the policy says it."""
    engine = getattr(attention, "__self__", None)
    if not isinstance(engine, Engine):
        return {}
    found = engine.counted()
    return {name: value for name, value in found.items() if not math.isnan(value)}


SEARCHES: dict[str, Callable[[], Attention]] = {
    "full attention": lambda: full,
    "sinks and window": lambda: Rows(nothing),
    "best 100": lambda: Rows(oracle(100)),
    "best 400": lambda: Rows(oracle(400)),
    "best 1,000": lambda: Rows(oracle(1000)),
    **{f"tail {m:,} alone": (lambda m=m: Rows(nothing, m)) for m in TAILS},
    **{f"best 100, tail {m:,}": (lambda m=m: Rows(oracle(100), m)) for m in TAILS},
    "whole keys": lambda: Engine({"block": 0}).decoded,
    f"block {BLOCK}": lambda: Engine({"block": BLOCK, **MANY}).decoded,
    "block 256": lambda: Engine({"block": 256, **MANY}).decoded,
    f"block {BLOCK}, 5 %": lambda: Engine({"block": BLOCK, **reranked(0.05)}).decoded,
    f"block {BLOCK}, 2 %": lambda: Engine({"block": BLOCK, **reranked(0.02)}).decoded,
    "published": lambda: Engine(_PUBLISHED).decoded,
    "whole keys, tail 512": lambda: Rows(Engine({"block": 0}), 512),
    **{
        f"block {BLOCK}, tail {m:,}": (lambda m=m: Rows(Engine({"block": BLOCK, **MANY}), m))
        for m in TAILS
    },
    **{
        f"block {BLOCK}, 5 %, tail {m:,}": (
            lambda m=m: Rows(Engine({"block": BLOCK, **reranked(0.05)}), m)
        )
        for m in TAILS
    },
    f"block {BLOCK}, 2 %, tail 512": lambda: Rows(Engine({"block": BLOCK, **reranked(0.02)}), 512),
    # What the lab adds to the engine's rows, by the engine itself; 5 % and 1,024 are the default.
    f"block {BLOCK}, own tail": lambda: with_tail(512, **MANY),
    f"block {BLOCK}, own tail 1,024": lambda: with_tail(1024, **MANY),
    f"block {BLOCK}, 5 %, own tail 1,024": lambda: with_tail(1024, **reranked(0.05)),
    f"block {BLOCK}, 5 %, own tail 2,048": lambda: with_tail(2048, **reranked(0.05)),
    **{f"the default, mass {mass:g}": (lambda m=mass: budget(m)) for mass in (1.0, *MASSES)},
    "PQCache 16×8": lambda: peer("pqcache", subspaces=16, bits=8),
    **{
        f"PRKV {rows:,}, S = {static:g}": (lambda rows=rows, s=static: prkv(rows, s))
        for rows, static in ((256, 0.5), (256, 1.0), (1024, 0.25), (1024, 0.5), (1024, 1.0))
    },
    "Quest": lambda: peer("quest"),
    "ArkVale": lambda: peer("arkvale"),
}
POLICIES: dict[str, Callable[[], Attention]] = {
    # The engine's policies that keep rows, and methods with as many rows beside them.
    **{
        f"engine PRKV {rows:,}, S = {static}": (
            lambda rows=rows, s=static: keeping(pk.PRKV(budget=rows, static_share=s))
        )
        for rows in (256, 1024)
        for static in (0, 0.25, 0.5, 1, "auto")
    },
    "engine PRKV 1,024, S = 0.25, its regions": lambda: keeping(pk.PRKV(), local=64),
    **{
        f"engine HARD-KV {most:,}, {metric}": (
            lambda most=most, m=metric: keeping(pk.HardKV(most=most, metric=m))
        )
        for most in (256, 512, 1024, 2048)
        for metric in ("attention", "snapkv")
    },
    "engine HARD-KV 2,048, snapkv, its regions": lambda: keeping(pk.HardKV(), local=32),
    **{
        f"engine HARD-KV, {rows:,} in each head": (
            lambda rows=rows: keeping(pk.HardKV(most=rows, p=1, metric="attention"))
        )
        for rows in (256, 512, 1024)
    },
    **{
        f"{said} {rows:,}": (
            lambda name=name, rows=rows: Rows(ByHead(lambda: make_method(name), rows))
        )
        for rows in (256, 512, 1024)
        for name, said in (("oracle", "best"), ("snapkv", "SnapKV"), ("window", "StreamingLLM"))
    },
    # With the policies' flush, so with their window.
    "sinks and window, flush 128": lambda: Rows(nothing, residency=_OFTEN),
    **{
        f"{said} 1,024, flush 128": (
            lambda name=name: Rows(ByHead(lambda: make_method(name), 1024, _OFTEN), 0, _OFTEN)
        )
        for name, said in (("snapkv", "SnapKV"), ("window", "StreamingLLM"))
    },
    "ParisKV 1,024": lambda: Engine({"top_k": 1024}).decoded,
    "ParisKV as it comes": lambda: Engine({"tail": "own"}).decoded,
}
METHODS = SEARCHES | POLICIES


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
