"""Engines of vLLM, with the plugin and without: tiny models, and a pretrained one.

`make test-vllm` makes the environment and runs these tests.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny

HERE = Path(__file__).resolve().parent
GRACE = 1200  # seconds that an engine may take
CONNECTOR = {"kv_connector": "ParisKV", "kv_role": "kv_both"}
EXACT = {"dense_below": 1 << 20}
BLOCK = 64

Job = Callable[..., dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu(reason): see tests/python/conftest.py")
    config.addinivalue_line("filterwarnings", "default")  # vLLM's own are many


def environment(ranks: int = 1) -> dict[str, str]:
    own = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of the tests run in the workers
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "site"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        own["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(ranks)
        )
    return own


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def run(
    job: dict[str, Any],
    folder: Path,
    *,
    ranks: int = 1,
    program: str = "engine.py",
    **variables: str,
) -> dict[str, Any]:
    asked, done, log = folder / "job.json", folder / "done.json", folder / "log"
    asked.write_text(json.dumps(job))
    with log.open("w") as written:
        code = subprocess.run(
            [sys.executable, str(HERE / program), str(asked), str(done)],
            env={**environment(ranks), **variables},
            stdout=written,
            stderr=subprocess.STDOUT,
            timeout=GRACE,
            check=False,
        ).returncode
    assert code == 0, log.read_text()[-6000:]
    return dict(json.loads(done.read_text()))


def small_engine(model: Path) -> dict[str, Any]:
    """Arguments of vllm.LLM."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2560,
        "kv_cache_memory_bytes": 256 << 20,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 42,  # a request of 2,560 tokens, and not much more
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "seed": 1,
        "disable_log_stats": False,
    }


def asked_for(settings: dict[str, Any]) -> dict[str, Any]:
    """Further ones: the plugin's two options and its settings. Runs that are compared repeat: their
    sample is no secret."""
    other = settings.get("policy", "pariskv") != "pariskv"
    return {
        "attention_backend": "CUSTOM",  # on a CPU vLLM has a word of its own for it
        "kv_transfer_config": CONNECTOR,
        "additional_config": {"pariskv": settings if other else {"seed": 42, **settings}},
    }


@pytest.fixture(scope="session")
def smollm() -> Path:
    from pariskv_core.cli import weights

    folder = weights.cache_folder() / "vllm/smollm2"
    if not (folder / "model.safetensors").exists():
        subprocess.run([sys.executable, str(HERE / "pretrained.py"), str(folder)], check=True)
    return folder


WORK = ["ragged", "ragged_again", "shared", "samples", "stopped", "preempted", "aborted", "many"]
WORK += ["reset"]


@pytest.fixture(scope="session")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What an engine with few blocks makes of all the work; each kind of engine runs once."""

    @functools.cache
    def made(
        *,
        plugin: bool,
        ranks: int = 1,
        plugins: str | None = None,
        asynchronous: bool = False,
    ) -> dict[str, Any]:
        arguments = {**small_engine(tiny), "tensor_parallel_size": ranks}
        if plugin:
            arguments.update(asked_for(EXACT))
        variables = {} if plugins is None else {"VLLM_PLUGINS": plugins}
        folder = tmp_path_factory.mktemp("engine")
        job = {"engine": arguments, "work": WORK, "asynchronous": asynchronous}
        return run(job, folder, ranks=ranks, **variables)

    return made
