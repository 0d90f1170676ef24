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
import torch
from tiny_models import make_tiny

HERE = Path(__file__).resolve().parent
GRACE = 1200  # seconds that an engine may take
CONNECTOR = {"kv_connector": "ParisKV", "kv_role": "kv_both"}
EXACT = {"dense_below": 1 << 20}
BLOCK = 64
ON_GPU = torch.cuda.is_available()
TIE = 0.15  # of logarithms of probabilities: some roundings of a logit
TOKENS_A_TIE = 50  # of so many tokens one may be tied

Job = Callable[..., dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu(reason): see tests/python/conftest.py")
    config.addinivalue_line("filterwarnings", "default")  # vLLM's own are many


def environment(ranks: int = 1) -> dict[str, str]:
    own = {
        **os.environ,
        **({} if ON_GPU else {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
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
    asked.write_text(json.dumps({"gaps": ON_GPU, **job}))
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


def check_same(ours: dict[str, Any], stock: dict[str, Any], work: str) -> None:
    """Greedy tokens of one kind of work are stock vLLM's. Kernels of a GPU round in 16 bits, by
    how a step is cut: there an answer may part from stock's where two tokens are all but tied."""
    if not ON_GPU:
        assert ours[work] == stock[work], work
        return
    if work == "samples":  # a draw turns anywhere
        return
    pairs = list(zip(ours["answers"][work], stock["answers"][work], strict=True))
    # A prompt that goes on with an answer is another one where that has parted.
    pairs = [(mine, theirs) for mine, theirs in pairs if mine["prompt"] == theirs["prompt"]]
    leads, compared = [], 0
    for mine, theirs in pairs:
        both = list(zip(mine["tokens"], theirs["tokens"], theirs["gaps"], strict=False))
        parted = next((place for place, (own, other, _) in enumerate(both) if own != other), None)
        if parted is None:  # where they have parted they may end apart as well
            assert len(mine["tokens"]) == len(theirs["tokens"]), work
            compared += len(both)
            continue
        leads.append(both[parted][2])
        compared += parted + 1
    assert max(leads, default=0) < TIE, (work, leads)
    assert len(leads) <= compared // TOKENS_A_TIE, (work, leads, compared)


def need_gpus(ranks: int) -> None:
    """Skips a test of more ranks than there are GPUs, where these are in use."""
    if ON_GPU and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")


def check_nothing_is_left(begin: dict[str, Any], after: dict[str, Any]) -> None:
    """Of a rank's memory, after a reset."""
    assert begin["sequences"] == 0 == after["sequences"]
    assert after["row_bytes"] == 0
    if not ON_GPU:  # where the first step's scratch stays
        assert after["live_bytes"] == begin["live_bytes"]


def small_engine(model: Path) -> dict[str, Any]:
    """Arguments of vllm.LLM. Several run beside each other on a GPU, and stock vLLM takes what it
    is given there."""
    return {
        **({"gpu_memory_utilization": 0.2} if ON_GPU else {}),
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2560,
        "kv_cache_memory_bytes": 1 << 30 if ON_GPU else 256 << 20,
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
    if ON_GPU:
        settings = {"memory_budget": "1GB", "host_budget": "256MB", **settings}
        chosen: dict[str, Any] = {
            "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}
        }
    else:
        chosen = {"attention_backend": "CUSTOM"}  # on a CPU vLLM has a word of its own for it
    return {
        **chosen,
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
