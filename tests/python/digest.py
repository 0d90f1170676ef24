"""Runs the engine through every verb and prints a hash of all that came out, as JSON.

test_determinism.py runs this in subprocesses: PARISKV_CPU_LEVEL is read once per process.
"""

from __future__ import annotations

import hashlib
import json

import kept_digest
import numpy as np
import pariskv_core as pk
from support import (
    DTYPES,
    GROUP_RULES,
    SCORERS,
    SUMMARISED,
    bits,
    explained,
    float32,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    tensor,
)


def cases() -> dict[str, dict]:
    """By name: what to change in the config. Group sizes and lengths go around SIMD widths.

    A case's place is its seed: new ones go to the end, so that the others keep their digests.
    """
    found = {}
    first_dims = (64, 80, 96, 128, 256)
    for dtype in DTYPES:
        for head_dim in first_dims:
            found[f"{dtype} {head_dim}"] = {"dtype": dtype, "head_dim": head_dim}
    for group in (1, 2, 3, 4, 5, 7, 8, 9, 16):
        for scorer in SCORERS:
            for rule in GROUP_RULES:
                found[f"group {group} {scorer} {rule}"] = {
                    "query_heads": 2 * group,
                    "scorer": scorer,
                    "group_rule": rule,
                }
    for scorer in SCORERS:
        found[f"mqa {scorer}"] = {"query_heads": 33, "kv_heads": 1, "scorer": scorer}
        for head_dim in first_dims:
            found[f"{scorer} {head_dim}"] = {"scorer": scorer, "head_dim": head_dim}
    for dtype in DTYPES:
        for head_dim in (192, 512):
            found[f"{dtype} {head_dim}"] = {"dtype": dtype, "head_dim": head_dim}
        for dims in ((192, 128), (64, 512), (512, 96)):
            changes = {"head_dim": dims[0], "value_dim": dims[1]}
            found[f"{dtype} {dims[0]}/{dims[1]}"] = {"dtype": dtype, **changes}
    found["votes 192"] = {"scorer": "votes", "head_dim": 192}
    for dtype, head_dim, block in zip(DTYPES, (64, 80, 256), (64, 128, 256), strict=True):
        changes = {"head_dim": head_dim, "block": block, "segment_tokens": 256}
        found[f"{dtype} {head_dim} in blocks of {block}"] = {"dtype": dtype, **changes}
    for group, rule in ((1, "attention_mass"), (3, "mean_query"), (17, "attention_mass")):
        changes = {"query_heads": group, "kv_heads": 1, "group_rule": rule}
        found[f"group {group} {rule} in blocks"] = {"block": 64, **changes}
    return found


def hostile_keys(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Ordinary keys with zeros, giants, dwarfs, duplicates and what is no number among them."""
    keys = rng.standard_normal(shape)
    kind = rng.integers(0, 40, shape[:2])
    keys[kind == 0] = 0
    keys[kind == 1] *= 1e4
    keys[kind == 2] *= 1e-6
    keys[kind == 3] = keys[0, 0]
    keys[kind == 4, 3] = np.nan
    keys[kind == 5, 7] = np.inf
    return keys


def run(changes: dict, seed: int, threads: int) -> str:
    config = make_config(**{"threads": threads, "update": 12, **changes})
    rng = np.random.default_rng(seed)
    digest = hashlib.sha256()

    def add(*arrays) -> None:
        for array in arrays:
            digest.update(np.ascontiguousarray(bits(array)).tobytes())

    cache = pk.Cache(config)
    # Rows that are no numbers are the zone's: blocks leave more of the end to the window.
    longest, last = (1400, 120) if config.policy.block else (461, 60)
    lengths = [300 + seed % 7, 37, longest]
    sequences = [cache.add() for _ in lengths]
    k, v = randn_kv(rng, sum(lengths), config)
    k[lengths[0] + 200 :] = tensor(hostile_keys(rng, k[lengths[0] + 200 :].shape), config)
    k[-last:] = k[:last]
    prompt = randn_q(rng, sum(lengths), config) if config.policy.block else None
    cache.prefill(0, sequences, k, v, lengths, q=prompt)
    bias = float32(rng.standard_normal(config.query_heads), config)
    options = [{}, {"softcap": 3.0}, {"scale": 0.2, "sink_bias": bias}]
    for i in range(14):  # past a flush
        step = randn_step(rng, len(sequences), config)
        add(*cache.decode(0, sequences, *step, return_lse=True, **options[i % 3]))
    q = step[0]
    for i, s in enumerate(sequences):
        explanation = cache.explain(0, s, q[i], **options[i])
        add(*explained(explanation).values())
        summaries = cache.summaries(0, s)
        add(*(getattr(summaries, name) for name in SUMMARISED))
        if summaries.block:
            add(summaries.means, summaries.balance)
    cache.truncate([sequences[0]], drop=77)
    add(cache.explain(0, sequences[0], q[0]).worth)
    add(*cache.attend(0, sequences[:2], randn_step(rng, 40, config)[0], [33, 7], return_lse=True))
    return digest.hexdigest()


def all_digests(threads: int, **changes) -> dict[str, str]:
    named = cases().items()
    return {name: run({**case, **changes}, i, threads) for i, (name, case) in enumerate(named)}


if __name__ == "__main__":
    found = {
        "level": pk.cpu_level(),
        "digests": all_digests(threads=2),
        "kept": [kept_digest.all_kept(threads) for threads in (1, 3)],
    }
    print(json.dumps(found))
