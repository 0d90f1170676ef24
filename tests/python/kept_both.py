"""Sequences on the CPU and on a GPU, under a policy that keeps rows: HardKV or PRKV."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import torch
from hardkv_life import kept_of, make_config
from support import f64, randn_kv, randn_q

# Of outputs: weights are rounded to two terms of 16 bits, floats are added in another order.
APART = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}


def bits(numbers: np.ndarray) -> list[int]:
    return np.asarray(numbers, np.float32).view(np.uint32).ravel().tolist()


def seen(cache: pk.Cache, s: int, layer: int = 0, q: torch.Tensor | None = None) -> list:
    """What is kept and held, and which pages a query finds by which scores."""
    if q is None:
        q = randn_q(np.random.default_rng(0), 1, cache.config)[0]
    found = cache.explain(layer, s, q.to(cache.config.device))
    if found.details is None:
        return []
    out = [kept_of(found.kept)]
    if isinstance(found.details, pk.HardKVExplanation):
        return [*out, kept_of(found.details.held)]
    out += [found.details.static_rows, found.details.first_page]
    if found.searched:
        out += [found.details.pages.tolist(), found.positions.tolist()]
        out += [bits(found.details.page_scores)]
    return out


def digests(cache: pk.Cache, s: int) -> list:
    """Of every page under PRKV."""
    if isinstance(cache.config.policy, pk.HardKV):
        return []
    found = cache.summaries(0, s)
    return [bits(found.middles), bits(found.distances)] if found.page > 0 else []


class Both:
    """The same sequences on the CPU and on a GPU, with everything done to both.

    even: keys of every head have one size; else heads need very unequal counts
    """

    def __init__(self, policy: pk.HardKV | pk.PRKV, even: bool = False, **changes):
        self.caches = [pk.Cache(make_config(policy, device=d, **changes)) for d in ("cpu", "cuda")]
        self.config = self.caches[0].config
        self.rng = np.random.default_rng(0)
        sizes = (1, 1) if even else (0.1, 16)
        self.sizes = torch.linspace(*sizes, self.config.kv_heads, device="cpu")[None, :, None]
        self.sequences: list[int] = []

    def both(self, call) -> list:
        return [call(cache) for cache in self.caches]

    def equal(self, call):
        cpu, gpu = self.both(call)
        assert cpu == gpu
        return cpu

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """q, k and v."""
        q = randn_q(self.rng, count, self.config)
        k, v = randn_kv(self.rng, count, self.config)
        return q, (k * self.sizes).to(k.dtype), v

    def add(self, tokens: int, queries: bool = True, chunks: int = 1) -> None:
        q, k, v = self.rows(tokens)

        def prefill(cache: pk.Cache) -> int:
            s, device = cache.add(), cache.config.device
            for part in torch.arange(tokens, device="cpu").chunk(chunks):
                own = [x[part].to(device) for x in (k, v, q)]
                cache.prefill(0, [s], own[0], own[1], q=own[2] if queries else None)
            return s

        self.sequences.append(self.equal(prefill))

    def decode(self, spoiled: bool = False) -> None:
        """Outputs are close; what a step finds is equal. spoiled: queries are not all finite."""
        q, k, v = self.rows(len(self.sequences))
        if spoiled:
            q[0, -1, 2] = np.nan
            q[0, 0, 0] = np.inf
        a, b = self.both(
            lambda cache: cache.decode(
                0,
                self.sequences,
                *(x.to(cache.config.device) for x in (q, k, v)),
                return_lse=True,
            )
        )
        bound = APART[self.config.dtype]
        for mine, theirs in zip(a, b, strict=True):
            np.testing.assert_allclose(f64(theirs), f64(mine), rtol=bound, atol=bound)
        if isinstance(self.config.policy, pk.PRKV):
            for i, s in enumerate(self.sequences):
                self.equal(lambda cache: seen(cache, s, q=q[i]))  # noqa: B023

    def attend(self, s: int, tokens: int) -> None:
        q, k, v = self.rows(tokens)

        def attend(cache: pk.Cache) -> None:
            own = [x.to(cache.config.device) for x in (q, k, v)]
            cache.attend(0, [s], own[0], k=own[1], v=own[2])

        self.both(attend)

    def live(self, steps: int) -> None:
        """Decodes, and does everything else now and then. Rows may have been dropped."""
        drops = getattr(self.config.policy, "placement", "") == "dropped"
        pages = isinstance(self.config.policy, pk.PRKV)
        for step in range(steps):
            self.decode(spoiled=pages and step % 97 == 5)
            deed = self.rng.integers(60)
            if deed == 0:
                # One token of the window and the buffer: no row of the zone is needed.
                tokens = 1 if drops else int(self.rng.integers(1, 200))
                s = self.sequences[0]
                self.both(lambda c: c.truncate([s], drop=min(tokens, c.length(s) - 1)))  # noqa: B023
            elif deed == 1 and len(self.sequences) < 4:
                source = self.sequences[int(self.rng.integers(len(self.sequences)))]
                self.sequences.append(self.equal(lambda cache: cache.fork(source)))  # noqa: B023
            elif deed == 2 and len(self.sequences) > 2:
                gone = self.sequences.pop(0)
                self.both(lambda cache: cache.remove(gone))  # noqa: B023
            elif deed == 3:
                self.both(lambda cache: cache.flush(self.sequences))
            elif deed == 4 and not drops:
                self.attend(self.sequences[-1], int(self.rng.integers(1, 50)))
            elif deed == 5:
                self.both(lambda cache: cache.reorder(self.sequences[:2], [1, 1]))
            if step % 20 == 0 or deed < 6:
                self.check()
        self.check()

    def check(self) -> None:
        for s in self.sequences:
            self.equal(lambda cache: seen(cache, s))  # noqa: B023
            self.equal(lambda cache: digests(cache, s))  # noqa: B023
            self.equal(lambda cache: repr(cache.regions(s)))  # noqa: B023
        names = "keeps kept_rows unusable_keys encoded_keys dropped_rows".split()
        self.equal(lambda cache: [getattr(cache.stats(), name) for name in names])
