"""A server's day: the same loads over HTTP, with the engine and without.

    python integrations/vllm/bench/loads.py --model MODEL
    python integrations/vllm/bench/loads.py --model MODEL --loads chat one_16k --engines ours

Prompts are random token ids, answers greedy and of a fixed length, and each load has prompts that
no other one has. A line of JSON is printed for each load and engine, then a table. In loads that
search nothing answers should be the same tokens, and the table counts them. Other options are those
of `vllm serve`, for both engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from client import Answer, Client, at_once, when_due
from serve import fetch, served

VOCABULARY = 30000
Ask = Callable[[], Awaitable[Answer]]


class Prompts:
    """Random token ids of one load."""

    def __init__(self, name: str) -> None:
        self.chance = random.Random(f"pariskv {name}")

    def of(self, count: int) -> list[int]:
        return self.chance.choices(range(3, VOCABULARY), k=count)

    def length(self, least: int, most: int) -> int:
        """Short ones are as common as long ones on a scale of logarithms."""
        return round(least * (most / least) ** self.chance.random())


async def chat(client: Client, some: Prompts) -> list[Answer]:
    """256 requests, 128 at once, 100 to 4,000 tokens in, 200 out."""
    prompts = [some.of(some.length(100, 4000)) for _ in range(256)]
    return await at_once([partial(client.ask, prompt, 200) for prompt in prompts], 128)


async def short(client: Client, some: Prompts) -> list[Answer]:
    """400 requests of 1,000 tokens, 128 out, all at once."""
    return await at_once([partial(client.ask, some.of(1000), 128) for _ in range(400)])


async def medium(client: Client, some: Prompts) -> list[Answer]:
    """128 requests of 2,000 tokens, 256 out, 64 at once."""
    return await at_once([partial(client.ask, some.of(2000), 256) for _ in range(128)], 64)


async def agents(client: Client, some: Prompts) -> list[Answer]:
    """12 agents of 4 turns: 20,000 tokens in common, 10,000 of their own, 1,500 more a turn."""
    document = some.of(20_000)
    starts = [document + some.of(10_000) for _ in range(12)]
    more = [[some.of(1500) for _ in range(3)] for _ in starts]

    async def agent(prompt: list[int], turns: list[list[int]]) -> list[Answer]:
        answers = [await client.ask(prompt, 150)]
        for turn in turns:
            prompt = prompt + answers[-1].tokens + turn
            answers.append(await client.ask(prompt, 150))
        return answers

    done = await asyncio.gather(*map(agent, starts, more))
    return [answer for answers in done for answer in answers]


async def mixed(client: Client, some: Prompts) -> list[Answer]:
    """10 prompts of 48,000 tokens beside 40 of 1,000, 256 out, all at once."""
    counts = [48_000] * 10 + [1000] * 40
    some.chance.shuffle(counts)
    return await at_once([partial(client.ask, some.of(count), 256) for count in counts])


async def forty(client: Client, some: Prompts) -> list[Answer]:
    """40 prompts of 48,000 tokens at once, 256 out: a GPU holds a quarter of them."""
    return await at_once([partial(client.ask, some.of(48_000), 256) for _ in range(40)])


async def long(client: Client, some: Prompts) -> list[Answer]:
    """4 prompts of 130,000 tokens at once, 256 out."""
    return await at_once([partial(client.ask, some.of(130_000), 256) for _ in range(4)])


async def prefixes(client: Client, some: Prompts) -> list[Answer]:
    """200 requests, 32 at once; 60 % begin as one of twenty texts of 500 to 8,000 tokens."""
    texts = [some.of(some.length(500, 8000)) for _ in range(20)]

    def prompt() -> list[int]:
        begins = some.chance.random() < 0.6
        return [*(some.chance.choice(texts) if begins else []), *some.of(some.length(50, 2000))]

    return await at_once([partial(client.ask, prompt(), 100) for _ in range(200)], 32)


async def tail(client: Client, some: Prompts, rate: float = 1.5) -> list[Answer]:
    """60 requests of 100 to 60,000 tokens, few of them long, that come by themselves; 128 out."""
    asks: list[tuple[float, Ask]] = []
    at = 0.0
    for _ in range(60):
        at += some.chance.expovariate(rate)
        count = min(round(100 / (1 - some.chance.random()) ** 1.1), 60_000)
        asks.append((at, partial(client.ask, some.of(count), 128)))
    return await when_due(asks)


async def conversation(client: Client, some: Prompts) -> list[Answer]:
    """Eight conversations of 20 turns, 1,000 tokens in and 100 out a turn."""

    async def one() -> list[Answer]:
        prompt: list[int] = []
        answers: list[Answer] = []
        for _ in range(20):
            prompt = [*prompt, *some.of(1000)]
            answers.append(await client.ask(prompt, 100))
            prompt += answers[-1].tokens
        return answers

    done = await asyncio.gather(*(one() for _ in range(8)))
    return [answer for answers in done for answer in answers]


async def document(client: Client, some: Prompts) -> list[Answer]:
    """64 questions about a document of 120,000 tokens, at once; 512 out."""
    text = some.of(120_000)
    await client.ask(text, 1)
    return await at_once([partial(client.ask, text + some.of(128), 512) for _ in range(64)])


async def many_prompts(client: Client, some: Prompts) -> list[Answer]:
    """128 prompts of 1,000 tokens at once, one token out."""
    return await at_once([partial(client.ask, some.of(1000), 1) for _ in range(128)])


def single(tokens: int) -> Callable[[Client, Prompts], Awaitable[list[Answer]]]:
    async def load(client: Client, some: Prompts) -> list[Answer]:
        return [await client.ask(some.of(tokens), 1) for _ in range(7)]

    load.__doc__ = f"One prompt of {tokens:,} tokens at a time."
    return load


LOADS: dict[str, Callable[[Client, Prompts], Awaitable[list[Answer]]]] = {
    "one_1k": single(1000),
    "one_4k": single(4000),
    "one_16k": single(16_000),
    "one_48k": single(48_000),
    "many_prompts": many_prompts,
    "chat": chat,
    "short": short,
    "medium": medium,
    "prefixes": prefixes,
    "conversation": conversation,
    "tail": tail,
    "agents": agents,
    "mixed": mixed,
    "forty": forty,
    "long": long,
    "document": document,
}
USUAL = [name for name in LOADS if name not in ("forty", "long", "document")]


def told(engine: str, name: str, answers: list[Answer]) -> dict[str, Any]:
    begin = min(answer.begin for answer in answers)
    end = max(answer.times[-1] for answer in answers)
    firsts = sorted(answer.first for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "engine": engine,
        "load": name,
        "tokens_per_second": sum(len(answer.tokens) for answer in answers) / (end - begin),
        "seconds": end - begin,
        "first": statistics.mean(firsts),
        "first_median": statistics.median(firsts),
        "first_p90": firsts[int(0.9 * (len(firsts) - 1))],
        "token_ms": 1e3 * statistics.median(gaps) if gaps else 0.0,
        "longest_pause": max(gaps, default=0.0),
        "digests": [answer.digest for answer in answers],
    }


def table(results: list[dict[str, Any]]) -> str:
    by_load: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        by_load.setdefault(result["load"], {})[result["engine"]] = result
    lines = [
        "| load | tokens/s, first token s, ms a token, longest pause s: stock | ours | ours over "
        "stock: tokens/s, first token | same answers |",
        "|---|---|---|---|---|",
    ]
    for name, engines in by_load.items():
        cells = []
        for engine in ("stock", "ours"):
            r = engines.get(engine)
            cells.append(
                "–"
                if r is None
                else f"{r['tokens_per_second']:,.0f}, {r['first']:.3f}, {r['token_ms']:.1f}, "
                f"{r['longest_pause']:.2f}"
            )
        ratios = same = "–"
        if len(engines) == 2:
            mine, stock = engines["ours"], engines["stock"]
            rate = mine["tokens_per_second"] / stock["tokens_per_second"]
            ratios = f"{rate:.3f}, {mine['first'] / stock['first']:.3f}"
            pairs = zip(mine["digests"], stock["digests"], strict=True)
            same = f"{sum(a == b for a, b in pairs)} of {len(mine['digests'])}"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {ratios} | {same} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="; ".join(f"{name}: {load.__doc__}" for name, load in LOADS.items()),
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=USUAL)
    parser.add_argument(
        "--engines", nargs="+", choices=["stock", "ours"], default=["stock", "ours"]
    )
    parser.add_argument("--longest", type=int, default=72_000, help="--max-model-len")
    parser.add_argument("--sequences", type=int, default=256, help="--max-num-seqs")
    parser.add_argument("--defaults", action="store_true", help="compiled, as vLLM does by itself")
    parser.add_argument("--out", type=Path, help="a folder for the servers' logs and the results")
    parser.add_argument("--port", type=int, default=8112)
    chosen, chosen.options = parser.parse_known_args()
    return chosen


def run(chosen: argparse.Namespace, engine: str, folder: Path) -> list[dict[str, Any]]:
    client, results = Client(chosen.port), list[dict[str, Any]]()
    with served(chosen, engine, folder / f"{engine}.log"):
        asyncio.run(LOADS["one_1k"](client, Prompts("before")))
        for name in chosen.loads:
            try:
                answers = asyncio.run(LOADS[name](client, Prompts(name)))
            except (OSError, RuntimeError) as reason:
                print(json.dumps({"engine": engine, "load": name, "failed": str(reason)[:500]}))
                continue
            results.append(told(engine, name, answers))
            short_form = {k: v for k, v in results[-1].items() if k != "digests"}
            print(json.dumps(short_form), flush=True)
        if engine == "ours":
            metrics = fetch(chosen.port, "metrics").splitlines()
            print(*(line for line in metrics if line.startswith("vllm:pariskv_")), sep="\n")
    return results


def main() -> None:
    chosen = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = chosen.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        results = [one for engine in chosen.engines for one in run(chosen, engine, folder)]
        (folder / "loads.json").write_text(json.dumps(results))
        print(table(results))


if __name__ == "__main__":
    main()
