"""A long mixed load on small budgets: answers are those of a quiet run, memory ends where it began.

    python soak.py SECONDS FOLDER plain|mixed|gpu|far

A tiny model goes to FOLDER; "mixed" has layers with a sliding window, too. Requests of 3 to 1,500
tokens, some of which begin alike, come at random with random priorities; some are aborted, and
prefixes are forgotten now and then. Prints what happened as JSON, and fails if an answer differs
from that of the same prompt alone, or if anything is left at the end.

"gpu" and "far" run on a GPU, in captured steps. "far" searches, with rows in host memory: how a
prefix was computed then bears on the answer, and answers that differ are counted, not refused.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hazards import Engine

KINDS = 40  # of requests
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
ON_GPU = {
    "gpu": {"memory_budget": "590MB"},
    "far": {"memory_budget": "620MB", "host_budget": "64MB", "dense_below": 600},
}
MOST = 24  # that are there at once


@dataclass
class Asked:
    prompt: list[int]
    tokens: int


@dataclass
class Found:
    requests: int = 0
    aborted: int = 0
    steps: int = 0
    differ: list[str] = field(default_factory=list)
    preemptions: float = 0
    errors: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    grown_mb: int = 0  # of the process, after its first fifth


def requests(chance: random.Random) -> list[Asked]:
    documents = [[chance.randrange(3, 1900) for _ in range(900)] for _ in range(3)]
    made = []
    for _ in range(KINDS):
        own = [chance.randrange(3, 1900) for _ in range(int(3 * 500 ** chance.random()))]
        begin = chance.choice(documents)[: chance.randrange(0, 900)]
        made.append(Asked((begin if chance.random() < 0.5 else []) + own, chance.randrange(1, 24)))
    return made


def alone(engine: Engine, asked: list[Asked]) -> list[Any]:
    for number, one in enumerate(asked):
        engine.add(f"alone{number}", one.prompt, one.tokens)
        engine.steps()
        assert engine.llm.reset_prefix_cache()
    return [engine.done[f"alone{number}"][0] for number in range(len(asked))]


def soak(
    engine: Engine,
    asked: list[Asked],
    right: list[Any],
    seconds: float,
    chance: random.Random,
    found: Found,
) -> None:
    """For so long, then until all are done."""
    live: dict[str, int] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end or live:
        coming = time.monotonic() < end
        while coming and len(live) < MOST and chance.random() < 0.5:
            number, name = chance.randrange(KINDS), f"r{found.requests}"
            priority = chance.randrange(3)
            engine.add(name, asked[number].prompt, asked[number].tokens, priority)
            live[name] = number
            found.requests += 1
        if live and chance.random() < 0.02:
            name = chance.choice(list(live))
            engine.engine.abort_request([name])
            del live[name]
            found.aborted += 1
        if chance.random() < 0.002:
            engine.llm.reset_prefix_cache()
        engine.steps(1)
        found.steps += 1
        for name in [name for name in live if name in engine.done]:
            number = live.pop(name)
            if any(tokens != right[number] for tokens in engine.done.pop(name)):
                found.differ.append(f"{name}: {len(asked[number].prompt)} tokens in")


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def at_rest(engine: Engine, cache: Any) -> Any:
    """What the engine holds once nobody asks for anything."""
    assert engine.llm.reset_prefix_cache()
    engine.add("last", [3, 4, 5], 1)  # a step, which the workers are told in
    engine.steps()
    assert engine.llm.reset_prefix_cache()
    for _ in range(10):
        engine.engine.step()
    return cache.stats()


def run(arguments: dict[str, Any], seconds: float, seed: int = 7) -> Found:
    from pariskv_core.vllm import ranks

    engine = Engine(arguments)
    place = ranks.of(engine.engine.vllm_config)
    assert place is not None
    cache = place.rank.cache
    chance, found = random.Random(seed), Found()
    asked = requests(chance)
    right = alone(engine, asked)
    # Room that a load needs once, whatever comes later.
    soak(engine, asked, right, 0.2 * seconds, chance, found)
    begin, memory = at_rest(engine, cache).memory.live, resident()
    soak(engine, asked, right, 0.8 * seconds, chance, found)
    found.grown_mb = (resident() - memory) >> 20
    metrics = engine.llm.get_metrics()
    name = "vllm:num_preemptions"
    found.preemptions = sum(metric.value for metric in metrics if metric.name == name)
    found.errors = engine.errors()
    stats = at_rest(engine, cache)
    found.left = {
        "sequences": len(cache.sequences()),
        "row_bytes": stats.row_bytes,
        "live_bytes": stats.memory.live - begin,
    }
    return found


def wrong(found: Found, kind: str) -> bool:
    errors = found.errors["lost"] + found.errors["restarts"]
    idle = found.requests - found.aborted < KINDS / 4
    differ = bool(found.differ) and kind != "far"
    return bool(idle or differ or errors or any(found.left.values()))


def main() -> None:
    from conftest import EXACT, asked_for, small_engine
    from tiny_models import make_mixed, make_tiny

    seconds, model, kind = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if kind == "mixed":
        make_mixed(model, "gemma3")
    else:
        make_tiny(model)
    arguments: dict[str, Any] = {**small_engine(model), "scheduling_policy": "priority"}
    settings: dict[str, Any] = dict(EXACT)
    if kind == "mixed":
        settings["memory_budget"] = "18MB"
    elif kind in ON_GPU:
        settings.update(ON_GPU[kind])
        arguments |= {"enforce_eager": False, "compilation_config": GRAPHS}
    if kind != "plain":
        del arguments["num_gpu_blocks_override"]
    found = run({**arguments, **asked_for(settings)}, seconds)
    print(json.dumps(asdict(found), indent=1))
    sys.exit(1 if wrong(found, kind) else 0)


if __name__ == "__main__":
    main()
