"""A shared document, served: `vllm serve` and its own `bench serve`, with the engine or without.

    python integrations/vllm/bench/serve.py ours --model MODEL
    python integrations/vllm/bench/serve.py stock --model MODEL --answers 128

Every question is about one document, which a request before has computed, and all are asked at
once. Weights may be dummies, which is the default. Other options are those of `vllm serve`. What
`bench serve` prints is printed, and with the engine what it has counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import GRAPHS
from pariskv_core.cli.vllm import command as with_engine

PROGRAM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
# What `vllm serve` runs: its own command line wants a distribution by the name of vllm.
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
CHUNK = 480  # tokens that `timed_trace` makes of one hash


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=["ours", "stock"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--document", type=int, default=120_000, help="tokens")
    parser.add_argument("--question", type=int, default=128, help="tokens of one")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--answers", type=int, default=512, help="tokens of one")
    parser.add_argument("--port", type=int, default=8111)
    chosen, chosen.options = parser.parse_known_args()
    chosen.longest = chosen.document + chosen.question + chosen.answers + CHUNK
    chosen.sequences, chosen.defaults = chosen.questions, False
    return chosen


def fetch(port: int, page: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=20) as answer:
        return str(answer.read().decode())


@contextlib.contextmanager
def served(
    chosen: argparse.Namespace, engine: str, log: Path, settings: dict[str, Any] | None = None
) -> Iterator[None]:
    """A server, until it is not needed any more. chosen: model, load_format, port, longest,
    sequences, defaults, options. settings: of our engine."""
    command = [*SERVER, "--model", chosen.model, "--load-format", chosen.load_format]
    command += ["--served-model-name", "m", "--port", str(chosen.port)]
    command += ["--max-model-len", str(chosen.longest), "--max-num-seqs", str(chosen.sequences)]
    command += [] if chosen.defaults else ["--compilation-config", json.dumps(GRAPHS)]
    command += with_engine(chosen.model, settings or {}, [])[3:] if engine == "ours" else []
    command += chosen.options
    with log.open("w") as written:
        server = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise SystemExit(f"the server did not start: {log.read_text()[-3000:]}")
            with contextlib.suppress(OSError):
                fetch(chosen.port, "health")
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"the server is not up after 300 s: {log.read_text()[-3000:]}")
        yield
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def trace(chosen: argparse.Namespace, path: Path) -> None:
    """Requests whose first hashes are the same: the document."""
    shared = list(range(chosen.document // CHUNK))
    lines = [
        json.dumps(
            {
                "timestamp": 0,
                "input_length": len(shared) * CHUNK + chosen.question,
                "output_length": chosen.answers,
                "hash_ids": [*shared, 100_000 + number],
            }
        )
        for number in range(chosen.questions)
    ]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    chosen = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace(chosen, folder / "trace.jsonl")
        with served(chosen, chosen.engine, folder / "log"):
            command = [*PROGRAM, "bench", "serve", "--backend", "vllm", "--model", "m"]
            command += ["--tokenizer", chosen.model, "--port", str(chosen.port)]
            command += ["--dataset-name", "timed_trace", "--dataset-path", f"{folder}/trace.jsonl"]
            command += ["--timed-trace-chunk-hash-size", str(CHUNK), "--num-warmups", "1"]
            command += ["--num-prompts", str(chosen.questions), "--temperature", "0"]
            # Texts come of hashes of Python's: the same in both engines.
            subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, check=True)
            metrics = fetch(chosen.port, "metrics").splitlines()
            print(*(line for line in metrics if line.startswith("vllm:pariskv_")), sep="\n")


if __name__ == "__main__":
    main()
