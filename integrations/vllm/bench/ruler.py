"""RULER's tasks through servers: stock vLLM, and one with the engine for each setting.

    pariskv eval MODEL --make-only --prompts SAMPLES
    python integrations/vllm/bench/ruler.py --model MODEL --prompts SAMPLES --out FOLDER

Prompts and table are those of `pariskv eval` (docs/eval.md), whose client asks each server. Servers
run one after the other, or --at-once; then each needs its own share of the GPU, as in
`--at-once 4 --gpu-memory-utilization .2 --engine '{"host_budget": "8GB"}'`. What was answered is
kept in FOLDER, and the same command goes on there. The setting `again` is stock vLLM once more:
what its answers differ in is chance, by other requests beside them in a batch. Other options are
those of `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pariskv_core.cli import evaluate_prompts, evaluate_settings
from pariskv_core.cli.failures import CannotRunError
from pariskv_core.evaluation.record import FULL
from serve import served

EVAL = [sys.executable, "-m", "pariskv_core", "eval"]
AGAIN = "again"
STOCK = (FULL, AGAIN)
# Of one answer, in bytes: its text, what is right, its errors.
ANSWER = 700


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--settings", nargs="+", default=[FULL, "default", "error=.01", "int8", "published"]
    )
    parser.add_argument("--lengths", nargs="+", type=int, help="(all that there are)")
    parser.add_argument("--tasks", nargs="+", default=["ruler"])
    parser.add_argument("--samples", type=int, help="of each task and length, as they were made")
    parser.add_argument("--requests", type=int, default=64, help="at once, to each server")
    parser.add_argument("--at-once", type=int, default=1, help="servers")
    parser.add_argument("--port", type=int, default=8113, help="of the first server")
    parser.add_argument("--engine", type=json.loads, default={}, help="settings of each engine")
    parser.add_argument(
        "--dense-below",
        type=int,
        default=2048,
        help="tokens from which a request is searched (2048: all of RULER's)",
    )
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--defaults", action="store_true", help="compiled, as vLLM does by itself")
    chosen, chosen.options = parser.parse_known_args()
    chosen.sequences = chosen.requests
    return chosen


def asked(chosen: argparse.Namespace) -> list[str]:
    """Options of `eval` that choose samples."""
    options = ["--prompts", str(chosen.prompts), "--tasks", *chosen.tasks]
    if chosen.lengths:
        options += ["--lengths", *map(str, chosen.lengths)]
    return options + (["--samples", str(chosen.samples)] if chosen.samples else [])


def answered(chosen: argparse.Namespace, number: int, name: str) -> Path:
    """The result of one setting. Its server writes a log, and so does the client."""
    folder: Path = chosen.out / name
    folder.mkdir(parents=True, exist_ok=True)
    own = argparse.Namespace(**{**vars(chosen), "port": chosen.port + number})
    settings = None
    if name not in STOCK:
        own_settings = evaluate_settings.parse(name).served
        settings = {**own_settings, "dense_below": chosen.dense_below, **chosen.engine}
    begin = time.monotonic()
    with served(own, "stock" if name in STOCK else "ours", folder / "server.log", settings):
        up = time.monotonic()
        command = [*EVAL, "--server", f"http://127.0.0.1:{own.port}", "--name", name]
        command += ["--requests", str(chosen.requests), "--out", str(folder), *asked(chosen)]
        with (folder / "eval.log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{name}: {(folder / 'eval.log').read_text()[-2000:]}")
    took = time.monotonic() - up
    print(f"{name}: up after {up - begin:.0f} s, all answered {took:.0f} s later", flush=True)
    return folder / "result.json"


def main() -> None:
    chosen = arguments()
    try:
        for name in chosen.settings:  # what a server would refuse when it starts
            if name not in STOCK:
                evaluate_settings.parse(name)
        own = (chosen.prompts, chosen.tasks, chosen.lengths, chosen.samples)
        found = evaluate_prompts.in_folder(*own).files
    except CannotRunError as reason:
        raise SystemExit(str(reason)) from None
    chosen.longest = max(each.longest for each in found)
    each = sum(one.count for one in found)
    tokens = sum(one.count * one.length for one in found)
    total = each * len(chosen.settings)
    print(
        f"{total:,} answers of {len(chosen.settings)} settings, at most {tokens / 1e6:,.1f} "
        f"million tokens of prompts for each; {total * ANSWER / 1e6:,.1f} MB in {chosen.out}",
        flush=True,
    )
    with ThreadPoolExecutor(chosen.at_once) as pool:
        jobs = [
            pool.submit(answered, chosen, number, name)
            for number, name in enumerate(chosen.settings)
        ]
        results = [str(job.result()) for job in jobs]
    subprocess.run([*EVAL, "--compare", *results, "--out", str(chosen.out)], check=True)


if __name__ == "__main__":
    main()
