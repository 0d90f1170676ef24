"""A rank's engine beside a host's own attention over pages: as if it attended to all by itself."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from pariskv_core.serving import Engine, Orders
from pariskv_core.serving.orders import ADD, Command, Row
from support import make_config, randn_kv, randn_q
from test_pages import DENSE_BELOW, Reader, close_to, make

pytestmark = pytest.mark.cuda


class HostReader(Reader):
    """Of an engine's pages, as a host has them."""

    def __init__(self, engine: Engine) -> None:
        assert engine.pages is not None
        self.config, pages = engine.cache.config, engine.pages
        self.rows, self.keys, self.values = pages.rows, pages.keys, pages.values
        self.pages, self.lengths = pages.table, pages.lengths


class Pair:
    """The same requests through an engine with pages and one without."""

    def __init__(self, config: pk.Config) -> None:
        self.config, self.rng = config, np.random.default_rng(11)
        self.beside, self.alone = Engine(config), Engine(config)
        self.beside.open_pages(8, 4000)
        self.reader = HostReader(self.beside)
        self.stored: dict[str, int] = {}
        self.prompts: dict[str, int] = {}

    def step(self, **tokens: int) -> list[int]:
        """So many tokens of each request; one of a request that is known is decoded. Lengths that
        the host's attention saw."""
        added = [name for name in tokens if name not in self.stored]
        rows = []
        for name, count in tokens.items():
            before = self.stored.setdefault(name, 0)
            if not (count == 1 and before > 0):
                self.prompts[name] = before + count
            rows.append(Row(name, int(name[1:]), before, before, count, self.prompts[name]))
            self.stored[name] += count
        orders = Orders([Command(ADD, int(name[1:])) for name in added], rows)
        counts, every = list(tokens.values()), sum(tokens.values())
        for engine in (self.beside, self.alone):
            engine.begin(orders, list(tokens))
        seen: list[int] = []
        for layer in range(self.config.layers):
            q = randn_q(self.rng, every, self.config)
            k, v = randn_kv(self.rng, every, self.config)
            out, expected = torch.full_like(q, 7), torch.full_like(q, 7)

            def attend(q: torch.Tensor = q, out: torch.Tensor = out) -> None:
                seen[:] = self.reader.lengths[: len(counts)].tolist()
                self.reader.attend(q, counts, range(len(counts)), out)

            self.beside.attend(layer, q, k, v, out, full=attend)
            self.alone.attend(layer, q, k, v, expected)
            close_to(out, expected)

            # A layer that shares these keys and values.
            q = randn_q(self.rng, every, self.config)
            out, expected = torch.full_like(q, 7), torch.full_like(q, 7)

            def again(q: torch.Tensor = q, out: torch.Tensor = out) -> None:
                self.reader.attend(q, counts, range(len(counts)), out)

            self.beside.attend(layer, q, None, None, out, full=again)
            self.alone.attend(layer, q, None, None, expected)
            close_to(out, expected)
        for engine in (self.beside, self.alone):
            engine.end()
        return seen

    def close(self) -> None:
        self.beside.close()
        self.alone.close()


def test_prompts_chunks_and_answers_in_any_order() -> None:
    pair = Pair(make())
    assert pair.step(r0=70, r1=1500, r2=5) == [70, 1500, 5]
    # The second one is searched as its next token comes; a chunk is attended to in full.
    assert pair.step(r0=1, r1=400, r2=1, r3=90) == [71, 1900, 6, 90]
    assert pair.step(r0=1, r1=1, r2=1) == [72, 0, 7]
    assert pair.step(r4=3, r1=1, r2=80, r0=1) == [3, 0, 87, 73]
    assert pair.step(r1=1) == [0]
    for _ in range(70):
        pair.step(r2=1, r0=1)
    pair.close()


@pytest.mark.parametrize(
    "fields", [{"placement": "host"}, {"kv_dtype": "int8"}], ids=["host", "8 bits"]
)
def test_requests_whose_rows_are_no_pages_are_attended_to_by_the_engine(fields: dict) -> None:
    base = make()
    pair = Pair(
        make_config(layers=2, dense_below=DENSE_BELOW, segment_tokens=base.segment_tokens, **fields)
    )
    pair.step(r0=2500, r1=40)
    torch.cuda.synchronize()
    pair.beside.cache.stats()
    seen = pair.step(r0=300, r1=50)
    assert seen == [0, 90], "rows of the first one are elsewhere by now"
    assert pair.step(r1=1, r0=1) == [91, 0]
    pair.close()
